"""A command run in a mounted image by an OCI runtime: a real container, without an engine around it."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

from omniload.base.errors import ConfigError, StateError
from snapshot.engines import runtime_entering
from snapshot.engines.bundle import RUNTIMES, bundle_config, held_capabilities, runtime_words
from snapshot.image.starting import Enter, Start, forwarding

__all__ = ["entry_by", "run_container"]


def entry_by(runtime: str) -> Enter:
    """Return what runs a command in a prepared folder by a runtime.

    Raises:
        ConfigError: There is no such runtime, or it is not installed.
    """
    if runtime not in RUNTIMES:
        raise ConfigError(f"runtime {runtime!r} is not one of {', '.join(RUNTIMES)}")
    if shutil.which(runtime) is None:
        raise ConfigError(f"{runtime} is not installed; install the package {runtime}")
    return partial(run_container, runtime)


def run_container(
    runtime: str, place: Path, start: Start, ids: tuple[int, int], entered: Callable[[], None]
) -> int:
    """Run a command in a container; return its exit code, 128 + N for signal N.

    Signals go to the runtime, which passes them on; the second of those that ask it to end kills it.

    Args:
        runtime: Program.
        place: Folder with ``image``, ``upper``, ``work`` and ``root``; the bundle is made of it.
        start: What is run.
        ids: Numbers of its user and group.
        entered: Called when it is started.

    Raises:
        StateError: The overlay cannot be mounted.
    """
    held = held_capabilities(Path("/proc/self/status").read_text(encoding="ascii"))
    config = bundle_config(start, ids, held, place.name)
    (place / "config.json").write_text(json.dumps(config), encoding="utf-8")
    words = runtime_words(runtime, place.name)
    told, telling = os.pipe()
    line = [sys.executable, "-I", runtime_entering.__file__, str(telling), place.name, *words]
    process = subprocess.Popen(line, cwd=place, pass_fds=[telling])  # noqa: S603 -- our own file
    os.close(telling)
    with os.fdopen(told, "rb") as pipe:
        said = sorted(pipe.readlines(), key=lambda text: not text.strip().isdigit())
    if b"done\n" not in said:
        code = process.wait()
        why = b"".join(said[1:] or said).decode(errors="replace").strip()
        raise StateError(
            f"no root file system could be made in {str(place.parent)!r}: {why or f'exit code {code}'}; "
            "give --scratch a folder on a disk or tmpfs, not on an overlay"
        )
    entered()
    with forwarding(int(said[0])):
        return process.wait()

"""The interpreter of an environment, and its description of itself."""

import hashlib
import json
import os
import platform
import re
import subprocess
import sys
import sysconfig
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from inspect import getsource
from pathlib import Path
from typing import Any, NamedTuple

from omniload.base.errors import ConfigError
from snapshot.env.format.entries import Target

__all__ = [
    "Base",
    "Interpreter",
    "base_of",
    "canonical_name",
    "environment_of",
    "find_python",
    "installed_in",
    "probe",
    "shown",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Interpreter:
    """An interpreter's description of itself."""

    executable: str
    prefix: str
    """Root of the environment."""
    purelib: str
    platlib: str
    scripts: str
    identity: Mapping[str, str]
    """Facts that decide which wheels fit, from the version to the C library: the key's part about the machine."""

    @property
    def targets(self) -> tuple[str, ...]:
        """Directories that an installation changes."""
        return (self.purelib, self.platlib, self.scripts)


def find_python(named: str | None, environment: Mapping[str, str] = os.environ) -> str:
    """Return the named interpreter, or that of the named environment's root; else that of the active environment.

    Raises:
        ConfigError: There is none.
    """
    active = named or environment.get("VIRTUAL_ENV") or environment.get("CONDA_PREFIX")
    path = Path(active or sys.executable)
    try:
        if path.is_dir():
            path = path / "bin" / "python"
        if not path.is_file():
            raise ConfigError(f"{path}: no interpreter there; give --python an interpreter")
    except OSError as error:
        raise ConfigError(
            f"{path}: user {os.geteuid()} may not look there ({error.strerror}); open the folders "
            "above it, or give --python another interpreter"
        ) from error
    return os.path.abspath(path)  # noqa: PTH100 -- resolve() would leave the environment


def _description() -> dict[str, object]:
    """Return the folders into which this interpreter installs, and the facts that decide which wheels fit."""
    paths = sysconfig.get_paths()
    return {
        "executable": sys.executable,
        "prefix": sys.prefix,
        "purelib": paths["purelib"],
        "platlib": paths["platlib"],
        "scripts": paths["scripts"],
        "identity": {
            "implementation": platform.python_implementation(),
            "version": platform.python_version(),
            "cache_tag": sys.implementation.cache_tag or "",
            "soabi": sysconfig.get_config_var("SOABI") or "",
            "abiflags": getattr(sys, "abiflags", ""),
            "platform": sysconfig.get_platform(),
            "machine": platform.machine(),
            "libc": " ".join(platform.libc_ver()).strip() or "unknown",
        },
    }


def probe(python: str) -> Interpreter:
    """Ask an interpreter about itself.

    Raises:
        ConfigError: It does not run.
    """
    described: dict[str, Any]
    try:
        if python == sys.executable:  # another process would cost 20 to 30 ms
            described = _description()
        else:
            # Pass text, not a file: the interpreter there has only its own library, and none of our modules.
            asked = f"{getsource(_description)}print(json.dumps(_description()))"
            # Isolated, so that neither the current directory nor PYTHONPATH affects the answer.
            words = [python, "-I", "-c", f"import json, platform, sys, sysconfig\n{asked}"]
            done = subprocess.run(words, capture_output=True, text=True, check=True, timeout=60)  # noqa: S603 -- the user's own
            described = json.loads(done.stdout)
        return Interpreter(**described)
    except (OSError, subprocess.SubprocessError, ValueError, TypeError) as error:
        raise ConfigError(f"{python}: cannot be asked about itself: {error}") from error


def environment_of(interpreter: Interpreter, environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables for a command of this environment: the given ones, with the environment's bin first."""
    given = dict(environment)
    given["PATH"] = os.pathsep.join([interpreter.scripts, given.get("PATH", os.defpath)])
    # The variable would send this interpreter to the library of another.
    given.pop("PYTHONHOME", None)
    given.pop("VIRTUAL_ENV", None)  # of another environment, into which uv would install
    if (Path(interpreter.prefix) / "pyvenv.cfg").is_file():
        given["VIRTUAL_ENV"] = interpreter.prefix
    return given


_DISTRIBUTION = re.compile(r"^(?P<name>.+?)-(?P<version>[^-]+)(?:-.*)?\.(?:dist|egg)-info$")


class Base(NamedTuple):
    """The content of an environment before the command."""

    image: str
    """Digest of the image that holds the environment; empty if none was given."""
    installed: str
    """Digest of the names and versions of the installed distributions."""


def installed_in(targets: Sequence[Target]) -> tuple[str, ...]:
    """Return ``name==version`` of the distributions in the targets, sorted."""
    found = set()
    for target in targets:
        try:
            names = os.listdir(target.path)  # noqa: PTH208 -- names, and fast
        except (FileNotFoundError, NotADirectoryError):
            continue
        for name in names:
            if match := _DISTRIBUTION.match(name):
                found.add(shown(f"{canonical_name(match['name'])}=={match['version']}"))
    return tuple(sorted(found))


def base_of(image: str, installed: Iterable[str]) -> Base:
    """Return the base from an image's digest and the installed distributions."""
    total = hashlib.sha256("\n".join(sorted(installed)).encode("utf-8", "surrogateescape"))
    return Base(image, total.hexdigest())


def canonical_name(name: str) -> str:
    """Return the canonical spelling of a distribution's name: ``Foo.Bar__baz`` is ``foo-bar-baz``.

    Source:
        PEP 503.
    """
    return re.sub(r"[-_.]+", "-", name).lower()


def shown(text: str) -> str:
    """Return a path in a form that JSON can hold: bytes that are not UTF-8 are spelled out."""
    return text.encode("utf-8", "backslashreplace").decode()

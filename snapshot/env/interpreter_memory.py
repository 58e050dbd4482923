"""What interpreters said of themselves, as long as the files they said it from stay the same.

A question costs the start of an interpreter, more than a mounted restore costs altogether.
An answer lies in ``<node cache>/interpreters/<SHA-256>.json``, named by all that tells one
interpreter from another before it runs: its path, what that leads to, the bytes of
``pyvenv.cfg`` beside it, and the few variables and properties of the machine it heeds. Its
witnesses are the files of the interpreter: size, time and inode of each must be what they were.
"""

import hashlib
import json
import os
import stat
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

__all__ = ["VERSION", "Memory"]

VERSION = 1
_HEEDED: tuple[str, ...] = (
    "PYTHONHOME",
    "PYTHONPLATLIBDIR",
    "_PYTHON_HOST_PLATFORM",
    "DEB_PYTHON_INSTALL_LAYOUT",
)
_HEEDED += ("_PYTHON_SYSCONFIGDATA_NAME", "_PYTHON_PROJECT_BASE")
"""Variables that change where an interpreter installs."""


class Memory:
    """The answers in a folder. None is kept or believed that another user could write."""

    def __init__(self, cache: Path, program: str) -> None:
        """Remember in a node cache, which need not be there.

        Args:
            cache: The node cache.
            program: File that asks; a newer one may ask for more.
        """
        self._folder = cache / "interpreters"
        self._program = program

    def recall(self, python: str) -> dict[str, str] | None:
        """Return what an interpreter said, or ``None`` where that may not hold any more."""
        try:
            path = self._path(python)
            if not (_is_ours(self._folder) and _is_ours(path)):
                return None
            kept = json.loads(path.read_bytes())
            known: dict[str, str] = kept["description"]
            seen = [_seen(witness) for witness, *_ in kept["witnesses"]]
            return known if kept["version"] == VERSION and seen == kept["witnesses"] else None
        except (OSError, ValueError, KeyError, TypeError):
            return None  # not there, or not whole: asking is always right

    def keep(self, python: str, description: dict[str, str], witnesses: Sequence[str]) -> None:
        """Keep an answer, if that can be; a start does not depend on it."""
        with suppress(OSError):
            path = self._path(python)
            self._folder.mkdir(mode=0o755, parents=True, exist_ok=True)
            if not _is_ours(self._folder):
                return
            seen = [_seen(witness) for witness in [self._program, *witnesses]]
            kept = {"version": VERSION, "description": description, "witnesses": seen}
            new = path.with_name(f"{path.name}.{os.getpid()}")
            new.touch(mode=0o644)  # whatever the umask: a group that may write is not believed
            new.write_text(json.dumps(kept), encoding="utf-8")
            new.replace(path)

    def _path(self, python: str) -> Path:
        total = hashlib.sha256()
        for part in (os.fsencode(self._program), *_identity(python)):
            total.update(len(part).to_bytes(8, "little") + part)
        return self._folder / f"{total.hexdigest()}.json"


def _identity(python: str) -> Iterator[bytes]:
    """Yield what tells one interpreter from another before it runs."""
    yield os.fsencode(os.path.abspath(python))  # noqa: PTH100 -- resolve() would leave the environment
    yield os.fsencode(os.path.realpath(python))
    for folder in (Path(python).parent, Path(python).parent.parent):
        try:
            yield (folder / "pyvenv.cfg").read_bytes()
        except FileNotFoundError:
            yield b""
    yield os.uname().machine.encode()
    yield (os.confstr("CS_GNU_LIBC_VERSION") or "" if hasattr(os, "confstr") else "").encode()
    for name in _HEEDED:
        yield os.environb.get(name.encode(), b"")


def _seen(path: str) -> list[str | int]:
    seen = os.stat(path)  # noqa: PTH116 -- the path may be any text
    return [path, seen.st_size, seen.st_mtime_ns, seen.st_ino]


def _is_ours(path: Path) -> bool:
    """Tell whether nobody else could have written a file, or put one into a folder."""
    seen = path.stat()
    return seen.st_uid in {0, os.geteuid()} and not stat.S_IMODE(seen.st_mode) & 0o022

"""Look at what lies in the target directories."""

import os
import stat as stat_bits
from collections.abc import Sequence

from omniload.base.errors import ConfigError
from snapshot.env.format.entries import Kind, Place, Seen, Target

__all__ = ["OWN_FOLDER", "Scan", "scan", "targets_of"]

OWN_FOLDER = ".omniload-env"
"""Where a restore keeps its stage and its record, in the prefix and in each target; never captured."""


class Scan(dict[Place, Seen]):
    """What was seen by target and path; ``special`` names what a snapshot cannot hold."""

    def __init__(self) -> None:
        super().__init__()
        self.special: list[str] = []
        """Paths of devices, sockets and pipes."""


def targets_of(prefix: str, paths: Sequence[str]) -> tuple[Target, ...]:
    """Name the directories whose changes are captured, in order of their names.

    A directory inside another of them is part of that one.

    Raises:
        ConfigError: One holds the whole prefix, where the record of a restore lies.
    """
    real = sorted({os.path.realpath(path) for path in paths})
    home = os.path.realpath(prefix)
    outer: list[str] = []
    for path in real:
        if home == path or home.startswith(path.rstrip("/") + "/"):
            raise ConfigError(
                f"target {path!r} holds the whole prefix {home!r}; name the folders in it instead"
            )
        if not any(path.startswith(above.rstrip("/") + "/") for above in outer):
            outer.append(path)
    named = (Target(_name_of(home, path), path) for path in outer)
    return tuple(sorted(named))


def scan(targets: Sequence[Target]) -> Scan:
    """Look at every path of the targets; links are not followed.

    Returns:
        What was seen. A target that does not exist holds nothing.
    """
    found = Scan()
    for number, target in enumerate(targets):
        try:
            found[number, ""] = _seen(Kind.DIRECTORY, os.lstat(target.path))
        except FileNotFoundError:
            continue
        _scan_folder(found, number, target.path, "")
    return found


def _scan_folder(found: Scan, number: int, folder: str, path: str) -> None:
    """Look into one directory; a recursion as deep as the tree, which paths bound to 2048."""
    with os.scandir(folder) as items:
        for item in items:
            if item.name == OWN_FOLDER:
                continue
            below = f"{path}/{item.name}" if path else item.name
            try:
                details = item.stat(follow_symlinks=False)
            except FileNotFoundError:
                continue  # removed since it was listed
            kind = _kind_of(details.st_mode)
            if kind is None:
                found.special.append(item.path)
                continue
            found[number, below] = _seen(kind, details)
            if kind is Kind.DIRECTORY:
                _scan_folder(found, number, item.path, below)


def _kind_of(mode: int) -> Kind | None:
    if stat_bits.S_ISREG(mode):
        return Kind.FILE
    if stat_bits.S_ISDIR(mode):
        return Kind.DIRECTORY
    return Kind.LINK if stat_bits.S_ISLNK(mode) else None


def _seen(kind: Kind, details: os.stat_result) -> Seen:
    size = details.st_size if kind is Kind.FILE else 0
    mode = stat_bits.S_IMODE(details.st_mode)
    return Seen(kind, mode, size, details.st_mtime_ns, details.st_ino, details.st_ctime_ns)


def _name_of(home: str, path: str) -> str:
    return os.path.relpath(path, home) if path.startswith(home.rstrip("/") + "/") else path

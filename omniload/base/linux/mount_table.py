"""The kernel's list of mounts, as a process sees it."""

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

__all__ = [
    "Mount",
    "fuse_mount_at",
    "mount_point",
    "mounts_everywhere",
    "mounts_here",
    "parse_mounts",
]

_MOST_LINKS = 40
"""Number of links that the kernel follows."""


class Mount(NamedTuple):
    """A line of the list."""

    path: str
    kind: str
    """Type of the file system: ``overlay``, ``fuse.omniload`` and the like."""
    source: str
    options: str
    device: str = ""
    """Number of its device, such as ``0:41``."""


def mounts_here(process: Path = Path("/proc/self")) -> list[Mount]:
    """Return the mounts of a process; names may have any bytes. A dead mount is listed without being accessed."""
    return parse_mounts(os.fsdecode((process / "mountinfo").read_bytes()))


def mount_point(path: str | os.PathLike[str]) -> str:
    """Return the absolute real path of a mount point, without accessing what is mounted there.

    ``os.path.realpath`` accesses it, and never returns if the process behind the mount is stopped.
    """
    where = os.path.abspath(path)  # noqa: PTH100 -- resolve() would ask
    for _ in range(_MOST_LINKS):
        above, name = os.path.split(where)
        if name in {"", ".", ".."}:
            return os.path.realpath(where)
        where = os.path.join(os.path.realpath(above), name)  # noqa: PTH118
        try:
            # The kernel knows without asking the mount that the root of a mount is not a link.
            where = os.path.join(os.path.dirname(where), os.readlink(where))  # noqa: PTH115, PTH118, PTH120
        except OSError:
            return where
    return where


def fuse_mount_at(path: str) -> Mount | None:
    """Return the uppermost FUSE mount at an absolute real path, or None, without accessing the mount itself."""
    found = [each for each in mounts_here() if each.path == path and each.kind.startswith("fuse")]
    return found[-1] if found else None


def mounts_everywhere(
    processes: Path = Path("/proc"),
) -> Iterator[tuple[Path, list[Mount] | None]]:
    """Yield a process of each mount namespace with its mounts, because containers hold copies of mounts.

    Args:
        processes: The folder that shows processes.

    Yields:
        The process's folder, and its mounts; ``None`` if this user may not read them.
    """
    asked = set[str]()
    for folder in sorted(processes.glob("[0-9]*"), key=lambda path: int(path.name)):
        try:
            namespace = os.readlink(folder / "ns" / "mnt")  # noqa: PTH115
            if namespace in asked:
                continue
            mounts = mounts_here(folder)
        except (FileNotFoundError, ProcessLookupError):
            continue  # it has ended
        except OSError:
            yield folder, None
            continue
        asked.add(namespace)
        yield folder, mounts


def parse_mounts(text: str) -> list[Mount]:
    """Read ``/proc/self/mountinfo``; of several mounts at a path, the last one is visible."""
    found = []
    for line in filter(None, text.split("\n")):
        words = line.split(" ")
        # After the sixth field there are any number of optional fields, up to a single dash.
        rest = words[words.index("-", 6) + 1 :]
        found.append(Mount(_plain(words[4]), rest[0], _plain(rest[1]), _plain(rest[2]), words[2]))
    return found


def _plain(word: str) -> str:
    """Undo the octal escapes of white space and backslashes."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), word)

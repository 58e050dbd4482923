"""The kernel's list of mounts, as a process sees it."""

import os
import re
from pathlib import Path
from typing import NamedTuple

__all__ = ["Mount", "mounts_here", "parse_mounts"]


class Mount(NamedTuple):
    """A line of the list."""

    path: str
    kind: str
    """``overlay``, ``fuse.omniload`` and the like."""
    source: str
    options: str


def mounts_here(process: Path = Path("/proc/self")) -> list[Mount]:
    """Return the mounts of a process; names have any bytes. A dead mount stands there, and is not asked."""
    return parse_mounts(os.fsdecode((process / "mountinfo").read_bytes()))


def parse_mounts(text: str) -> list[Mount]:
    """Read ``/proc/self/mountinfo``; the last mount of a path is the one that is seen."""
    found = []
    for line in filter(None, text.split("\n")):
        words = line.split(" ")
        rest = words[words.index("-", 6) + 1 :]
        found.append(Mount(_plain(words[4]), rest[0], _plain(rest[1]), _plain(rest[2])))
    return found


def _plain(word: str) -> str:
    """Undo the octal escapes of white space and backslashes."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), word)

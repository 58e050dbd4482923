"""What lies in the target directories of an environment, and what a command changed there."""

from collections.abc import Iterable, Mapping, Sequence
from enum import IntEnum
from itertools import pairwise
from typing import NamedTuple

__all__ = [
    "Delta",
    "Entry",
    "Kind",
    "Place",
    "Seen",
    "Target",
    "check_order",
    "difference",
    "parents_of",
]


class Kind(IntEnum):
    """What an entry is. The numbers are those of the manifest."""

    DELETED = 0
    """Was there before the command and is not after it."""
    DIRECTORY = 1
    FILE = 2
    LINK = 3


class Target(NamedTuple):
    """A directory whose changes are captured."""

    name: str
    """Relative to the prefix of the environment where it lies inside, else absolute."""
    path: str
    """Absolute."""


class Seen(NamedTuple):
    """What one ``lstat`` says, as far as a change shows in it."""

    kind: Kind
    mode: int
    size_bytes: int
    mtime_ns: int
    inode: int
    ctime_ns: int
    """Moves with every write and every change of attributes, and no program can set it back."""


class Entry(NamedTuple):
    """One path of a snapshot. A tuple: tens of thousands are made at once."""

    target: int
    """Number of the target."""
    path: str
    """Relative to the target; empty for the target itself."""
    kind: Kind
    mode: int = 0
    """Permission bits; 0 for links and deletions."""
    mtime_ns: int = 0
    size_bytes: int = 0
    digest: bytes = b""
    """SHA-256 of a file's content."""
    link: str = ""
    """Target of a symbolic link, as written."""


Place = tuple[int, str]
"""Number of a target and a path in it."""


class Delta(NamedTuple):
    """What differs between two scans, in order of target and path."""

    changed: tuple[Place, ...]
    """Added or changed, with every directory above."""
    deleted: tuple[Place, ...]
    """Gone; what lay in a directory that is gone is not named again."""


def parents_of(path: str) -> list[str]:
    """Return the directories above ``path``, the target itself (the empty path) last."""
    found = []
    while path:
        path = path.rpartition("/")[0]
        found.append(path)
    return found


def difference(before: Mapping[Place, Seen], after: Mapping[Place, Seen]) -> Delta:
    """Return what a command changed between two scans.

    A file counts as changed when anything that ``lstat`` shows has moved, so a file that was
    written again with the same bytes is captured too: byte code refers to its source's time.

    Returns:
        The delta. Applying it to ``before`` gives ``after`` (but for times of directories
        that hold no change).
    """
    touched = {place for place, seen in after.items() if before.get(place) != seen}
    held = {(number, above) for number, path in touched for above in parents_of(path)}
    gone = before.keys() - after.keys()
    deleted = [place for place in gone if _is_topmost(place, gone, after)]
    return Delta(
        changed=tuple(sorted(touched | (held & after.keys()))), deleted=tuple(sorted(deleted))
    )


def _is_topmost(place: Place, gone: Iterable[Place], after: Mapping[Place, Seen]) -> bool:
    """Return whether nothing above ``place`` is gone or became something else than a directory."""
    number, path = place
    above = parents_of(path)
    if not above:
        return True
    parent = (number, above[0])
    return parent not in gone and (parent not in after or after[parent].kind is Kind.DIRECTORY)


def check_order(entries: Sequence[Entry]) -> bool:
    """Return whether entries stand in order of target and path, each place once."""
    return all((a.target, a.path) < (b.target, b.path) for a, b in pairwise(entries))

"""Entries of the target directories of an environment, the changes of a command, and the entries that are refused.

A manifest comes from a store that others can write to, so nothing in it is used unchecked:

- a path stays below its target: no empty, ``.`` or ``..`` component, no zero byte, not absolute;
- every parent of a path is a directory of the snapshot, never a link or a file;
- a link leads to a place in one of the targets; ``..`` stands only at its front, so that
  no other link can bend it;
- nothing but directories, files and links; no set-uid, set-gid or sticky bits;
- each path occurs once, also on a file system that folds upper and lower case;
- the sizes are within a limit, and nothing may inflate past its stated size.
"""

import posixpath
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from enum import IntEnum
from typing import NamedTuple

from omniload.base.errors import IntegrityError

__all__ = [
    "OWN_FOLDER",
    "Delta",
    "Entry",
    "Kind",
    "Limits",
    "Place",
    "Seen",
    "Target",
    "check_entries",
    "check_link",
    "check_path",
    "difference",
    "parents_of",
]


class Kind(IntEnum):
    """The kind of an entry, by its number in the manifest."""

    DELETED = 0
    """The path existed before the command and does not exist after it."""
    DIRECTORY = 1
    FILE = 2
    LINK = 3


class Target(NamedTuple):
    """A directory whose changes are captured."""

    name: str
    """Path relative to the environment's prefix if it is inside, else absolute."""
    path: str
    """Absolute path."""


class Seen(NamedTuple):
    """The fields of one ``lstat`` that show a change."""

    kind: Kind
    mode: int
    size_bytes: int
    mtime_ns: int
    inode: int
    ctime_ns: int
    """Time that changes with every write and every change of attributes, and that no program can set back."""


class Entry(NamedTuple):
    """One path of a snapshot. A tuple, because tens of thousands are made at once."""

    target: int
    """Number of the target."""
    path: str
    """Path relative to the target; empty for the target itself."""
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
    """The differences of two scans, in order of target and path."""

    changed: tuple[Place, ...]
    """Added or changed paths, and every directory above these and above deleted paths."""
    deleted: tuple[Place, ...]
    """Deleted paths; paths in a deleted directory are not named again."""


def parents_of(path: str) -> list[str]:
    """Return the directories above ``path``; the last is the target itself (the empty path)."""
    found = []
    while path:
        path = path.rpartition("/")[0]
        found.append(path)
    return found


def difference(before: Mapping[Place, Seen], after: Mapping[Place, Seen]) -> Delta:
    """Return the changes of a command between two scans.

    A file counts as changed when anything in its ``lstat`` differs. So a file that was
    written again with the same bytes is captured, too, because byte code refers to the time of its source.

    Returns:
        The delta. Applying it to ``before`` gives ``after`` (except times of directories
        without changes).
    """
    touched = {place for place, seen in after.items() if before.get(place) != seen}
    gone = before.keys() - after.keys()
    deleted = {place for place in gone if _is_topmost(place, gone, after)}
    # A deletion needs the directories above it.
    held = {(number, above) for number, path in touched | deleted for above in parents_of(path)}
    return Delta(
        changed=tuple(sorted(touched | (held & after.keys()))), deleted=tuple(sorted(deleted))
    )


def _is_topmost(place: Place, gone: Iterable[Place], after: Mapping[Place, Seen]) -> bool:
    """Return whether nothing above ``place`` was deleted or became something other than a directory."""
    number, path = place
    above = parents_of(path)
    if not above:
        return True
    parent = (number, above[0])
    return parent not in gone and (parent not in after or after[parent].kind is Kind.DIRECTORY)


# NAME_MAX and PATH_MAX of Linux.
MAX_NAME_BYTES = 255
MAX_PATH_BYTES = 4096
OWN_FOLDER = ".omniload-env"
"""Folder for the stage and the record of a restore, in the prefix and in each target; never captured."""


class Limits(NamedTuple):
    """The limits of one snapshot."""

    raw_bytes: int = 1 << 40
    """Most bytes of all files."""
    entries: int = 4_000_000
    case_pairs: bool = False
    """Whether two paths may differ by case only."""


def check_path(path: str) -> None:
    """Check one path of a snapshot.

    Raises:
        IntegrityError: It could leave its target.
    """
    data = path.encode("utf-8", "surrogateescape")
    if not path or len(data) > MAX_PATH_BYTES or path.startswith("/"):
        raise IntegrityError(f"path {path[:200]!r} is empty, absolute or too long; refused")
    for part in path.split("/"):
        if part in {"", ".", ".."} or "\0" in part:
            raise IntegrityError(f"path {path!r} has the component {part!r}; refused")
        if part == OWN_FOLDER:
            raise IntegrityError(f"path {path!r} reaches for the records of a restore; refused")
        if len(part.encode("utf-8", "surrogateescape")) > MAX_NAME_BYTES:
            raise IntegrityError(
                f"path {path!r} has a name of over {MAX_NAME_BYTES} bytes; refused"
            )


def check_link(entry: Entry, targets: Sequence[Target]) -> None:
    """Check that a symbolic link leads to a place in one of the targets.

    Raises:
        IntegrityError: It leads out, or has ``..`` after a name.
    """
    link = entry.link
    if not link or "\0" in link or len(link.encode("utf-8", "surrogateescape")) > MAX_PATH_BYTES:
        raise IntegrityError(f"link {entry.path!r} -> {link[:200]!r} is empty or too long; refused")
    parts = link.split("/")
    names = [i for i, part in enumerate(parts) if part not in {"", ".", ".."}]
    if names and ".." in parts[names[0] :]:
        # A path that is lexically inside may still leave the target if a link comes before the "..".
        raise IntegrityError(f"link {entry.path!r} -> {link!r} says '..' after a name; refused")
    home = posixpath.dirname(posixpath.join(targets[entry.target].path, entry.path))
    led = posixpath.normpath(posixpath.join(home, link))
    if not any(led == t.path or led.startswith(t.path.rstrip("/") + "/") for t in targets):
        raise IntegrityError(
            f"link {entry.path!r} -> {link!r} leads to {led!r}, outside the targets "
            f"{[t.path for t in targets]}; refused"
        )


def check_entries(
    entries: Sequence[Entry], targets: Sequence[Target], limits: Limits | None = None
) -> None:
    """Check everything that a snapshot would put into an environment.

    Raises:
        IntegrityError: An entry must not be written; the message names the entry and the reason.
    """
    limits = limits or Limits()
    if len(entries) > limits.entries:
        raise IntegrityError(f"{len(entries)} entries, more than {limits.entries}; refused")
    claimed = sum(entry.size_bytes for entry in entries)
    if claimed > limits.raw_bytes:
        raise IntegrityError(
            f"files of {claimed} bytes, more than {limits.raw_bytes}; raise the limit to allow them"
        )
    for entry in entries:
        _check_entry(entry, targets)
    # No place occurs twice, because a manifest with entries out of order is refused when it is read.
    kinds = {(entry.target, entry.path): entry.kind for entry in entries}
    for number, path in kinds:
        if path and kinds.get((number, path.rpartition("/")[0])) is not Kind.DIRECTORY:
            raise IntegrityError(
                f"what lies above {path!r} is no directory of the snapshot; refused"
            )
    if not limits.case_pairs:
        _check_case(kinds)


def _check_entry(entry: Entry, targets: Sequence[Target]) -> None:
    if not 0 <= entry.target < len(targets):
        raise IntegrityError(f"path {entry.path!r} lies in target {entry.target} of {len(targets)}")
    if entry.path or entry.kind is not Kind.DIRECTORY:
        check_path(entry.path)
    if entry.kind not in (Kind.DELETED, Kind.DIRECTORY, Kind.FILE, Kind.LINK):
        raise IntegrityError(f"path {entry.path!r} is of kind {entry.kind}; refused")
    # Set-uid would lend a file the rights of the user who restores it.
    if entry.mode & ~0o777:
        raise IntegrityError(f"path {entry.path!r} has mode {entry.mode:o}; only 777 is allowed")
    if entry.kind is Kind.FILE and (entry.size_bytes < 0 or len(entry.digest) != 32):
        raise IntegrityError(f"path {entry.path!r} has no size or no SHA-256; refused")
    if entry.kind is Kind.LINK:
        check_link(entry, targets)


def _check_case(places: Iterable[tuple[int, str]]) -> None:
    folded: dict[tuple[int, str], str] = {}
    for number, path in places:
        # A file system that folds case may also treat two spellings of an accent as the same name.
        same = (number, path if path.isascii() else unicodedata.normalize("NFC", path))
        same = (number, same[1].casefold())
        other = folded.setdefault(same, path)
        if other != path:
            raise IntegrityError(
                f"paths {other!r} and {path!r} differ by case only; "
                "a file system that folds case would mix them up"
            )

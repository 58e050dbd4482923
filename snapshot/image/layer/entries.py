"""Entries: what a layer says of each path, checked before anything uses it.

Names are text; bytes that are no UTF-8 are kept as lone surrogates, as ``os.fsdecode``
does, so that every name that a file system can hold survives.
"""

from dataclasses import dataclass
from typing import Literal

from omniload.base.errors import IntegrityError

__all__ = [
    "MAX_ENTRIES",
    "MAX_FILE_BYTES",
    "Entry",
    "Extent",
    "Kind",
    "check_entry",
    "clean_path",
]

MAX_ENTRIES = 2_000_000
"""Entries of one layer."""
MAX_FILE_BYTES = 1 << 44
"""Bytes of one file, holes included: what ext4 can hold."""
_MAX_PATH_BYTES = 4095
_MAX_NAME_BYTES = 255
_MAX_XATTRS_BYTES = 1 << 20
_MAX_ID = (1 << 32) - 2  # to chown(2) the last number says that nothing is to change

Kind = Literal["file", "directory", "symlink", "hardlink", "character", "block", "fifo"]


@dataclass(frozen=True, slots=True)
class Extent:
    """A piece of a file that is no hole."""

    file_offset: int
    stream_offset: int
    """Where it lies in the layer's stream of blocks."""
    size_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One path of a layer."""

    path: str
    """Relative to the root, without ``.`` and ``..``; empty for the root itself."""
    kind: Kind
    mode: int = 0
    """Permission bits, set-user-id, set-group-id and sticky."""
    uid: int = 0
    gid: int = 0
    mtime_ns: int = 0
    size_bytes: int = 0
    target: str = ""
    """Of a symbolic link as written; of a hard link a path like ``path``."""
    device: tuple[int, int] = (0, 0)
    """Major and minor number."""
    xattrs: tuple[tuple[str, bytes], ...] = ()
    extents: tuple[Extent, ...] = ()
    """In order and without overlap; what they leave out reads as zeroes."""


def clean_path(name: str, *, layer: str) -> str:
    """Return a path of a layer as we keep it.

    Raises:
        IntegrityError: It is absolute, climbs with ``..``, or is longer than a path may be.
    """
    if name.startswith("/") or "\0" in name:
        raise IntegrityError(
            f"layer {layer}: path {name[:200]!r} is absolute or holds a zero byte; a layer that "
            "means to write outside its root is not used"
        )
    parts = [part for part in name.split("/") if part not in {"", "."}]
    if ".." in parts:
        raise IntegrityError(
            f"layer {layer}: path {name[:200]!r} climbs out with '..'; the layer is not used"
        )
    path = "/".join(parts)
    longest = max((len(_raw(part)) for part in parts), default=0)
    if len(_raw(path)) > _MAX_PATH_BYTES or longest > _MAX_NAME_BYTES:
        raise IntegrityError(
            f"layer {layer}: path {name[:200]!r}... is longer than {_MAX_PATH_BYTES} bytes, or a "
            f"name in it than {_MAX_NAME_BYTES}"
        )
    return path


def check_entry(entry: Entry, *, layer: str) -> Entry:
    """Return ``entry`` if its numbers are ones that a file system can hold.

    Raises:
        IntegrityError: They are not, or its extents overlap or lie outside the file.
    """
    faults = (
        (not 0 <= entry.size_bytes <= MAX_FILE_BYTES, f"size {entry.size_bytes}"),
        (not 0 <= entry.uid <= _MAX_ID or not 0 <= entry.gid <= _MAX_ID, "owner"),
        (not 0 <= entry.mode <= 0o7777, f"mode {entry.mode:o}"),
        (not all(0 <= number < 1 << 20 for number in entry.device), f"device {entry.device}"),
        (abs(entry.mtime_ns) >= 1 << 63, f"time {entry.mtime_ns}"),
        (_xattr_bytes(entry) > _MAX_XATTRS_BYTES, "extended attributes of more than 1 MiB"),
        (len(_raw(entry.target)) > _MAX_PATH_BYTES, "target longer than a path may be"),
        ("\0" in entry.target, "target with a zero byte"),
        (not entry.path and entry.kind != "directory", f"kind {entry.kind} of the root"),
    )
    for is_wrong, what in faults:
        if is_wrong:
            raise IntegrityError(f"layer {layer}: {entry.path[:200]!r} has {what}, out of range")
    at = 0
    for extent in entry.extents:
        if extent.file_offset < at or extent.size_bytes < 0 or extent.stream_offset < 0:
            raise IntegrityError(
                f"layer {layer}: {entry.path[:200]!r} has pieces that overlap at {at}"
            )
        at = extent.file_offset + extent.size_bytes
    if at > entry.size_bytes:
        raise IntegrityError(
            f"layer {layer}: {entry.path[:200]!r} has pieces up to {at}, its size is "
            f"{entry.size_bytes}"
        )
    return entry


def _xattr_bytes(entry: Entry) -> int:
    return sum(len(_raw(name)) + len(value) for name, value in entry.xattrs)


def _raw(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")

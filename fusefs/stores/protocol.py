"""The calls that fusefs makes to a store, and the errors that every store raises alike.

Errors are part of the protocol, because a wrong error becomes wrong data further up:

- ``FileNotFoundError`` only if the store positively says that nothing is there;
- ``UnavailableError`` for every outage, timeout or unknown failure: it may be retried;
- ``IntegrityError`` for a read that returns fewer bytes than asked;
- ``FileExistsError``, ``NotADirectoryError``, ``IsADirectoryError``, ``PermissionError`` and
  ``OSError`` with ``ENOTEMPTY`` or ``ENOSPC`` with their meaning in POSIX.
"""

import errno
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from omniload.base.errors import IntegrityError, UnavailableError

__all__ = [
    "RESERVED",
    "TEMPORARY",
    "Abandoned",
    "Before",
    "Data",
    "Entry",
    "ObjectWriter",
    "Preferred",
    "RenameBegunError",
    "Store",
    "Usage",
    "check_rename",
    "check_whole",
    "checked_path",
    "is_at_or_below",
    "name_of",
    "not_empty",
    "parent_of",
    "stored_name",
    "stored_path",
]

Data = TypeVar("Data", bound=bytes | memoryview)
"""Bytes of a read, in either form; a function returns the form that it was given."""
RESERVED = ".omnifs"
"""Folder in the root of a store that holds objects and work in progress."""
TEMPORARY = f"{RESERVED}/new"
MAX_NAME_BYTES = 255
MAX_PATH_BYTES = 16 << 10
"""Most bytes of a path in a store's own records; S3 allows 1 KiB, HDFS 8,000 characters."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A store's record of a path."""

    name: str
    """Last component; empty for the root."""
    is_directory: bool
    size_bytes: int
    mtime_ns: int
    """Time of the last change; some stores keep whole seconds, so it is never the only sign of a change."""
    mode: int | None = None
    """Permission bits, if the store keeps them."""
    version: str | None = None
    """Version that changes whenever the content does (an ETag); None if the store has no versions."""


@dataclass(frozen=True, slots=True)
class Usage:
    """Space of a store."""

    total_bytes: int
    free_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Preferred:
    """Values that suit a store; used unless the user sets others.

    The defaults are for stores in which each server holds whole files: a name node knows the place of an
    object, and a stream is as fast as one disk.
    """

    stripe_count: int = 4
    """Number of objects of a striped file."""
    longest_read: int = 4 << 20
    """Most bytes of one ranged read."""
    read_ahead: int = 32 << 20
    """Most bytes fetched ahead of one offset stream."""
    read_block: int = 0
    """Bytes of a block; a read as long as the kernel's longest fetches each block that it touches whole."""


@dataclass(frozen=True, slots=True)
class Abandoned:
    """Calls of a client that did not return in time."""

    now: int = 0
    """Number of calls that hang at this moment."""
    total: int = 0
    """Number of calls abandoned since the start."""


class ObjectWriter(Protocol):
    """One object being written, front to back, by one thread at a time."""

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Append ``data``; the caller may reuse its memory after the call."""
        ...

    def close(self) -> None:
        """Return when the object is complete, visible and durable."""
        ...

    def abort(self) -> None:
        """Give up the object; anything that is left of it is an orphan. Never raises."""
        ...


class RenameBegunError(UnavailableError):
    """A rename that the rules allow was interrupted by an outage: ``Store.go_on_renaming`` completes it."""


_SHOWN_CHARACTERS = 120
Before = Callable[[Entry | None], None]
"""Function that ``Store.publish`` calls with the entry to replace, when the file is ready but not visible.

It may wait, and look at the entry. If it raises, nothing changes. It may be called again."""


class Store(Protocol):
    """Files and directories by relative path; the root is the empty path. Safe in threads."""

    @property
    def location(self) -> str:
        """URL for people and messages."""
        ...

    @property
    def preferred(self) -> Preferred:
        """Values that suit this store."""
        return Preferred()

    @property
    def abandoned(self) -> Abandoned:
        """Calls of the store's client that hang, and that nobody waits for any more."""
        return Abandoned()

    @property
    def keeps_modes(self) -> bool:
        """Whether files here have permissions that keep other users of the store from reading them."""
        return False

    def stat(self, path: str) -> Entry:
        """Describe ``path``."""
        ...

    def listing(self, path: str) -> list[Entry]:
        """Return the entries of a directory, in any order."""
        ...

    def read(self, path: str, offset: int, size_bytes: int) -> bytes:
        """Return exactly ``size_bytes`` bytes from ``offset``.

        Raises:
            IntegrityError: The file holds fewer.
        """
        ...

    def read_large(self, path: str, offset: int, size_bytes: int) -> bytes | memoryview:
        """Read like ``read``, but into ``fusefs.base.huge_pages`` memory if the client can fill given memory."""
        return self.read(path, offset, size_bytes)

    def create(self, path: str) -> ObjectWriter:
        """Start a new object; missing parents are made.

        Raises:
            FileExistsError: The object exists already; objects are written once.
        """
        ...

    def publish(
        self, path: str, data: bytes, before: Before | None = None, mode: int | None = None
    ) -> Entry | None:
        """Put a small file at ``path`` durably and atomically, replacing a file that may be there.

        A concurrent reader of the path gets either the old bytes or the new, and after a
        crash at any moment one of both is there. Missing parents are made.

        Args:
            path: Path of the file.
            data: Bytes of the file.
            before: Work to finish before the file shows. Stores that can do much of their own
                work first start it, so that both run at the same time.
            mode: Permission bits of the file, if the store keeps them; None: the default of every file.

        Returns:
            The entry that ``stat`` would return now, if it is known without asking.

        Raises:
            IsADirectoryError: A directory is there.
        """
        ...

    def rename(self, source: str, target: str) -> None:
        """Rename as POSIX does: over a file, or over an empty directory.

        Raises:
            RenameBegunError: The rename takes several steps on this store, and was interrupted.
        """
        ...

    def go_on_renaming(self, source: str, target: str) -> None:
        """Complete a rename that raised ``RenameBegunError``; the rules of rename were applied when it began."""
        self.rename(source, target)

    def remove(self, path: str) -> None:
        """Remove a file."""
        ...

    def make_directory(self, path: str) -> None:
        """Make a directory; missing parents are made.

        Raises:
            FileExistsError: Something is there.
        """
        ...

    def remove_directory(self, path: str) -> None:
        """Remove an empty directory.

        Raises:
            OSError: ``ENOTEMPTY``.
        """
        ...

    @property
    def answers_at_once(self) -> bool:
        """Whether it takes microseconds to look up a path, and to publish a small new file."""
        return False

    def set_mode(self, path: str, mode: int | None) -> None:
        """Let other users read or search a path as the mode of its file allows, if the store ``keeps_modes``.

        Args:
            path: A file, an object or a directory.
            mode: Permission bits; None: the default of every file or directory.
        """
        del path, mode

    def delay_syncs(self) -> None:
        """Let names and published files become durable two seconds later, or with ``sync``, if a sync is expensive.

        A file that replaces another is still durable before it does, and objects are durable when they are closed.
        """
        return

    def sync(self, path: str = "") -> None:
        """Return when a path, or everything for the empty path, is durable with the names above it.

        Raises:
            IntegrityError: Files that were recently closed were lost.
        """
        del path

    def usage(self) -> Usage | None:
        """Return the space of the store if it is known."""
        ...

    def close(self) -> None:
        """Close the connections."""
        ...


def checked_path(path: str) -> str:
    """Return ``path`` without slashes at its ends.

    Raises:
        ValueError: A component is empty, ``.``, ``..``, holds a zero byte or is too long,
            so that no path can leave the store.
    """
    path = path.strip("/")
    if path and (fault := _fault_of(path)) is not None:
        raise ValueError(f"path {path!r} {fault}; give a plain path")
    return path


def stored_path(value: object, *, where: str) -> str:
    """Return a path that was read from the store, checked so that only plain paths reach the calls of a store.

    Args:
        value: The value that was read.
        where: The record and the field that were read, for messages.

    Raises:
        IntegrityError: It is no text, or no plain path: relative, of components that are neither
            empty nor ``.`` nor ``..``, without zero bytes and not too long.
    """
    if not isinstance(value, str):
        fault: str | None = f"is a {type(value).__name__}, no text"
    elif len(value) > MAX_PATH_BYTES:
        fault = f"has {len(value)} characters, more than {MAX_PATH_BYTES}"
    else:
        fault = _fault_of(value)
    if fault is not None:
        # The value may be megabytes of arbitrary bytes, which a log must not hold.
        shown = repr(value)[:_SHOWN_CHARACTERS]
        raise IntegrityError(f"{where} is {shown}, which {fault}; remove what holds it")
    return str(value)


def stored_name(value: object, *, where: str) -> str:
    """Check one component of a path like ``stored_path``."""
    name = stored_path(value, where=where)
    if "/" in name:
        raise IntegrityError(f"{where} is {name!r}, a path where a name is due; remove it")
    return name


def _fault_of(path: str) -> str | None:
    """Return the reason why a path is not plain, or None."""
    for part in path.split("/"):
        if part in {"", ".", ".."} or "\0" in part:
            return f"has the component {part!r}"
        try:
            # Count bytes, not characters, as the kernel and stores do.
            size_bytes = len(part.encode("utf-8", "surrogateescape"))
        except UnicodeEncodeError:
            return f"has the component {part[:40]!r}, which no bytes stand for"
        if size_bytes > MAX_NAME_BYTES:
            return f"has a component of {size_bytes} bytes, more than {MAX_NAME_BYTES}, {part[:40]!r}..."
    return None


def parent_of(path: str) -> str:
    """Return the directory of ``path``; for the root, the root."""
    return path.rpartition("/")[0]


def is_at_or_below(path: str, top: str) -> bool:
    """Return whether a path is ``top`` or lies in the directory ``top``."""
    # Compare with the slash: "data" does not contain "database".
    return path == top or path.startswith(f"{top}/")


def name_of(path: str) -> str:
    """Return the last component of ``path``."""
    return path.rpartition("/")[2]


def not_empty(path: str) -> OSError:
    """Return the error for a directory that is not empty."""
    return OSError(errno.ENOTEMPTY, "directory not empty; remove what it holds first", path)


def check_whole(data: Data, path: str, offset: int, size_bytes: int) -> Data:
    """Return ``data`` if it is complete.

    Raises:
        IntegrityError: It is shorter than asked. The kernel would fill the rest with zeroes.
    """
    if len(data) != size_bytes:
        raise IntegrityError(
            f"{path!r} gives {len(data)} of the {size_bytes} bytes wanted at offset {offset}; "
            "it was cut short or changed while it was read"
        )
    return data


def check_rename(source: Entry, target: Entry | None, held: Sequence[Entry], path: str) -> None:
    """Apply the rules of rename for stores that do not know them.

    Args:
        source: Entry to rename.
        target: Entry at the target, if any.
        held: Content of the target if it is a directory.
        path: The target, for messages.

    Raises:
        OSError: POSIX forbids it.
    """
    if target is None:
        return
    if target.is_directory and not source.is_directory:
        raise IsADirectoryError(errno.EISDIR, "a directory is there; remove it first", path)
    if source.is_directory and not target.is_directory:
        raise NotADirectoryError(errno.ENOTDIR, "a file is there; remove it first", path)
    if held:
        raise not_empty(path)

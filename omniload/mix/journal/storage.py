"""The storage of a journal: the operations that a journal needs, and their implementation on a file."""

import errno
import itertools
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import BinaryIO, Protocol

from typing_extensions import override

from omniload.base.errors import StateError, UnavailableError
from omniload.base.log import get_logger
from omniload.base.reading import open_file
from omniload.base.writing import FULL, free_in, sync_folder
from omniload.mix.journal.room import Room

__all__ = ["START", "FileStorage", "JournalStorage", "Since", "asking"]

_LOG = get_logger(__name__)
_BLOCK = 1 << 20


@dataclass(frozen=True, slots=True)
class Since:
    """A place to start reading a journal: the line of a base."""

    offset: int
    """Number of bytes before the line."""
    before: bytes
    """Checksum of the previous line; empty before the first line."""


START = Since(0, b"")


class JournalStorage(Protocol):
    """Bytes that one planner appends to and anyone reads; ``str`` gives the name for messages.

    Raised by all methods:
        StateError: There is no room, or another planner has taken over.
        UnavailableError: The storage cannot be reached or written.
    """

    room: Room | None = None
    """Waits if there is no room for a claim or for what is appended; without it, nothing waits."""

    def in_room(self, attempt: Callable[[], object], folder: Path | None) -> None:
        """Call a function that writes, repeatedly if ``room`` waits; ``folder`` as for ``Room.write``."""
        if self.room is None:
            attempt()
        else:
            self.room.write(attempt, self, folder)

    @property
    def keeps_all(self) -> bool:
        """Whether what is appended survives the machine; otherwise the end is enough."""
        ...

    def since(self) -> Since:
        """Return where the journal begins: at its first byte, or at the base before which everything was dropped."""
        return START

    def claim(self) -> None:
        """Become the planner that appends from now on; called before the journal is read for that purpose."""
        ...

    def require_claim(self) -> None:
        """Return if no other planner has claimed it since.

        Raises:
            StateError: Another planner has claimed it, and continues it.
        """
        ...

    def exists(self) -> bool:
        """Return whether there is a journal."""
        ...

    def opened(self) -> BinaryIO:
        """Open the content for reading.

        Raises:
            FileNotFoundError: Nothing is there.
        """
        ...

    def begin(self, content: bytes) -> None:
        """Replace everything by ``content``, all or nothing, and append to it from now on."""
        ...

    def go_on(self, kept_bytes: int, end: bytes = b"") -> None:
        """Keep the first ``kept_bytes`` bytes, cut off the rest, and append from there on.

        The last kept byte is a newline, even if a kill left it out. ``end`` is the end of the kept bytes that the
        previous planner may still ``cut``; it is kept whatever that planner does.
        """
        ...

    def cut(self, kept_bytes: int) -> None:
        """Remove what was appended after ``kept_bytes`` bytes, all or nothing and durably, and append from there on."""
        ...

    def append(self, content: bytes) -> None:
        """Append to the end, and return once it is durable; if it cannot be written whole, nothing of it stays."""
        ...

    def drop_before(self, since: Since) -> bool:
        """Drop what lies before the line of a base, if the bytes after it keep their places; otherwise return false."""
        del since
        return False

    def shorten(self, lines: Iterable[bytes]) -> bool:
        """Replace everything by ``lines``, all or nothing; return false, and change nothing, if there is no room."""
        ...

    def move_aside(self) -> str:
        """Rename the content, and return the new name."""
        ...

    def close(self) -> None:
        """Stop appending."""
        ...


class FileStorage(JournalStorage):
    """A local file.

    Args:
        path: The file.
        durable: Whether what is appended survives a power cut. Otherwise it survives only the end of the process that
            wrote it.
    """

    def __init__(self, path: Path, *, durable: bool = True) -> None:
        self._path, self._durable = path, durable
        self._file: BinaryIO | None = None
        self._end = 0

    @override
    def __str__(self) -> str:
        return str(self._path)

    @property
    @override
    def keeps_all(self) -> bool:
        return self._durable

    @override
    def claim(self) -> None:
        """Do nothing: the planner before on this host has ended, and a plane locks its folder."""

    @override
    def require_claim(self) -> None:
        """Do nothing, because no other planner can have claimed the file."""

    @override
    def exists(self) -> bool:
        return self._path.exists()

    @override
    def opened(self) -> BinaryIO:
        return open_file(self._path)

    @override
    def begin(self, content: bytes) -> None:
        partial = self._path.with_name(self._path.name + ".partial")
        with _writing(self._path, len(content)):
            with partial.open("wb", buffering=0) as file:
                _write_whole(file, content, 0)
                # Synced before the rename, because a power cut must not leave the name without its bytes.
                os.fsync(file.fileno())
            partial.replace(self._path)
            sync_folder(self._path.parent)
        self.go_on(len(content))

    @override
    def go_on(self, kept_bytes: int, end: bytes = b"") -> None:
        with _writing(self._path, 0):
            # Unbuffered, so that a failed write is known at once and no rest of it is written later.
            self._file = self._path.open("r+b", buffering=0)
            # Some file systems need room even to overwrite existing bytes.
            self.in_room(partial(self._cut, kept_bytes), self._path.parent)
        self._end = kept_bytes

    def _cut(self, kept_bytes: int) -> None:
        assert self._file is not None, "opened before"
        # A kill may have left out the newline. The line counts, and the next line must not run into it.
        _write_whole(self._file, b"\n", kept_bytes - 1)
        self._file.truncate(kept_bytes)
        os.fsync(self._file.fileno())

    @override
    def cut(self, kept_bytes: int) -> None:
        with _writing(self._path, 0):
            self.in_room(partial(self._cut, kept_bytes), self._path.parent)
        self._end = kept_bytes

    @override
    def append(self, content: bytes) -> None:
        assert self._file is not None, "begun, or gone on with"
        with _writing(self._path, len(content)):
            self.in_room(partial(self._add, content), self._path.parent)
        self._end += len(content)

    def _add(self, content: bytes) -> None:
        """Write at the end; if not everything can be written, nothing of it stays."""
        assert self._file is not None, "looked at before"
        # A write behind the end succeeds too, and fills the gap with zeros, which no reader gets past.
        size = os.fstat(self._file.fileno()).st_size
        if size < self._end:
            raise OSError(
                errno.EIO,
                f"{size} of its {self._end} bytes are left: another program has shortened it under the run",
            )
        try:
            _write_whole(self._file, content, self._end)
            if self._durable:
                os.fsync(self._file.fileno())
            # Writes to an open file succeed even if it was removed, but nobody could ever read them.
            if not os.fstat(self._file.fileno()).st_nlink:
                raise FileNotFoundError(errno.ENOENT, "the file was removed under the run")
        except OSError:
            # If truncating fails too, the rest is a torn last line, and the next record overwrites it.
            with suppress(OSError):
                self._file.truncate(self._end)
            raise

    @override
    def shorten(self, lines: Iterable[bytes]) -> bool:
        partial = self._path.with_name(self._path.name + ".partial")
        with _writing(self._path, 0):
            try:
                with partial.open("wb", buffering=_BLOCK) as file:
                    file.writelines(lines)
                    file.flush()
                    if self._durable:
                        # Synced before the rename, because a power cut must not leave the name without its bytes.
                        os.fsync(file.fileno())
            except OSError as error:
                partial.unlink(missing_ok=True)
                if error.errno not in FULL:
                    raise
                # A long journal is no reason to stop, and its next record needs far less room.
                _LOG.warning("%s stays long: %s", self._path, error)
                return False
            partial.replace(self._path)
            if self._durable:
                sync_folder(self._path.parent)
            # The open file is the replaced one, which no longer has a name.
            self.close()
            self._file = self._path.open("r+b", buffering=0)
            self._end = self._file.seek(0, os.SEEK_END)
        return True

    @override
    def move_aside(self) -> str:
        """Give it the first free name; if one journal is the beginning of another, only the longer one is kept.

        A run that is started again and again, as during development, draws the same samples each time. All other
        journals stay, however many: each is one file in the run's own folder, while on a store each is a folder of
        objects that every start lists.
        """
        with _writing(self._path, 0):
            asides = self._asides()
            for aside in asides:
                if _begins_with(aside, self._path):
                    _LOG.warning("%s is removed: %s holds all of it", self._path, aside.name)
                    self._path.unlink()
                    return aside.name
            held = [aside for aside in asides if _begins_with(self._path, aside)]
            names = (f"{self._path.name}.aside-{number}" for number in itertools.count(1))
            free = (path for name in names if not (path := self._path.with_name(name)).exists())
            # In one step, so that there is no moment in which steps of one of them are nowhere.
            aside = self._path.replace(held[0]) if held else self._path.rename(next(free))
            for other in held[1:]:
                _LOG.warning("%s is removed: %s holds all of it", other, aside.name)
                other.unlink()
        return aside.name

    def _asides(self) -> list[Path]:
        """Return the files that were moved aside, oldest first."""
        begin = f"{self._path.name}.aside-"
        numbers = [
            int(number)
            for path in self._path.parent.iterdir()
            if path.name.startswith(begin) and (number := path.name[len(begin) :]).isdecimal()
        ]
        return [self._path.with_name(f"{begin}{number}") for number in sorted(numbers)]

    @override
    def close(self) -> None:
        if self._file is not None:
            self._file.close()


def _begins_with(whole: Path, part: Path) -> bool:
    """Whether a file begins with all bytes of another; false if one of them is not a file."""
    if not (whole.is_file() and part.is_file() and part.stat().st_size <= whole.stat().st_size):
        return False
    with whole.open("rb") as longer, part.open("rb") as shorter:
        while block := shorter.read(_BLOCK):
            if longer.read(len(block)) != block:
                return False
    return True


def _write_whole(file: BinaryIO, content: bytes, offset: int) -> None:
    """Write all of ``content`` at ``offset``; a single write may write only a part, as when a disk fills up.

    Raises:
        OSError: The content cannot be written whole.
    """
    rest = memoryview(content)
    while rest:
        written = os.pwrite(file.fileno(), rest, offset)
        if not written:
            raise OSError(errno.ENOSPC, f"nothing was written of {len(rest)} bytes")
        rest, offset = rest[written:], offset + written


@contextmanager
def _writing(path: Path, need: int) -> Iterator[None]:
    """Raise a fitting error for a failed write. A full disk is no outage: a restart would stop at the same record.

    Raises:
        StateError: The disk or a quota is full; the message compares ``need`` bytes with the free space.
        UnavailableError: The file cannot be written for another reason.
    """
    try:
        yield
    except OSError as error:
        free = free_in(path.parent)
        # A limit on file sizes is not a lack of room, but a restart would not get beyond it either.
        if error.errno in {*FULL, errno.EFBIG}:
            raise StateError(
                f"{path}: needs {need} bytes, {free}: {error.strerror}; make room, or raise the quota or the limit of "
                "file sizes, and resume"
            ) from error
        raise UnavailableError(
            f"{path}: cannot be written: {error}; {free}; resume once it can be"
        ) from error


@contextmanager
def asking(storage: JournalStorage, folder: Path | None, doing: str) -> Iterator[None]:
    """Name the journal in the errors of its store.

    Args:
        storage: The journal.
        folder: Its folder on a file system, to show the free space; ``None`` elsewhere.
        doing: What is done to the journal: read, or written.

    Raises:
        StateError: The store has no room, or refuses the call.
        UnavailableError: The store did not answer in time.
    """
    try:
        yield
    except UnavailableError as error:
        raise UnavailableError(
            f"{storage}: the journal cannot be {doing}: {error}; resume once the store answers"
        ) from error
    # Passed on, because callers distinguish a missing object from a failed call.
    except FileNotFoundError:
        raise
    except OSError as error:
        raise StateError(
            f"{storage}: the journal cannot be {doing}: {error.strerror or error}, "
            f"{free_in(folder)}; make room there, or give another runtime.journal that may be written"
        ) from error

"""Where a journal lies: what it asks of a file, and the file itself."""

import errno
import itertools
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import BinaryIO, Protocol

from typing_extensions import override

from omniload.base.errors import StateError, UnavailableError
from omniload.base.log import get_logger
from omniload.base.reading import open_file
from omniload.base.writing import FULL, free_in, sync_folder
from omniload.mix.journal.room import Room

__all__ = ["FileStorage", "JournalStorage", "asking"]

_LOG = get_logger(__name__)
_BLOCK = 1 << 20


class JournalStorage(Protocol):
    """Bytes that one planner adds to, and anyone reads; as ``str`` what messages call it.

    Raises everywhere:
        StateError: There is no room, or another planner has taken it.
        UnavailableError: It cannot be reached or written.
    """

    room: Room | None = None
    """Waits where a claim, or what is added, finds no room; without it nobody does."""

    def in_room(self, attempt: Callable[[], object], folder: Path | None) -> None:
        """Call what writes, again and again where ``room`` waits; ``folder`` as for ``Room.write``."""
        if self.room is None:
            attempt()
        else:
            self.room.write(attempt, self, folder)

    @property
    def keeps_all(self) -> bool:
        """Whether what is added survives the host, and is kept; otherwise the end is enough."""
        ...

    def claim(self) -> None:
        """Be the one that adds to it from now on, before it is read for that."""
        ...

    def require_claim(self) -> None:
        """Return where nobody else has claimed it since.

        Raises:
            StateError: Another planner has, and goes on with it.
        """
        ...

    def exists(self) -> bool:
        """Tell whether there is a journal."""
        ...

    def opened(self) -> BinaryIO:
        """Open what is there, for reading.

        Raises:
            FileNotFoundError: Nothing is there.
        """
        ...

    def begin(self, content: bytes) -> None:
        """Have ``content`` and nothing else there, all or nothing, and add to it from now on."""
        ...

    def go_on(self, kept_bytes: int, end: bytes = b"") -> None:
        """Cut off what is behind so many bytes, and add to them from now on.

        The last of them is a newline, also where a kill left it out. ``end`` are the last of them that whoever added to
        it before may yet ``cut``: whatever becomes of that, they are there.
        """
        ...

    def cut(self, kept_bytes: int) -> None:
        """Have what was added behind so many bytes not be there, and add to them: all or nothing, and it survives."""
        ...

    def append(self, content: bytes) -> None:
        """Add to the end, and return once it survives; what cannot be added whole is not there."""
        ...

    def shorten(self, content: bytes) -> None:
        """Have ``content`` there in place of all that is; only where ``keeps_all`` is not so."""
        ...

    def move_aside(self) -> str:
        """Give what is there another name, and return that."""
        ...

    def close(self) -> None:
        """Add nothing any more."""
        ...


class FileStorage(JournalStorage):
    """A local file.

    Args:
        path: The file.
        durable: Whether what is appended survives a power cut. Without that it survives the end of the process that
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
        """Do nothing: a planner on this host is ended before another speaks, and a plane locks its folder."""

    @override
    def require_claim(self) -> None:
        """Do nothing, as no other planner can have."""

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
                # The bytes before the name: a power cut must not leave a name that leads to nothing.
                os.fsync(file.fileno())
            partial.replace(self._path)
            sync_folder(self._path.parent)
        self.go_on(len(content))

    @override
    def go_on(self, kept_bytes: int, end: bytes = b"") -> None:
        with _writing(self._path, 0):
            # Unbuffered: what a write took is known at once, and no rest of a failed one is written later.
            self._file = self._path.open("r+b", buffering=0)
            # Some file systems need room to write over what is there.
            self.in_room(partial(self._cut, kept_bytes), self._path.parent)
        self._end = kept_bytes

    def _cut(self, kept_bytes: int) -> None:
        assert self._file is not None, "opened before"
        # A kill may have left the newline out: the line counts, and the next must not run into it.
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
        """Write at the end; of what cannot be written whole nothing is left there."""
        assert self._file is not None, "looked at before"
        try:
            _write_whole(self._file, content, self._end)
            if self._durable:
                os.fsync(self._file.fileno())
            # What is open takes all that is written, and nobody would ever read it.
            if not os.fstat(self._file.fileno()).st_nlink:
                raise FileNotFoundError(errno.ENOENT, "the file was removed under the run")
        except OSError:
            # Should cutting fail too, the rest is a torn last line, and the next record is
            # written over it.
            with suppress(OSError):
                self._file.truncate(self._end)
            raise

    @override
    def shorten(self, content: bytes) -> None:
        partial = self._path.with_name(self._path.name + ".partial")
        with _writing(self._path, len(content)):

            def write() -> None:
                # Not synced: a journal is shortened where it need not outlive the machine.
                try:
                    partial.write_bytes(content)
                except OSError:
                    # A part of it would take the room that is waited for.
                    partial.unlink(missing_ok=True)
                    raise

            self.in_room(write, self._path.parent)
            partial.replace(self._path)
            # What was open is the file that is gone by now, under no name.
            self.close()
            self._file = self._path.open("r+b", buffering=0)
        self._end = len(content)

    @override
    def move_aside(self) -> str:
        """Give it the first name that is free; of two that begin alike the longer holds both, and is kept alone.

        A run that is begun again and again, as one is that is written at, draws the same each time. All others stay,
        however many: a file each, in the run's own folder, where a store has folders of objects that every start lists.
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
            # At once: there is no moment in which steps of one of them lie nowhere.
            aside = self._path.replace(held[0]) if held else self._path.rename(next(free))
            for other in held[1:]:
                _LOG.warning("%s is removed: %s holds all of it", other, aside.name)
                other.unlink()
        return aside.name

    def _asides(self) -> list[Path]:
        """Return the files that were moved aside, the first one first."""
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
    """Whether the bytes of a file are the first ones of another, or all of them; of what is no file none are."""
    if not (whole.is_file() and part.is_file() and part.stat().st_size <= whole.stat().st_size):
        return False
    with whole.open("rb") as longer, part.open("rb") as shorter:
        while block := shorter.read(_BLOCK):
            if longer.read(len(block)) != block:
                return False
    return True


def _write_whole(file: BinaryIO, content: bytes, offset: int) -> None:
    """Write all of ``content`` at ``offset``: a single write may take a part, as a disk fills up.

    Raises:
        OSError: It cannot be written whole.
    """
    rest = memoryview(content)
    while rest:
        written = os.pwrite(file.fileno(), rest, offset)
        if not written:
            raise OSError(errno.ENOSPC, f"nothing was written of {len(rest)} bytes")
        rest, offset = rest[written:], offset + written


@contextmanager
def _writing(path: Path, need: int) -> Iterator[None]:
    """Tell what went wrong. A full disk is no outage: a restart would train up to the same record.

    Raises:
        StateError: The disk, or a quota, is full; names what ``need`` bytes found.
        UnavailableError: The file cannot be written for another reason.
    """
    try:
        yield
    except OSError as error:
        free = free_in(path.parent)
        # A limit on the size of files is no want of room, and yet: no restart gets beyond it.
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
    """Name the journal in what its store says.

    Args:
        storage: The journal.
        folder: Where it lies on a file system, for how much room there is; ``None`` elsewhere.
        doing: What is done to it: read, or written.

    Raises:
        StateError: The store has no room, or refuses it.
        UnavailableError: It did not answer in time.
    """
    try:
        yield
    except UnavailableError as error:
        raise UnavailableError(
            f"{storage}: the journal cannot be {doing}: {error}; resume once the store answers"
        ) from error
    # Callers tell what is not there from what cannot be asked.
    except FileNotFoundError:
        raise
    except OSError as error:
        raise StateError(
            f"{storage}: the journal cannot be {doing}: {error.strerror or error}, "
            f"{free_in(folder)}; make room there, or give another runtime.journal that may be written"
        ) from error

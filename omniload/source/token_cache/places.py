"""Where the entries of a token cache lie: a folder of this machine, or any store.

What a place gives may be torn, old or another user's work. ``LocalPlace`` tells whose it is, and the check of an entry
tells the rest.
"""

import os
import re
import shutil
import stat
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from typing_extensions import override

from omniload.base.errors import IntegrityError
from omniload.base.log import get_logger
from omniload.base.units import format_bytes
from omniload.base.writing import write_whole

if TYPE_CHECKING:
    from fusefs.stores.protocol import Store

__all__ = ["LocalPlace", "Place", "StorePlace"]

_LARGEST_BYTES = 4 << 30
"""Of an entry that is read: more than the largest unit gives."""
_UNUSED_S = 24 * 3600.0
_LEFTOVER_S = 3600.0
_CHUNK_BYTES = 64 << 20
_GIVE_UP_S = 30.0
"""Limit of every call to a store, attempts and waits included."""
_OURS = re.compile(r"[0-9a-f]{32}\.(?:plain|[0-9a-f]{12})")
"""What folders of entries are called, by ``source_tokens.folder_of_source``: the place may hold other things too."""
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
_LOG = get_logger(__name__)


class Place(Protocol):
    """Entries by path, ``FOLDER/NAME``. Safe in threads."""

    location: str
    """For people."""

    def read(self, path: str) -> bytes | bytearray | None:
        """Return an entry; ``None`` where there is none.

        Raises:
            IntegrityError: What lies there is not to be believed.
            OmniloadError: The store does not answer.
            OSError: It cannot be read.
        """
        ...

    def write(self, path: str, data: bytes) -> bool:
        """Put an entry there whole or not at all, and tell whether it was; a full place takes none.

        Raises:
            OmniloadError: The store does not answer.
            OSError: It cannot be written.
        """
        ...

    def names(self, folder: str) -> set[str]:
        """Return the names of the entries of a folder that may be believed; none where it is not there.

        Raises:
            OmniloadError: The store does not answer.
            OSError: It cannot be listed.
        """
        ...


class LocalPlace(Place):
    """A folder, which several processes, hosts and users may share.

    Entries hold what documents hold. Without a key they serve their owner alone, so nobody else may read
    them, and what another user could have written is not read. With a key its holders share them, as far
    as the umask lets others read.

    Args:
        root: The folder; made when something is written.
        limit_bytes: Most bytes of all entries in it; ``None`` for any number.
        shared: Whether a key shows who wrote an entry.
    """

    def __init__(self, root: Path, *, limit_bytes: int | None = None, shared: bool = False) -> None:
        self.location = str(root)
        self._root, self._limit_bytes, self._shared = root, limit_bytes, shared
        self._used: set[str] = set()
        self._room_bytes = 0
        """What may be written before the folder is looked at again."""
        self._told_full = False

    @override
    def read(self, path: str) -> bytes | bytearray | None:
        self._note_use(path)
        try:
            # Somebody else may have put a link or a pipe there: neither is followed, nor waited for.
            descriptor = os.open(
                self._root / path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
            )
        except FileNotFoundError:
            return None
        # Looked at once it is open: between a look at the path and opening it another file could come.
        with os.fdopen(descriptor, "rb", buffering=0) as file:
            status = os.fstat(descriptor)
            self._require_ours(status)
            # Read, not mapped: a mapped file that is cut short kills the process.
            data = bytearray(status.st_size)
            view, at = memoryview(data), 0
            while at < len(data) and (got := file.readinto(view[at : at + _CHUNK_BYTES])):
                at += got
            # What is shorter than it was a moment ago is refused by its check.
            return data if at == len(data) else data[:at]

    def _is_ours(self, status: os.stat_result) -> bool:
        # Root can write what it likes in any case.
        return self._shared or (
            status.st_uid in {os.geteuid(), 0} and not status.st_mode & _OTHERS_WRITE
        )

    def _require_ours(self, status: os.stat_result) -> None:
        if not stat.S_ISREG(status.st_mode) or status.st_size > _LARGEST_BYTES:
            raise IntegrityError("is no file of an entry's size")
        if self._is_ours(status):
            return
        raise IntegrityError(
            f"belongs to user {status.st_uid} with mode {stat.S_IMODE(status.st_mode):o}, so that another user could "
            "have written it; a key file (loader.token_cache.key_file) shows who wrote an entry"
        )

    @override
    def write(self, path: str, data: bytes) -> bool:
        self._note_use(path)
        if self._limit_bytes is not None and not self._has_room(len(data)):
            return False
        target = self._root / path
        # Nor may others list the names: they are digests of what shards hold.
        target.parent.mkdir(parents=True, exist_ok=True, mode=0o777 if self._shared else 0o700)
        write_whole(target, data, mode=0o644 if self._shared else 0o600)
        self._room_bytes -= len(data)
        return True

    @override
    def names(self, folder: str) -> set[str]:
        try:
            with os.scandir(self._root / folder) as found:
                held = [each for each in found if each.name[0] != "."]
            # Nobody else can put one into a folder that is ours: no file of it is looked at, of which there may be
            # a hundred thousand.
            if not self._is_ours((self._root / folder).stat()):
                held = [each for each in held if self._is_ours(each.stat(follow_symlinks=False))]
        except FileNotFoundError:
            return set()
        return {each.name for each in held}

    def _note_use(self, path: str) -> None:
        """Set the time of a folder once, by which it is known to be in use."""
        folder = path.partition("/")[0]
        if folder not in self._used:
            self._used.add(folder)
            with suppress(OSError):
                os.utime(self._root / folder)

    def _has_room(self, size_bytes: int) -> bool:
        """Tell whether an entry fits, after folders that nobody has used for a day have gone.

        Those in use are never cut down: a reading in order over more than fits would put out each entry
        before it comes again, where a cache that has filled up serves what it holds.
        """
        limit = self._limit_bytes
        assert limit is not None, "it is asked for"
        if size_bytes <= self._room_bytes:
            return True
        held = {folder: _bytes_below(folder) for folder in _folders(self._root)}
        free = limit - sum(held.values())
        for folder in sorted(held, key=_used_at):
            if free >= size_bytes or time.time() - _used_at(folder) < _UNUSED_S:
                break
            # What this process uses is in use, though its time could not be set.
            if folder.name not in self._used:
                shutil.rmtree(folder, ignore_errors=True)
                free += held[folder] - _bytes_below(folder)
        # Others write too: a part of what is free is taken at a time.
        self._room_bytes = max(size_bytes, free // 64) if free >= size_bytes else 0
        if not self._room_bytes and not self._told_full:
            self._told_full = True
            _LOG.warning(
                "%s: is full at %s; tokens that are not in it are made anew each time: raise loader.token_cache.limit, "
                "or remove folders that no mix reads any more",
                *(self._root, format_bytes(limit)),
            )
        return bool(self._room_bytes)


class StorePlace(Place):
    """A folder of a store, whose own rules say who may read and write; the first call opens it.

    Args:
        url: Such as ``s3://BUCKET/FOLDER`` or ``hdfs://HOST/FOLDER``.
    """

    def __init__(self, url: str) -> None:
        self.location = url
        self._opened: Store | None = None

    def _store(self) -> "Store":
        if self._opened is None:
            # Imported here: a cache in a folder needs no client of a store.
            from fusefs.stores.retry import RetryingStore  # noqa: PLC0415
            from fusefs.stores.url import open_store  # noqa: PLC0415

            store = open_store(self.location, give_up_after_s=_GIVE_UP_S)
            self._opened = RetryingStore(store, give_up_after_s=_GIVE_UP_S)
        return self._opened

    @override
    def read(self, path: str) -> bytes | bytearray | None:
        try:
            size = self._store().stat(path).size_bytes
            if size > _LARGEST_BYTES:
                raise IntegrityError(f"holds {size} bytes, more than an entry")
            return self._store().read(path, 0, size)
        except FileNotFoundError:
            return None

    @override
    def write(self, path: str, data: bytes) -> bool:
        self._store().publish(path, data)
        return True

    @override
    def names(self, folder: str) -> set[str]:
        try:
            return {entry.name for entry in self._store().listing(folder) if not entry.is_directory}
        except FileNotFoundError:
            return set()


def _folders(root: Path) -> list[Path]:
    """Return the folders of entries; whatever else a user keeps there is neither counted nor removed."""
    with suppress(FileNotFoundError):
        named = (path for path in root.iterdir() if _OURS.fullmatch(path.name))
        return [path for path in named if path.is_dir() and not path.is_symlink()]
    return []


def _used_at(folder: Path) -> float:
    with suppress(OSError):
        return folder.stat().st_mtime
    return 0.0


def _bytes_below(folder: Path) -> int:
    return sum(size for size in _sizes(folder))


def _sizes(folder: Path) -> Iterator[int]:
    """Yield the size of each file; what a killed writer left an hour ago is removed on the way."""
    with suppress(OSError), os.scandir(folder) as found:
        for file in found:
            with suppress(OSError):
                status = file.stat(follow_symlinks=False)
                if file.name[0] == "." and time.time() - status.st_mtime > _LEFTOVER_S:
                    os.unlink(file.path)  # noqa: PTH108 -- one of many
                else:
                    yield status.st_size

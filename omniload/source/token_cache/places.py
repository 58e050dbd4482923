"""Places of the entries of a token cache: a folder of this machine, or any store.

An entry of a place may be incomplete, old or from another user. ``LocalPlace`` checks the owner, and the check of the
entry verifies the rest.
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
"""Largest entry that is read: more than the largest unit gives."""
_UNUSED_S = 24 * 3600.0
_LEFTOVER_S = 3600.0
_CHUNK_BYTES = 64 << 20
_GIVE_UP_S = 30.0
"""Time limit of every call of a store, including retries and waits."""
_OURS = re.compile(r"[0-9a-f]{32}\.(?:plain|[0-9a-f]{12})")
"""Names of folders of entries, from ``source_tokens.folder_of_source``; the place may have other files too."""
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
_LOG = get_logger(__name__)


class Place(Protocol):
    """Entries by path, ``FOLDER/NAME``. Thread-safe."""

    location: str
    """Location in messages."""

    def read(self, path: str) -> bytes | bytearray | None:
        """Return an entry; ``None`` if there is none.

        Raises:
            IntegrityError: The file cannot be trusted.
            OmniloadError: The store does not answer.
            OSError: The file cannot be read.
        """
        ...

    def write(self, path: str, data: bytes) -> bool:
        """Write an entry completely or not at all, and return whether it was written; a full place accepts none.

        Raises:
            OmniloadError: The store does not answer.
            OSError: The entry cannot be written.
        """
        ...

    def names(self, folder: str) -> set[str]:
        """Return the names of the trusted entries of a folder; none if the folder does not exist.

        Raises:
            OmniloadError: The store does not answer.
            OSError: The folder cannot be listed.
        """
        ...


class LocalPlace(Place):
    """A folder, which several processes, hosts and users may share.

    Entries have the content of documents. Without a key they serve only their owner. So no other user may read them,
    and files that another user could have written are not read. With a key, the owners of the key share them, as far as
    the umask lets others read.

    Args:
        root: The folder; made at the first write.
        limit_bytes: Most bytes of all entries in it; ``None`` for no limit.
        shared: Whether a key shows who wrote an entry.
    """

    def __init__(self, root: Path, *, limit_bytes: int | None = None, shared: bool = False) -> None:
        self.location = str(root)
        self._root, self._limit_bytes, self._shared = root, limit_bytes, shared
        self._used: set[str] = set()
        self._room_bytes = 0
        """Bytes that may be written before the size of the folder is checked again."""
        self._told_full = False

    @override
    def read(self, path: str) -> bytes | bytearray | None:
        self._note_use(path)
        try:
            # Another user may have put a link or a pipe there, so links are not followed, and pipes are not waited for.
            descriptor = os.open(
                self._root / path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
            )
        except FileNotFoundError:
            return None
        # Checked after opening, because the file could be replaced between a check of the path and the opening.
        with os.fdopen(descriptor, "rb", buffering=0) as file:
            status = os.fstat(descriptor)
            self._require_ours(status)
            # Read, not mapped, because a mapped file that is truncated kills the process.
            data = bytearray(status.st_size)
            view, at = memoryview(data), 0
            while at < len(data) and (got := file.readinto(view[at : at + _CHUNK_BYTES])):
                at += got
            # If the file was truncated meanwhile, its check fails.
            return data if at == len(data) else data[:at]

    def _is_ours(self, status: os.stat_result) -> bool:
        # Root can write anything in any case.
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
        # Others may not list the names either, because the names are digests of the contents of shards.
        target.parent.mkdir(parents=True, exist_ok=True, mode=0o777 if self._shared else 0o700)
        write_whole(target, data, mode=0o644 if self._shared else 0o600)
        self._room_bytes -= len(data)
        return True

    @override
    def names(self, folder: str) -> set[str]:
        try:
            with os.scandir(self._root / folder) as found:
                held = [each for each in found if each.name[0] != "."]
            # No other user can add a file to a folder that is ours, so its files, perhaps a hundred thousand, are not
            # checked.
            if not self._is_ours((self._root / folder).stat()):
                held = [each for each in held if self._is_ours(each.stat(follow_symlinks=False))]
        except FileNotFoundError:
            return set()
        return {each.name for each in held}

    def _note_use(self, path: str) -> None:
        """Set the time of a folder once, which marks it as used."""
        folder = path.partition("/")[0]
        if folder not in self._used:
            self._used.add(folder)
            with suppress(OSError):
                os.utime(self._root / folder)

    def _has_room(self, size_bytes: int) -> bool:
        """Return whether an entry fits, after removing folders that have not been used for a day.

        Folders in use are never reduced. With sequential reads of more than fits, this would remove each entry before
        it is read again, while a full cache keeps serving its entries.
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
            # Folders of this process are in use, even if their time could not be set.
            if folder.name not in self._used:
                shutil.rmtree(folder, ignore_errors=True)
                free += held[folder] - _bytes_below(folder)
        # Others write too, so only a part of the free room is reserved at a time.
        self._room_bytes = max(size_bytes, free // 64) if free >= size_bytes else 0
        if not self._room_bytes and not self._told_full:
            self._told_full = True
            _LOG.warning(
                "%s: is full at %s; tokens that are not in it are made again each time: raise "
                "loader.token_cache.limit, or remove folders that no mix reads any more",
                *(self._root, format_bytes(limit)),
            )
        return bool(self._room_bytes)


class StorePlace(Place):
    """A folder of a store, whose own rules control access; the first call opens the store.

    Args:
        url: Such as ``s3://BUCKET/FOLDER`` or ``hdfs://HOST/FOLDER``.
    """

    def __init__(self, url: str) -> None:
        self.location = url
        self._opened: Store | None = None

    def _store(self) -> "Store":
        if self._opened is None:
            # Imported here, because a cache in a folder needs no client of a store.
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
    """Return the folders of entries; other files of the user are neither counted nor removed."""
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
    """Yield the size of each file; files that a killed writer left an hour ago are removed."""
    with suppress(OSError), os.scandir(folder) as found:
        for file in found:
            with suppress(OSError):
                status = file.stat(follow_symlinks=False)
                if file.name[0] == "." and time.time() - status.st_mtime > _LEFTOVER_S:
                    os.unlink(file.path)  # noqa: PTH108 -- one of many
                else:
                    yield status.st_size

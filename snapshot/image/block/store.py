"""Blocks on disk, by digest, for every image and process of a node.

::

    version      "omniload block store 1"
    lock         held by a process that writes or evicts
    4f/4f53...   one file for each block: its uncompressed bytes
    new/...      being written; left over by a crash at most

Bytes are compared with their digest on every read, so a file that a crash tore or that was altered
on disk is only a miss. Therefore no file needs a sync.
"""

import errno
import os
import re
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from omniload.base.errors import ConfigError, IntegrityError, StateError
from omniload.base.linux.file_lock import locked
from omniload.base.log import get_logger
from snapshot.oci.digest import check_digest, verified
from snapshot.private_folder import private_folder

__all__ = ["BlockStore"]

_log = get_logger(__name__)

_VERSION = "omniload block store 1\n"
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_COUNTER_DIGITS = 20
# An eviction leaves room, so that many writes pay for its scan of the folder.
_EVICT_TO = 0.9


class BlockStore:
    """A folder of blocks under a hard cap; the least recently used blocks are dropped first.

    Safe in threads and between processes. If the disk is full or broken, blocks are
    not kept, one warning is logged, and everything else works.

    Raises:
        ConfigError: The folder holds something else.
        StateError: Another version wrote it.
    """

    def __init__(self, folder: str | Path, capacity_bytes: int) -> None:
        self._root = Path(folder)
        self._capacity_bytes = capacity_bytes
        self._mutex = threading.Lock()
        self._complained = False
        self._prepared = False
        try:
            self._prepare()
        except OSError as error:
            if error.errno not in _FULL:
                raise StateError(
                    f"block store {self._root} cannot be used: {error}; give another cache"
                ) from error
            self._complain(error)  # and try again when there is a block to keep

    @property
    def used_bytes(self) -> int:
        """Bytes of all blocks, counted on each call."""
        return sum(size for _, size, _ in self._blocks())

    def get(self, digest: str) -> bytes | None:
        """Return a block that is here and undamaged, or None."""
        path = self._path(digest)
        try:
            data = path.read_bytes()
        except OSError:
            return None
        try:
            verified(data, digest, name=str(path))
        except IntegrityError as error:
            _log.warning("%s; it is removed and fetched again", error)
            # Without the lock: a thread that writes the block again renames it into place, and to lose that is only a
            # miss.
            with suppress(OSError):
                path.unlink()
            return None
        with suppress(OSError):
            os.utime(path)  # decides the order of eviction
        return data

    def has(self, digest: str) -> bool:
        """Return whether a block is here; only ``get`` compares it with its digest."""
        return self._path(digest).exists()

    def put_all(self, blocks: Mapping[str, bytes | memoryview]) -> frozenset[str]:
        """Keep blocks, which the caller has compared with their digests; return the digests of those that were kept."""
        kept: set[str] = set()
        try:
            if not self._prepared:
                self._prepare()
            # once for all blocks, because other processes wait for the lock
            with self._locked() as lock:
                for digest, data in blocks.items():
                    if len(data) > self._capacity_bytes:
                        continue
                    path = self._path(digest)
                    if not _holds(path, data):
                        used = self._make_room(lock, len(data))
                        self._write(path, data)
                        _set_counter(lock, used + len(data))
                    kept.add(digest)
        except (OSError, ConfigError) as error:
            self._complain(error)
        else:
            self._complained = False
        return frozenset(kept)

    def _prepare(self) -> None:
        private_folder(self._root)
        with self._locked():
            self._check_version()
            (self._root / "new").mkdir(exist_ok=True)
            for left in (self._root / "new").iterdir():
                left.unlink(missing_ok=True)  # a writer would hold the lock, so nobody writes these
        self._prepared = True

    def _complain(self, error: OSError | ConfigError) -> None:
        if not self._complained:
            is_full = isinstance(error, OSError) and error.errno in _FULL
            reason = "the disk is full" if is_full else str(error)
            _log.warning("block store %s keeps nothing for now: %s", self._root, reason)
        self._complained = True

    def _check_version(self) -> None:
        version = self._root / "version"
        names = {path.name for path in self._root.iterdir()}
        if "version" in names:
            if (found := version.read_text()) != _VERSION:
                raise StateError(
                    f"block store {self._root} has version {found[:40]!r}, this code reads "
                    f"{_VERSION!r}; give another folder"
                )
        elif names - {"lock", "new"}:
            raise ConfigError(
                f"{self._root} is no block store and holds {sorted(names)[:5]}; give another folder"
            )
        else:
            (self._root / "new").mkdir(exist_ok=True)
            self._write(version, _VERSION.encode())

    def _write(self, path: Path, data: bytes | memoryview) -> None:
        temporary = self._root / "new" / path.name
        try:
            with temporary.open("wb", buffering=0) as file:
                view = memoryview(data)
                while view:
                    view = view[file.write(view) :]
            try:
                temporary.replace(path)
            except FileNotFoundError:  # the first block of its folder
                path.parent.mkdir(exist_ok=True)
                temporary.replace(path)
        except BaseException:
            with suppress(OSError):
                temporary.unlink(missing_ok=True)
            raise

    def _make_room(self, lock: int, size_bytes: int) -> int:
        """Return the bytes in use, after dropping blocks so that ``size_bytes`` more fit."""
        used = _counter(lock)
        if used is not None and used + size_bytes <= self._capacity_bytes:
            return used
        # The counter may be too high after a crash, and is missing at first, so count the files.
        blocks = sorted(self._blocks(), key=lambda block: block[2])
        used = sum(size for _, size, _ in blocks)
        if used + size_bytes <= self._capacity_bytes:
            return used
        for path, size, _ in blocks:
            if used + size_bytes <= self._capacity_bytes * _EVICT_TO or used == 0:
                break
            path.unlink(missing_ok=True)
            used -= size
        _set_counter(lock, used)
        return used

    def _blocks(self) -> Iterator[tuple[Path, int, int]]:
        """Yield path, size and last use of every block."""
        for folder in self._root.iterdir() if self._root.is_dir() else ():
            if len(folder.name) != 2:
                continue
            for path in folder.iterdir():
                with suppress(FileNotFoundError):
                    found = path.stat()
                    yield path, found.st_size, found.st_mtime_ns

    def _path(self, digest: str) -> Path:
        value = check_digest(digest).partition(":")[2]
        return self._root / value[:2] / value

    @contextmanager
    def _locked(self) -> Iterator[int]:
        """Exclude every other writer of the node; the system releases the lock with the process."""
        with self._mutex, locked(self._root / "lock", writable=True) as file:
            yield file


def _counter(lock: int) -> int | None:
    """Return the last recorded number of bytes in use; None if the lock file holds anything else."""
    # It is in the lock file, which is open anyway and changes only under the lock. Read one digit more than needed,
    # to detect a longer text.
    text = os.pread(lock, _COUNTER_DIGITS + 1, 0)
    return int(text) if re.fullmatch(rb"[0-9]{%d}" % _COUNTER_DIGITS, text) else None


def _holds(path: Path, data: bytes | memoryview) -> bool:
    """Return whether an undamaged block is there; a block that was damaged in the meantime is written again."""
    try:
        return path.stat().st_size == len(data) and path.read_bytes() == data
    except FileNotFoundError:
        return False


def _set_counter(lock: int, used: int) -> None:
    os.ftruncate(lock, os.pwrite(lock, b"%0*d" % (_COUNTER_DIGITS, used), 0))

"""Shards of stores are read from the store once: copies of what was read, on a disk of the node, under a cap.

Nothing depends on it but time. What is not there, damaged, of another version, or slow to come is read from the store
as without a cache; samples and digests are the same.
"""

import io
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import orjson
import xxhash
from typing_extensions import override

from fusefs.cache.disk_format import CopyVersion, decode_map
from omniload.base.clock import Clock, SystemClock
from omniload.base.errors import ConfigError
from omniload.base.log import get_logger
from omniload.base.settings.paths import path_from
from omniload.base.units import format_bytes
from omniload.base.writing import FULL, free_in
from omniload.mix.runtime import ShardCacheConfig
from omniload.source.stores.asking import (
    changed,
    identity_of,
    is_settled,
    ranges_of,
    stamp_of,
)
from omniload.source.stores.blocks import (
    BLOCK_BYTES,
    CLAIMED,
    blocks_of,
    extent_of,
    gaps_of,
    joined,
    runs_of,
    span_of,
)
from omniload.source.stores.shared_directory import SharedDirectory

if TYPE_CHECKING:
    import fsspec

    from omniload.source.files import ShardFile

__all__ = ["KeptShard", "ShardCache", "Traffic", "open_shard_cache", "shard_cache_of"]

_AWAY_S = 60.0
"""How long a directory that failed, or is full, is not written to."""
_AHEAD_BYTES = 8 << 20
"""What is read ahead of whoever reads a file from its beginning on."""
_LOG = get_logger(__name__)
_Answer = TypeVar("_Answer")


@dataclass(slots=True)
class Traffic:
    """Where bytes of shards came from."""

    disk_bytes: int = 0
    """From copies, whole blocks."""
    store_bytes: int = 0
    """From stores, of shards that are or may be kept."""


class ShardCache:
    """The copies of a directory that this process reads, and fills.

    Safe in threads; not in a process forked while another thread holds its lock.

    Args:
        directory: Where they lie.
        clock: For the time that a directory is left alone.
        wall_s: The time in seconds since 1970, which times of writing are held against.
    """

    def __init__(
        self,
        directory: SharedDirectory,
        clock: Clock | None = None,
        wall_s: Callable[[], float] = time.time,
    ) -> None:
        self.directory, self.traffic = directory, Traffic()
        self._clock, self._wall_s = clock or SystemClock(), wall_s
        self._lock = threading.Lock()
        self._prepared = False
        self._away_until_s = self._full_until_s = self._clock.now_s()
        self._told: set[str] = set()
        self._fresh: dict[int, tuple[fsspec.AbstractFileSystem, fsspec.AbstractFileSystem]] = {}

    def prepare(self) -> None:
        """Make the directory, or find it; one that cannot be used costs a line in the log, and is asked again later."""

        def prepared() -> bool:
            self.directory.prepare()
            return True

        self._prepared = bool(self._asked(prepared))

    def through(self, files: Iterable["ShardFile"]) -> tuple["ShardFile", ...]:
        """Return files as they are read through this cache, and say that they are in use."""
        through = tuple(file.kept_in(self) for file in files)
        every = (each for file in through for each in (file, *file.beside))
        self.directory.use(each.kept.version.name for each in every if each.kept is not None)
        self._catch_up()
        return through

    def shard(
        self, store: "fsspec.AbstractFileSystem", path: str, size_bytes: int, stamp: str, tag: str
    ) -> "KeptShard | None":
        """Return a shard as it is read through this cache; ``None`` where its store does not tell versions apart.

        Args:
            store: The store that holds it.
            path: The shard.
            size_bytes: Its size.
            stamp: What changes when it is written again.
            tag: What changes with its content, where the store has that.
        """
        if not size_bytes or not is_settled(stamp, tag, self._wall_s()):
            return None
        said = [identity_of(store), path, size_bytes, stamp, BLOCK_BYTES]
        key = orjson.dumps([str(each).encode(errors="surrogateescape").hex() for each in said])
        version = CopyVersion(key.decode(), size_bytes, -(-size_bytes // BLOCK_BYTES))
        return KeptShard(cache=self, version=version, store=store, path=path, stamp=stamp)

    def blocks(self, version: CopyVersion, wanted: Sequence[int]) -> dict[int, memoryview]:
        """Return those of some blocks, in their order, that are kept and sound."""
        self._catch_up()
        found = self._asked(lambda: self._sound(version, wanted), reads=True) or {}
        self.add(Traffic(disk_bytes=sum(map(len, found.values()))))
        return found

    def traffic_since(self) -> Traffic:
        """Return the traffic since this was asked before, for one who counts it elsewhere."""
        with self._lock:
            since, self.traffic = self.traffic, Traffic()
        return since

    def add(self, traffic: Traffic) -> None:
        """Count bytes that came, to this process or to one that reads for it."""
        with self._lock:
            self.traffic.disk_bytes += traffic.disk_bytes
            self.traffic.store_bytes += traffic.store_bytes

    def figures(self) -> dict[str, float]:
        """Return the traffic, by the names of figures of a role."""
        with self._lock:
            return {
                "shard_disk_bytes_total": self.traffic.disk_bytes,
                "shard_store_bytes_total": self.traffic.store_bytes,
            }

    def is_open(self) -> bool:
        """Tell whether it may take something now."""
        return self._prepared and self._clock.now_s() >= max(self._away_until_s, self._full_until_s)

    def keep(self, version: CopyVersion, blocks: Mapping[int, memoryview]) -> None:
        """Keep blocks, given in their order, as far as they fit."""
        if blocks and self._asked(lambda: self._put(version, blocks)) == 0:
            self._full_until_s = self._clock.now_s() + _AWAY_S
            limit = format_bytes(self.directory.limit_bytes)
            self.tell(
                "full",
                f"is full at {limit} with shards that runs on this node use; what is not in it is read from its "
                "store each time: raise loader.shard_cache.limit",
            )

    def version_now(self, store: "fsspec.AbstractFileSystem", path: str) -> tuple[Any, str]:
        """Ask a store itself, and no listing that its client keeps, for size and stamp of a file."""
        if len(getattr(store, "dircache", ())):
            store = self._past_listings(store)
        entry = store.info(path)
        return entry.get("size"), stamp_of(entry)

    def _past_listings(self, store: "fsspec.AbstractFileSystem") -> "fsspec.AbstractFileSystem":
        with self._lock:
            # With the store itself: a number of one that is gone could come again.
            if id(store) not in self._fresh:
                options = {**store.storage_options, "use_listings_cache": False}
                fresh = type(store)(*store.storage_args, **options, skip_instance_cache=True)
                self._fresh[id(store)] = (store, fresh)
            return self._fresh[id(store)][1]

    def _sound(self, version: CopyVersion, wanted: Sequence[int]) -> dict[int, memoryview]:
        # What could not be looked at may be another's.
        if not self._prepared or (opened := self.directory.open(version)) is None:
            return {}
        files, found = opened
        try:
            sums_U = decode_map(found, version)
            if sums_U is None:
                return {}
            held: dict[int, memoryview] = {}
            for block in wanted:
                if (checksum := int(sums_U[block])) <= CLAIMED:
                    continue
                data = memoryview(files.read(*span_of(version, block)))
                if _checksum(data) == checksum:
                    held[block] = data
                    continue
                files.mark(block, CLAIMED)
                self.tell("damaged", f"block {block} of {version.name} is damaged; read anew")
            return held
        finally:
            files.release()

    def _put(self, version: CopyVersion, blocks: Mapping[int, memoryview]) -> int:
        """Keep blocks; return how many."""
        taken = self.directory.take_up(version, list(blocks))
        if taken is None:
            return 0
        files, fitting = taken
        try:
            for block in fitting:
                files.write(span_of(version, block)[0], blocks[block])
                # Behind the bytes, though order is not what is relied on: the checksum is.
                files.mark(block, _checksum(blocks[block]))
        finally:
            files.release()
        return len(fitting)

    def _asked(self, call: Callable[[], _Answer], *, reads: bool = False) -> _Answer | None:
        """Ask the directory; what fails is told once, and is no fault of the run."""
        try:
            return call()
        except (OSError, ConfigError) as error:
            # Reading goes on: what lies on a disk that takes no more is good.
            if not reads:
                self._away_until_s = self._clock.now_s() + _AWAY_S
            said = str(error)
            if isinstance(error, OSError) and error.errno in FULL:
                free = free_in(self.directory.root)
                said = f"{error.strerror}, {free}; make room, or lower loader.shard_cache.limit"
            self.tell("read" if reads else "away", f"{said}; going on from the store")
            return None

    def _catch_up(self) -> None:
        """Do what failed before, once its time is over: prepare the directory, and say what is in use."""
        if self._clock.now_s() < self._away_until_s:
            return
        if not self._prepared:
            self.prepare()
        if self._prepared and self.directory.has_unsaid:
            self._asked(self.directory.say_use)

    def tell(self, kind: str, message: str) -> None:
        """Log a message, the first of its kind: thousands of blocks may fail alike."""
        with self._lock:
            first = kind not in self._told
            self._told.add(kind)
        if first:
            _LOG.warning("the shard cache at %s: %s", self.directory.root, message)


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptShard:
    """A shard of a store, whose blocks are kept once they were read."""

    cache: ShardCache
    version: CopyVersion
    store: "fsspec.AbstractFileSystem"
    path: str
    stamp: str

    def open(self) -> io.BufferedIOBase:
        """Open it for reading, from the copy and the store as each has it."""
        return _KeptFile(self)

    def read_ranges(self, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
        """Return the bytes of each range; fewer where the file ends before it.

        Raises:
            ConfigError: It lies on a server that gives whole files alone.
            IntegrityError: The store says that it was written anew.
            Exception: What the store's client raises.
        """
        size = self.version.size_bytes
        ranges = [(min(start, size), min(stop, size)) for start, stop in ranges]
        wanted = sorted({block for each in ranges for block in blocks_of(each)})
        held = self.cache.blocks(self.version, wanted)
        missing = [block for block in wanted if block not in held]
        fetched = self._fetched(missing) if missing and self.cache.is_open() else {}
        held |= fetched
        # What is not to be kept is read as it is asked for, and no byte around it.
        gaps = [gap for each in ranges for gap in gaps_of(each, held)]
        data = dict(zip(gaps, self._from_store(gaps), strict=True)) if gaps else {}
        # Behind the bytes, kept or not: of a file that was written anew meanwhile they may be the new ones.
        if (fetched or data) and self._is_unchanged():
            self.cache.keep(self.version, fetched)
        return [joined(each, held, data) for each in ranges]

    def _fetched(self, missing: Sequence[int]) -> dict[int, memoryview]:
        """Read blocks from the store, those side by side in one request; return those that are whole."""
        extents = [extent_of(self.version, run) for run in runs_of(missing)]
        blocks: dict[int, memoryview] = {}
        for (start, _), data in zip(extents, self._from_store(extents), strict=True):
            view = memoryview(data)
            for at in range(0, len(view), BLOCK_BYTES):
                block = (start + at) // BLOCK_BYTES
                part = view[at : at + BLOCK_BYTES]
                # Of a file that was cut short the last one is not whole: read again as a gap, it shows that.
                if len(part) == span_of(self.version, block)[1]:
                    blocks[block] = part
        return blocks

    def _is_unchanged(self) -> bool:
        """Tell whether the store says that it is; where that gives no answer nothing is kept.

        Raises:
            IntegrityError: It is another. No other look says so while a client answers from a listing that it keeps.
        """
        try:
            now = self.cache.version_now(self.store, self.path)
        except Exception as error:  # noqa: BLE001 -- whatever its client raises: the next look says what it is
            said = f"{self.path} is not kept: its store does not say what it is now: {error}"
            self.cache.tell("unasked", said)
            return False
        then = (self.version.size_bytes, self.stamp)
        # Clients quote a tag in one answer and not in another.
        if (now[0], now[1].strip('"')) != (then[0], then[1].strip('"')):
            raise changed(self.path, then, now)
        return True

    def _from_store(self, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
        found = ranges_of(self.store, self.path, self.version.size_bytes, ranges)
        self.cache.add(Traffic(store_bytes=sum(map(len, found))))
        return found


class _KeptFile(io.BufferedIOBase):
    """A shard as a file. Reading on from where the last read ended reads ahead. For one thread at a time."""

    def __init__(self, shard: KeptShard) -> None:
        self._shard, self._at = shard, 0
        self._start, self._window = 0, b""

    @override
    def readable(self) -> bool:
        return True

    @override
    def seekable(self) -> bool:
        return True

    @override
    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at}.get(whence, self._shard.version.size_bytes)
        self._at = max(0, base + offset)
        return self._at

    @override
    def tell(self) -> int:
        return self._at

    @override
    def read(self, size: int | None = -1, /) -> bytes:
        left = max(0, self._shard.version.size_bytes - self._at)
        size = left if size is None or size < 0 else min(size, left)
        held = self._start <= self._at and self._at + size <= self._start + len(self._window)
        if size and not held:
            follows = self._start <= self._at <= self._start + len(self._window)
            ahead = max(size, _AHEAD_BYTES) if follows else size
            stop = min(self._at + ahead, self._shard.version.size_bytes)
            (self._window,) = self._shard.read_ranges([(self._at, stop)])
            self._start = self._at
        begin = self._at - self._start
        data = self._window[begin : begin + size] if size else b""
        self._at += len(data)
        return data


def open_shard_cache(
    config: ShardCacheConfig | None, base_dir: Path, wall_s: Callable[[], float] = time.time
) -> ShardCache | None:
    """Open what ``loader.shard_cache`` names; ``None`` for none. What is wrong with it costs a line in the log."""
    cache = shard_cache_of(config, base_dir, wall_s)
    if cache is not None:
        cache.prepare()
    return cache


def shard_cache_of(
    config: ShardCacheConfig | None, base_dir: Path, wall_s: Callable[[], float] = time.time
) -> ShardCache | None:
    """Return what ``loader.shard_cache`` names, to be looked at: nothing is made there; ``None`` for none."""
    if config is None:
        return None
    root = path_from(base_dir, config.path, "loader.shard_cache.path")
    return ShardCache(SharedDirectory(root, config.limit), wall_s=wall_s)


def _checksum(data: bytes | memoryview) -> int:
    # 0 says that a block is missing, as CLAIMED does.
    return max(xxhash.xxh3_64_intdigest(data), CLAIMED + 1)

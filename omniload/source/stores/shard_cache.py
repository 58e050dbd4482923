"""Reads shards from their store once: copies of ranges on a disk of the node, under a size limit.

Only speed depends on the cache. Blocks that are missing, damaged, of another version, or slow to come are read from the
store as without a cache, with the same samples and digests.
"""

import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import orjson
import xxhash

from fusefs.cache.disk_format import CopyVersion, decode_map
from omniload.base.clock import Clock, SystemClock
from omniload.base.errors import ConfigError
from omniload.base.log import get_logger
from omniload.base.settings.paths import path_from
from omniload.base.units import format_bytes
from omniload.base.writing import FULL, free_in
from omniload.mix.runtime import ShardCacheConfig
from omniload.source.stores.asking import entry_of, identity_of, is_settled, stamp_of
from omniload.source.stores.blocks import BLOCK_BYTES, CLAIMED, span_of
from omniload.source.stores.kept_shard import KeptShard
from omniload.source.stores.shared_directory import SharedDirectory

if TYPE_CHECKING:
    import fsspec

    from omniload.source.files import ShardFile

__all__ = ["ShardCache", "Traffic", "open_shard_cache", "shard_cache_of"]

_AWAY_S = 60.0
"""Pause of writing after an error of the directory, or when it is full."""
_LOG = get_logger(__name__)
_Answer = TypeVar("_Answer")


@dataclass(slots=True)
class Traffic:
    """Origins of the bytes of shards."""

    disk_bytes: int = 0
    """Bytes from copies, in whole blocks."""
    store_bytes: int = 0
    """Bytes from stores, of shards that are stored or may be."""


class ShardCache:
    """The copies of a directory that this process reads and writes.

    Thread-safe, but not in a process that was forked while another thread held its lock.

    Args:
        directory: Directory of the copies.
        clock: Clock for the pauses of a directory.
        wall_s: Present time in seconds since 1970, which modification times are compared with.
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
        """Make the directory, or find it; if it cannot be used, this logs a warning, and is tried again later."""

        def prepared() -> bool:
            self.directory.prepare()
            return True

        self._prepared = bool(self._ask_directory(prepared))

    def through(self, files: Iterable["ShardFile"]) -> tuple["ShardFile", ...]:
        """Return files that are read through this cache, and mark their copies as used."""
        through = tuple(file.kept_in(self) for file in files)
        every = (each for file in through for each in (file, *file.beside))
        self.directory.use(each.kept.version.name for each in every if each.kept is not None)
        self._catch_up()
        return through

    def shard(
        self, store: "fsspec.AbstractFileSystem", path: str, size_bytes: int, stamp: str, tag: str
    ) -> KeptShard | None:
        """Return a shard that is read through this cache; ``None`` if its store does not distinguish versions.

        Args:
            store: Store of the shard.
            path: The shard.
            size_bytes: Size of the shard.
            stamp: Value that changes if the shard is written again.
            tag: Value that changes with the content, if the store has one.
        """
        if not size_bytes or not is_settled(stamp, tag, self._wall_s()):
            return None
        said = [identity_of(store), path, size_bytes, stamp, BLOCK_BYTES]
        key = orjson.dumps([str(each).encode(errors="surrogateescape").hex() for each in said])
        version = CopyVersion(key.decode(), size_bytes, -(-size_bytes // BLOCK_BYTES))
        return KeptShard(cache=self, version=version, store=store, path=path, stamp=stamp)

    def blocks(self, version: CopyVersion, wanted: Sequence[int]) -> dict[int, memoryview]:
        """Return the stored and sound ones of some blocks, in order."""
        self._catch_up()
        found = self._ask_directory(lambda: self._sound(version, wanted), reads=True) or {}
        self.add(Traffic(disk_bytes=sum(map(len, found.values()))))
        return found

    def traffic_since(self) -> Traffic:
        """Return the traffic since the last call, for a caller that counts it elsewhere."""
        with self._lock:
            since, self.traffic = self.traffic, Traffic()
        return since

    def add(self, traffic: Traffic) -> None:
        """Count bytes for this process, or for one that reads for it."""
        with self._lock:
            self.traffic.disk_bytes += traffic.disk_bytes
            self.traffic.store_bytes += traffic.store_bytes

    def count_fetched(self, size_bytes: int) -> None:
        """Count bytes that came from a store."""
        self.add(Traffic(store_bytes=size_bytes))

    def figures(self) -> dict[str, float]:
        """Return the traffic under the names of a role's figures."""
        with self._lock:
            return {
                "shard_disk_bytes_total": self.traffic.disk_bytes,
                "shard_store_bytes_total": self.traffic.store_bytes,
            }

    def is_open(self) -> bool:
        """Return whether the cache accepts blocks now."""
        return self._prepared and self._clock.now_s() >= max(self._away_until_s, self._full_until_s)

    def keep(self, version: CopyVersion, blocks: Mapping[int, memoryview]) -> None:
        """Store blocks, which are given in order, as far as they fit."""
        if blocks and self._ask_directory(lambda: self._put(version, blocks)) == 0:
            self._full_until_s = self._clock.now_s() + _AWAY_S
            limit = format_bytes(self.directory.limit_bytes)
            self.tell(
                "full",
                f"is full at {limit} with shards that runs on this node use; all other shards are read from their "
                "stores each time: raise loader.shard_cache.limit",
            )

    def version_now(self, store: "fsspec.AbstractFileSystem", path: str) -> tuple[Any, str]:
        """Ask a store directly, without its client's cached listings, for the size and stamp of a file."""
        store = self._past_listings(store) if len(getattr(store, "dircache", ())) else store
        entry = entry_of(store, path)
        return entry.get("size"), stamp_of(entry)

    def _past_listings(self, store: "fsspec.AbstractFileSystem") -> "fsspec.AbstractFileSystem":
        with self._lock:
            # Keeps the store as well, because the id of a deleted store may be used again.
            if id(store) not in self._fresh:
                options = {**store.storage_options, "use_listings_cache": False}
                fresh = type(store)(*store.storage_args, **options, skip_instance_cache=True)
                self._fresh[id(store)] = (store, fresh)
            return self._fresh[id(store)][1]

    def _sound(self, version: CopyVersion, wanted: Sequence[int]) -> dict[int, memoryview]:
        # A directory that could not be checked may belong to someone else.
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
                self.tell(
                    "damaged",
                    f"block {block} of {version.name} is damaged; it is read again from its store",
                )
            return held
        finally:
            files.release()

    def _put(self, version: CopyVersion, blocks: Mapping[int, memoryview]) -> int:
        """Store blocks; return their number."""
        taken = self.directory.take_up(version, list(blocks))
        if taken is None:
            return 0
        files, fitting = taken
        try:
            for block in fitting:
                files.write(span_of(version, block)[0], blocks[block])
                # After the bytes; correctness depends on the checksum, not on this order.
                files.mark(block, _checksum(blocks[block]))
        finally:
            files.release()
        return len(fitting)

    def _ask_directory(self, call: Callable[[], _Answer], *, reads: bool = False) -> _Answer | None:
        """Call the directory; a failure is reported once, and does not end the run."""
        try:
            return call()
        except (OSError, ConfigError) as error:
            # Reads continue, because data on a full disk is still valid.
            if not reads:
                self._away_until_s = self._clock.now_s() + _AWAY_S
            said = str(error)
            if isinstance(error, OSError) and error.errno in FULL:
                free = free_in(self.directory.root)
                said = f"{error.strerror}, {free}; make room, or lower loader.shard_cache.limit"
            self.tell("read" if reads else "away", f"{said}; reads continue from the store")
            return None

    def _catch_up(self) -> None:
        """Repeat earlier failed steps after the pause: prepare the directory, and report used copies."""
        if self._clock.now_s() < self._away_until_s:
            return
        if not self._prepared:
            self.prepare()
        if self._prepared and self.directory.has_unsaid:
            self._ask_directory(self.directory.say_use)

    def tell(self, kind: str, message: str) -> None:
        """Log the first message of each kind, because thousands of blocks may fail alike."""
        with self._lock:
            first = kind not in self._told
            self._told.add(kind)
        if first:
            _LOG.warning("the shard cache at %s: %s", self.directory.root, message)


def open_shard_cache(
    config: ShardCacheConfig | None, base_dir: Path, wall_s: Callable[[], float] = time.time
) -> ShardCache | None:
    """Open the cache of ``loader.shard_cache``; ``None`` if there is none. Faults of it only log a warning."""
    cache = shard_cache_of(config, base_dir, wall_s)
    if cache is not None:
        cache.prepare()
    return cache


def shard_cache_of(
    config: ShardCacheConfig | None, base_dir: Path, wall_s: Callable[[], float] = time.time
) -> ShardCache | None:
    """Return the cache of ``loader.shard_cache`` for inspection, without creating it; ``None`` if there is none."""
    if config is None:
        return None
    root = path_from(base_dir, config.path, "loader.shard_cache.path")
    return ShardCache(SharedDirectory(root, config.limit), wall_s=wall_s)


def _checksum(data: bytes | memoryview) -> int:
    # 0 marks a missing block, and so does CLAIMED.
    return max(xxhash.xxh3_64_intdigest(data), CLAIMED + 1)

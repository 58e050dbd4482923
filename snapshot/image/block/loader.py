"""Passes wanted blocks to a ``Fetcher``, and its requests to tiers. Makes no decisions."""

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol

from typing_extensions import override

from omniload.base.errors import IntegrityError, OmniloadError, UnavailableError
from omniload.base.log import get_logger
from omniload.base.lru import Lru
from snapshot.image.block.fetcher import (
    LOOK_AHEAD,
    BlocksFetched,
    BlockWanted,
    Event,
    FetchBlocks,
    Fetcher,
    FetchSettings,
    GiveUpBlock,
    HandOverBlock,
    Priority,
)
from snapshot.image.block.store import BlockStore
from snapshot.image.layer.index import BlockRef, LayerIndex, block_refs
from snapshot.oci.store import ImageStore

__all__ = ["BlockLoader", "BlockTier", "RegistryTier"]

_log = get_logger(__name__)


class BlockTier(Protocol):
    """A place that blocks can be asked for. Called from several threads."""

    def fetch(self, index: LayerIndex, blocks: Sequence[BlockRef]) -> tuple[dict[str, bytes], int]:
        """Return the blocks that are here, by digest, and the bytes that were moved.

        The blocks are adjacent in one blob. Each returned block was compared with
        its digest; a missing or wrong block is left out.

        Raises:
            UnavailableError: Nobody answers.
            FileNotFoundError: There is nothing of this blob.
        """
        ...


class RegistryTier(BlockTier):
    """The blobs of an image store, read in ranges."""

    def __init__(self, store: ImageStore) -> None:
        self._store = store

    @override
    def fetch(self, index: LayerIndex, blocks: Sequence[BlockRef]) -> tuple[dict[str, bytes], int]:
        ranges = [index.blob_range(ref.number) for ref in blocks]
        start = ranges[0][0]
        size = max(offset + length for offset, length in ranges) - start
        raw = memoryview(self._store.blob_range(index.blob_digest, start, size))
        found = {}
        for ref, (offset, length) in zip(blocks, ranges, strict=True):
            try:
                part = raw[offset - start : offset - start + length]
                found[ref.digest] = index.decode(ref.number, part)
            except IntegrityError as error:
                _log.warning("%s: %s", self._store.location, error)
        return found, size


class BlockLoader:
    """Blocks from memory, disk, and tiers; each is fetched once for any number of callers.

    ``on_settled`` is called for each wanted block that arrived, or that no tier has. The lock is held,
    so it must not call back.
    """

    def __init__(
        self,
        tiers: Mapping[str, BlockTier],
        disk: BlockStore | None = None,
        settings: FetchSettings | None = None,
        *,
        memory_bytes: int = 256 << 20,
        on_settled: Callable[[str, bool], None] = lambda *_: None,
    ) -> None:
        settings = settings or FetchSettings(tiers=tuple(tiers))
        self._tiers = tiers
        self._disk = disk
        self._fetcher = Fetcher(settings=settings)
        self._lock = threading.Lock()
        self._pool = ThreadPoolExecutor(settings.slots, "omniload-fetch")
        self._memory: Lru[str, bytes] = Lru(memory_bytes)
        self._waiting: dict[str, Future[bytes]] = {}
        self._came: dict[str, bytes] = {}
        self._errors: dict[str, Exception] = {}
        self._indexes: dict[str, LayerIndex] = {}
        self._closed = False
        self._on_settled = on_settled
        self.bytes_of: dict[str, int] = dict.fromkeys(("disk", *tiers), 0)
        """Bytes moved, by tier: reads for the disk, bytes on the wire for the others."""
        self.waits = 0
        """Number of times that a reader waited for a tier, which prefetch is to avoid."""
        self.requests = 0
        """Number of requests to tiers."""

    def cached(self, index: LayerIndex, number: int) -> bytes | None:
        """Return a block that is in memory; never waits."""
        with self._lock:
            return self._memory.get(index.digest(number))

    def block(self, index: LayerIndex, number: int) -> bytes:
        """Return a block; wait if it must be fetched.

        Raises:
            UnavailableError: No tier answered.
            IntegrityError: No tier has the right bytes.
        """
        data = self.cached(index, number)
        if data is not None:
            return data
        (ref,) = block_refs(index, (number,))
        # Without the lock, or a slow disk would delay readers whose blocks are in memory.
        if self._disk is not None and (data := self._disk.get(ref.digest)) is not None:
            with self._lock:
                self._memory.put(ref.digest, data, len(data))
                self.bytes_of["disk"] += len(data)
            return data
        beside = self._beside(index, ref)
        with self._lock:
            if self._closed:
                raise UnavailableError("the image is being unmounted; mount it again")
            self._indexes[index.blob_digest] = index
            # The block may have arrived since the first look.
            if (data := self._memory.get(ref.digest)) is not None:
                return data
            self.waits += 1
            future = self._waiting.setdefault(ref.digest, Future())
            self._apply(BlockWanted((ref, *beside), Priority.DEMAND))
        return future.result()

    def _beside(self, index: LayerIndex, ref: BlockRef) -> tuple[BlockRef, ...]:
        """Return the blocks that follow a block closely in its blob, and are not here."""
        end = min(ref.number + 1 + LOOK_AHEAD, len(index.blocks_B))
        most = ref.offset + self._fetcher.settings.beside_bytes
        found = []
        for each in block_refs(index, range(ref.number + 1, end)):
            if not ref.end <= each.offset <= each.end <= most:
                break
            if not self._is_here(each.digest):
                found.append(each)
        return tuple(found)

    def prefetch(self, index: LayerIndex, refs: Sequence[BlockRef]) -> tuple[BlockRef, ...]:
        """Request blocks of a layer; return at once the blocks that are not here yet."""
        # Without the lock, because this asks the disk, and readers would wait.
        here = {ref.digest for ref in refs if self._is_here(ref.digest)}
        with self._lock:
            # Blocks may have arrived since.
            here.update(ref.digest for ref in refs if ref.digest in self._memory)
            absent = tuple(ref for ref in refs if ref.digest not in here)
            if absent:
                self._indexes[index.blob_digest] = index
                self._apply(BlockWanted(absent, Priority.HOT))
        return absent

    def _is_here(self, digest: str) -> bool:
        return digest in self._memory or (self._disk is not None and self._disk.has(digest))

    def close(self) -> None:
        """End the threads; a waiting read ends with an error."""
        with self._lock:
            self._closed = True
            waiting = list(self._waiting.values())
            self._waiting.clear()
        # Without the lock, because a woken thread may ask for the next block at once.
        for future in waiting:
            future.set_exception(UnavailableError("the image is being unmounted; mount it again"))
        self._pool.shutdown(cancel_futures=True)
        moved, asked = self.bytes_of, self.requests
        _log.info("bytes by tier: %s; %d requests, %d waits", moved, asked, self.waits)

    def _apply(self, event: Event) -> None:
        """Pass an event to the machine and execute its commands; call it with the lock held."""
        for command in self._fetcher.handle(event):
            match command:
                case FetchBlocks():
                    if not self._closed:
                        self._pool.submit(self._fetch, command)
                case HandOverBlock(digest=digest):
                    data = self._came.pop(digest)
                    self._errors.pop(digest, None)
                    self._memory.put(digest, data, len(data))
                    if (future := self._waiting.pop(digest, None)) is not None:
                        future.set_result(data)
                    self._on_settled(digest, True)
                case GiveUpBlock(digest=digest):
                    error = self._errors.pop(digest, None) or UnavailableError(
                        f"no tier has {digest}"
                    )
                    if (future := self._waiting.pop(digest, None)) is not None:
                        future.set_exception(error)
                    self._on_settled(digest, False)

    def _fetch(self, command: FetchBlocks) -> None:
        """Make one request, in a thread of the pool."""
        index = self._indexes[command.blocks[0].blob]
        found: dict[str, bytes] = {}
        moved = 0
        problem: Exception = IntegrityError(
            f"layer {index.blob_digest}: {command.tier} has no right bytes for it; see the log"
        )
        try:
            found, moved = self._tiers[command.tier].fetch(index, command.blocks)
        except (OmniloadError, FileNotFoundError) as error:
            _log.warning("%s: %s", command.tier, error)
            missing = isinstance(error, FileNotFoundError)
            problem = UnavailableError(str(error)) if missing else error
        except BaseException as error:
            _log.exception("defect in tier %s", command.tier)
            problem = UnavailableError(f"{command.tier}: {error!r}")
            raise
        finally:
            with self._lock:
                self.bytes_of[command.tier] += moved
                self.requests += 1
                self._came.update(found)
                # The error of the last tier is raised; the log has those of earlier tiers.
                absent = (ref.digest for ref in command.blocks if ref.digest not in found)
                self._errors.update(dict.fromkeys(absent, problem))
                self._apply(BlocksFetched(command.request, frozenset(found)))
        if self._disk is not None:  # last, because the waiting threads have their block already
            self._disk.put_all(found)

"""Readers of parts of a source, beside the one that divides its reads among them."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from omniload.base.errors import UnavailableError
from omniload.mix.fingerprint import SourceFacts
from omniload.source.block_memory import BlockMemory
from omniload.source.parts.sample_block import SampleBlock
from omniload.source.parts.share import Part
from omniload.source.record_source import RecordSource
from omniload.source.stores.shard_cache import ShardCache, Traffic

__all__ = ["OpenPart", "PartRead", "PartReader", "ReaderLostError", "StartReader"]


class ReaderLostError(UnavailableError):
    """A reader has ended, or does not answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PartRead:
    """What a reader gives."""

    block: SampleBlock
    traffic: Traffic
    """What its shards took since it was asked before."""
    busy_s: float
    """Processor seconds that it has taken."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenPart:
    """A source that a reader has open, to read parts of it."""

    source: RecordSource
    memory: BlockMemory = field(default_factory=BlockMemory)
    """That of this reader alone, for decoded blocks."""
    memory_bytes: int | None = None
    """What all readers of the source have of it together; ``None`` for any amount."""
    shards: ShardCache | None = None
    """That of this reader alone."""

    def read(self, start: int, stop: int, part: Part, without: tuple[int, ...] = ()) -> PartRead:
        """Read a part of a range, less some shards."""
        if self.memory_bytes is not None:
            # As many share it as read at present; it holds from the next block on.
            self.memory.limit_bytes = self.memory_bytes // part.of
        began_s = time.thread_time()
        block = self.source.read_part(start, stop, part, without)
        busy_s = time.thread_time() - began_s
        traffic = Traffic() if self.shards is None else self.shards.traffic_since()
        return PartRead(block=block, traffic=traffic, busy_s=busy_s)


class PartReader(Protocol):
    """A reader of parts of a source. It opens the source for itself."""

    def facts(self) -> SourceFacts | None:
        """Return what it found in the source; ``None`` while it is opening it.

        Raises:
            OmniloadError: It could not open it, or is lost.
        """
        ...

    def read(
        self, start: int, stop: int, part: Part, without: tuple[int, ...] = ()
    ) -> Callable[[], PartRead]:
        """Begin to read a part of a range, less some shards; what is returned waits for it.

        That raises ``ReaderLostError`` where the reader is lost, or what the reader raised.
        """
        ...

    def close(self) -> None:
        """End it, whatever it does."""
        ...


StartReader = Callable[[int], PartReader]
"""Starts the further reader of a number, from 1."""

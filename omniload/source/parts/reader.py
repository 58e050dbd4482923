"""Readers of parts of a source, which help the reader that divides its reads among them."""

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
    """The answer of a reader."""

    block: SampleBlock
    traffic: Traffic
    """Traffic of its shards since the previous read."""
    busy_s: float
    """Processor seconds that the read took."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenPart:
    """A source that a reader has opened to read parts of it."""

    source: RecordSource
    memory: BlockMemory = field(default_factory=BlockMemory)
    """Memory for decoded blocks of this reader alone."""
    memory_bytes: int | None = None
    """Memory limit of all readers of the source together; ``None`` for no limit."""
    shards: ShardCache | None = None
    """Shard cache of this reader alone."""

    def read(self, start: int, stop: int, part: Part, without: tuple[int, ...] = ()) -> PartRead:
        """Read a part of a range, without some shards."""
        if self.memory_bytes is not None:
            # The limit is divided by the present number of readers, from the next block on.
            self.memory.limit_bytes = self.memory_bytes // part.of
        began_s = time.thread_time()
        block = self.source.read_part(start, stop, part, without)
        busy_s = time.thread_time() - began_s
        traffic = Traffic() if self.shards is None else self.shards.traffic_since()
        return PartRead(block=block, traffic=traffic, busy_s=busy_s)


class PartReader(Protocol):
    """A reader of parts of a source, which opens the source for itself."""

    def facts(self) -> SourceFacts | None:
        """Return the facts that the reader found in the source; ``None`` while it is opening the source.

        Raises:
            OmniloadError: The reader could not open the source, or is lost.
        """
        ...

    def read(
        self, start: int, stop: int, part: Part, without: tuple[int, ...] = ()
    ) -> Callable[[], PartRead]:
        """Begin to read a part of a range, without some shards, and return a function that waits for the result.

        The function raises ``ReaderLostError`` if the reader is lost, or otherwise the error of the reader.
        """
        ...

    def close(self) -> None:
        """End the reader at once, even if it is reading."""
        ...


StartReader = Callable[[int], PartReader]
"""Starts the further reader with a given number, from 1."""

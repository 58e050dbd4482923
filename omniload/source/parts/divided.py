"""A source that several readers read at once. What it gives is what one reader gives.

::

    read(start, stop) ──▶ own part, here     ─┐
                      ──▶ part 1, reader 1   ─┼─▶ merged by position
                      ──▶ part 2, reader 2   ─┘

A reader is a function of positions and holds nothing that cannot be read again: while one is
being opened, or was lost, the source reads everything itself. One may be a thread: decoding
and tokenising let go of the interpreter.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError
from dataclasses import dataclass
from typing import Protocol

from typing_extensions import override

from omniload.base.concurrency.threads import DaemonPool
from omniload.base.errors import OmniloadError, StateError, UnavailableError
from omniload.base.log import get_logger
from omniload.mix.fingerprint import SourceFacts
from omniload.source.block_memory import BlockMemory
from omniload.source.parts.sample_block import SampleBlock, merged
from omniload.source.parts.share import Bad, Part
from omniload.source.source import RecordSource, Source
from omniload.source.stores.shard_cache import ShardCache, Traffic

__all__ = [
    "DividedSource",
    "OpenPart",
    "PartRead",
    "PartReader",
    "ReaderLostError",
    "StartReader",
    "ThreadReader",
]

_LOST_MOST = 5
"""Readers that may be lost in a row without a read; the next one would be lost too."""
_LOG = get_logger(__name__)
_LEAVE_S = 1.0
"""A read that takes longer is left alone: nobody hears of it."""


class ReaderLostError(UnavailableError):
    """A reader has ended, or does not answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PartRead:
    """What a reader gives."""

    block: SampleBlock
    bad: Bad
    """All that it has left out so far."""
    traffic: Traffic
    """What its shards took since it was asked before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenPart:
    """A source that a reader has open, to read one part of it."""

    source: RecordSource
    part: Part
    shards: ShardCache | None = None
    """That of this reader alone."""

    def read(self, start: int, stop: int, without: tuple[int, ...] = ()) -> PartRead:
        """Read the part of a range, less some shards."""
        block = self.source.read_part(start, stop, self.part, without)
        traffic = Traffic() if self.shards is None else self.shards.traffic_since()
        return PartRead(block=block, bad=self.source.found_bad(), traffic=traffic)


class PartReader(Protocol):
    """A reader of one part of a source. It opens the source for itself."""

    def facts(self) -> SourceFacts | None:
        """Return what it found in the source; ``None`` while it is opening it.

        Raises:
            OmniloadError: It could not open it, or is lost.
        """
        ...

    def read(self, start: int, stop: int, without: tuple[int, ...] = ()) -> Callable[[], PartRead]:
        """Begin to read its part of a range, less some shards; what is returned waits for it.

        That raises ``ReaderLostError`` where the reader is lost, or what the reader raised.
        """
        ...

    def close(self) -> None:
        """End it, whatever it does."""
        ...


StartReader = Callable[[Part], PartReader]
"""Starts the reader of a part."""


class DividedSource(Source):
    """A source and its further readers. For one thread, as every source."""

    def __init__(
        self, own: RecordSource, readers: int, start: StartReader, shards: ShardCache | None = None
    ) -> None:
        """Have ``readers`` readers, this one included; the others are started at the first read.

        What the others read of shards is counted by ``shards``.
        """
        self.own, self._shards = own, shards
        self.name, self.positions_per_epoch = own.name, own.positions_per_epoch
        self.fingerprint, self.transforms_digest = own.fingerprint, own.transforms_digest
        self.shards_digest, self.content_digest = own.shards_digest, own.content_digest
        self.drawn_before_digest = own.drawn_before_digest
        self.shards = own.shards
        self._parts = [Part(number, readers) for number in range(readers)]
        self._start = start
        self._others: Sequence[PartReader] | None = None
        self._lost, self._closed = 0, False

    @override
    def share(self, memory: BlockMemory) -> None:
        self.own.share(memory)

    @override
    def shard_at(self, position: int) -> int:
        return self.own.shard_at(position)

    @override
    def stand_at(self, start: int, stop: int, without: tuple[int, ...] = ()) -> int:
        # All of it here: the first reads are this reader's alone, until the others have the source open.
        return self.own.stand_at(start, stop, without)

    @override
    def read(self, start: int, stop: int, without: tuple[int, ...] = ()) -> SampleBlock:
        others = self._ready()
        if not others:
            return self.own.read(start, stop, without)
        # Asked before this one reads: all of them work meanwhile.
        asked = [reader.read(start, stop, without) for reader in others]
        mine = self.own.read_part(start, stop, self._parts[0], without)
        try:
            parts = [answer() for answer in asked]
        except (ReaderLostError, CancelledError) as error:
            self._lose(error)
            # All of it: what others have read of it already is not waited for.
            return self.own.read(start, stop, without)
        for part in parts:
            self.own.add_bad(part.bad)
            if self._shards is not None:
                self._shards.add(part.traffic)
        # Those that were lost count in a row: a host that ends a process now and then is lived with.
        self._lost = 0
        return merged([mine, *(part.block for part in parts)])

    def close(self) -> None:
        """End the readers; what is read after that is read by this one."""
        # First: a reader that is lost by this is not started anew.
        self._closed = True
        self._end()

    def _ready(self) -> Sequence[PartReader]:
        """Return the other readers once all have the source open; nobody is waited for."""
        if self._closed or self._lost > _LOST_MOST:
            return ()
        if self._others is None:
            self._others = [self._start(part) for part in self._parts[1:]]
        try:
            found = [reader.facts() for reader in self._others]
        except (OmniloadError, CancelledError) as error:
            self._lose(error)
            return ()
        for facts in found:
            # It was written anew between two openings: rows of two sources would be merged.
            if facts not in (None, self.facts):
                raise StateError(
                    f"source {self.name!r}: another reader found {facts}, this one {self.facts}; "
                    "keep the files of a run as they are"
                )
        # All or none: a part without a reader would have to be read here, a block at a time beside the own one.
        return () if None in found else self._others

    def _lose(self, error: Exception) -> None:
        """Begin anew with other readers; one that is lost may have taken others along."""
        self._lost += 1
        self._end()
        if self._closed:
            return
        what = "others are started" if self._lost <= _LOST_MOST else "no other is started"
        _LOG.warning(
            "source %s: a reader was lost, %s, this process reads all: %s", self.name, what, error
        )

    def _end(self) -> None:
        others, self._others = self._others or (), None
        for reader in others:
            reader.close()


class ThreadReader(PartReader):
    """Opens the source once more, and reads its part of it."""

    def __init__(self, open_part: Callable[[Part], OpenPart], part: Part) -> None:
        self._thread = DaemonPool(1, "omniload-part-reader")
        # In the thread that reads: a source is for one thread.
        self._opening = self._thread.submit(lambda: open_part(part))

    @override
    def facts(self) -> SourceFacts | None:
        return self._opening.result().source.facts if self._opening.done() else None

    @override
    def read(self, start: int, stop: int, without: tuple[int, ...] = ()) -> Callable[[], PartRead]:
        return self._thread.submit(lambda: self._opening.result().read(start, stop, without)).result

    @override
    def close(self) -> None:
        self._thread.close(_LEAVE_S)

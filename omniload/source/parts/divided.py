"""A source that several readers read at once. What it gives is what one reader gives.

::

    read(start, stop) ──▶ own part, here     ─┐
                      ──▶ part 1, reader 1   ─┼─▶ merged by position
                      ──▶ part 2, reader 2   ─┘

A reader is a function of positions and holds nothing that cannot be read again. So each read may
be divided among others than the one before it: while one is being opened, the rest read as they
did, and where one was lost the source reads everything itself. One may be a thread: decoding and
tokenising let go of the interpreter.
"""

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError
from dataclasses import dataclass, field
from typing import Protocol

from typing_extensions import override

from omniload.base.clock import Clock, SystemClock
from omniload.base.concurrency.threads import DaemonPool
from omniload.base.errors import OmniloadError, StateError, UnavailableError
from omniload.base.log import get_logger
from omniload.mix.fingerprint import SourceFacts
from omniload.source.block_memory import BlockMemory
from omniload.source.parts.sample_block import SampleBlock, merged
from omniload.source.parts.share import Part
from omniload.source.record_source import RecordSource
from omniload.source.source import Source
from omniload.source.stores.shard_cache import ShardCache, Traffic

__all__ = [
    "DividedSource",
    "OpenPart",
    "PartRead",
    "PartReader",
    "ReadSoFar",
    "ReaderLostError",
    "StartReader",
    "ThreadReader",
]

_LOST_MOST = 5
"""Readers that may be lost in a row without a read; the next one would most likely be lost too."""
_AGAIN_S = 600.0
"""After so long others are started again: there may be memory for them, or whatever ended them may be over."""
_STORE_AWAY_S = 5.0
"""The same where the store did not answer one that opened the source: that says nothing of readers. Each further time
in a row it is twice as long, up to ``_AGAIN_S``: memory or descriptors may be wanting for good."""
_LOG = get_logger(__name__)
_LOOK_S = 0.25
"""From one look at readers that no read waits for to the next, as the roster looks at roles."""
_LEAVE_S = 1.0
"""A read that takes longer is left alone: nobody hears of it."""


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


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadSoFar:
    """What all reads of a source have taken so far."""

    busy_s: float = 0.0
    """Processor seconds of the busiest reader of each read, summed over reads."""
    tokens: int = 0
    readers: int = 1
    """Among how many the last read was divided."""


class DividedSource(Source):
    """A source and its further readers. For one thread, as every source; ``divide`` and ``close`` for any."""

    def __init__(
        self,
        own: RecordSource,
        readers: int,
        start: StartReader,
        shards: ShardCache | None = None,
        clock: Clock | None = None,
    ) -> None:
        """Have ``readers`` readers, this one included; the others are started at the first read, or ``at_once``.

        What the others read of shards is counted by ``shards``.
        """
        self.own, self._shards = own, shards
        self.name, self.positions_per_epoch = own.name, own.positions_per_epoch
        self.fingerprint, self.transforms_digest = own.fingerprint, own.transforms_digest
        self.shards_digest, self.content_digest = own.shards_digest, own.content_digest
        self.drawn_before_digest = own.drawn_before_digest
        self.shards = own.shards
        self.so_far = ReadSoFar()
        self._start, self._clock = start, clock or SystemClock()
        self._wanted, self._at_once = readers, False
        self._others: list[PartReader] = []
        self._dividing = 0
        """Others among whom reads are divided: those that had the source open when all of them had."""
        self._lost, self._closed = 0, False
        self._away_s = _STORE_AWAY_S
        """Wait after the next one that cannot open the source."""
        self._again_s = 0.0
        """When others are started again, where many were lost."""
        self._look_s = 0.0
        """When those that no read has asked are looked at."""
        self._reads = threading.Lock()
        self._ends = threading.Lock()

    def divide(self, readers: int, *, at_once: bool = False) -> None:
        """Have so many readers from the next read on. Those that are too many end now, or with the read under way.

        Those that are missing are started with the next read, or ``at_once``, as those that are too many end.
        """
        self._wanted, self._at_once = readers, at_once
        self._settle()

    def look(self) -> None:
        """Replace readers that have ended, or are stopped, between reads: the next read would wait for them first.

        Nobody is waited for; while a read is under way, that notices it.
        """
        if self._clock.now_s() < max(self._look_s, self._again_s):
            return
        if not self._reads.acquire(blocking=False):
            return  # a read looks at them
        try:
            self._look_s = self._clock.now_s() + _LOOK_S
            for reader in list(self._others):
                reader.facts()
        except (OmniloadError, CancelledError) as error:
            self._lose(error)
        finally:
            self._reads.release()
        self._settle()

    @property
    def lost(self) -> int:
        """Readers that were lost in a row, where so many were that it reads alone for a while; else 0."""
        return self._lost if self._lost > _LOST_MOST else 0

    @override
    def give_way(self) -> None:
        self.own.give_way()

    @override
    def shard_at(self, position: int) -> int:
        return self.own.shard_at(position)

    @override
    def place_at(self, position: int) -> tuple[str, str]:
        return self.own.place_at(position)

    @override
    def stand_at(self, start: int, stop: int, without: tuple[int, ...] = ()) -> int:
        # All of it here: the first reads are this reader's alone, until the others have the source open.
        return self.own.stand_at(start, stop, without)

    @override
    def read(self, start: int, stop: int, without: tuple[int, ...] = ()) -> SampleBlock:
        try:
            with self._reads:
                began_s, before = time.thread_time(), self.so_far
                block, beyond_s, readers = self._read(start, stop, without)
                self.so_far = ReadSoFar(
                    busy_s=before.busy_s + time.thread_time() - began_s + beyond_s,
                    tokens=before.tokens + len(block.tokens.values_V),
                    readers=readers,
                )
        finally:
            self._settle()
        return block

    def _read(
        self, start: int, stop: int, without: tuple[int, ...]
    ) -> tuple[SampleBlock, float, int]:
        """Return what was read, what the busiest reader had to do beyond this one, and how many they were."""
        others = self._readers_now()
        if not others:
            return self.own.read(start, stop, without), 0.0, 1
        readers = len(others) + 1
        # Asked before this one reads: all of them work meanwhile.
        asked = [
            reader.read(start, stop, Part(number, readers), without)
            for number, reader in enumerate(others, 1)
        ]
        began_s = time.thread_time()
        mine = self.own.read_part(start, stop, Part(0, readers), without)
        mine_s = time.thread_time() - began_s
        try:
            parts = [answer() for answer in asked]
        except (ReaderLostError, CancelledError) as error:
            self._lose(error)
            # All of it: what others have read of it already is not waited for.
            return self.own.read(start, stop, without), 0.0, 1
        for part in parts:
            if self._shards is not None:
                self._shards.add(part.traffic)
        # Those that were lost count in a row: a host that ends a process now and then is lived with.
        self._lost, self._away_s = 0, _STORE_AWAY_S
        if len(others) == self._num_wanted():
            self._at_once = False  # more of them are started with a read
        beyond_s = max(0.0, max(part.busy_s for part in parts) - mine_s)
        return merged([mine, *(part.block for part in parts)]), beyond_s, readers

    def close(self) -> None:
        """End the readers; what is read after that is read by this one."""
        # First: a reader that is lost by this is not started anew. One that a read starts at this moment ends with it.
        self._closed = True
        self._end_beyond(0)

    def _readers_now(self) -> Sequence[PartReader]:
        """Return those among whom this read is divided; nobody is waited for."""
        wanted, others = self._wanted - 1, self._others
        if self._closed or self._clock.now_s() < self._again_s:
            return ()
        self._end_beyond(wanted)
        self._start_missing()
        try:
            found = [reader.facts() for reader in others]
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
        # All or as before: with each that opened by itself, units of the block would be decoded by others once more.
        if None not in found:
            self._dividing = len(others)
        return others[: self._dividing]

    def _start_missing(self) -> None:
        first, last = len(self._others) + 1, self._num_wanted()
        self._others += [self._start(number) for number in range(first, last + 1)]

    def _settle(self) -> None:
        """End readers that are too many, unless a read is under way: that one does so at its end."""
        # Looked at again once it is let go of: whoever wanted fewer meanwhile has left it to this thread.
        while (self._are_too_many() or self._are_missing()) and self._reads.acquire(blocking=False):
            try:
                self._end_beyond(self._num_wanted())
                if self._are_missing():
                    self._start_missing()
            finally:
                self._reads.release()

    def _num_wanted(self) -> int:
        """Return how many other readers there are to be."""
        return 0 if self._closed else max(0, self._wanted - 1)

    def _are_too_many(self) -> bool:
        return len(self._others) > self._num_wanted()

    def _are_missing(self) -> bool:
        """Tell whether some are to be started before a read wants them."""
        is_over = not self.lost and self._clock.now_s() >= self._again_s
        return self._at_once and is_over and len(self._others) < self._num_wanted()

    def _lose(self, error: Exception) -> None:
        """Begin anew with other readers; one that is lost may have taken others along."""
        # An outage outlasts many that are started in it, and the reads here tell of it.
        is_away = isinstance(error, UnavailableError) and not isinstance(error, ReaderLostError)
        self._lost += not is_away
        after_s = _AGAIN_S if self.lost else self._away_s if is_away else 0.0
        if is_away:
            self._away_s = min(2 * self._away_s, _AGAIN_S)
        self._again_s = self._clock.now_s() + after_s
        self._end_beyond(0)
        if self._closed:
            return
        done = "could not open it" if is_away else "was lost"
        what = f"others are tried in {after_s:.0f} s" if after_s else "others are started"
        _LOG.warning(
            *("source %s: a reader %s, %s, this process reads all: %s", self.name, done, what),
            error,
        )
        if not after_s:
            # Not with the next read: they open the source beside the one that this process does alone.
            self._at_once = True
            self._start_missing()

    def _end_beyond(self, num: int) -> None:
        """End the last of the other readers, until so many are left: those keep their numbers."""
        while True:
            with self._ends:
                self._dividing = min(self._dividing, num)
                if len(self._others) <= num:
                    return
                reader = self._others.pop()
            # Not in the lock: Ray may take its time.
            reader.close()


class ThreadReader(PartReader):
    """Opens the source once more, and reads its part of it."""

    def __init__(self, open_part: Callable[[], OpenPart]) -> None:
        self._thread = DaemonPool(1, "omniload-part-reader")
        # In the thread that reads: a source is for one thread.
        self._opening = self._thread.submit(open_part)

    @override
    def facts(self) -> SourceFacts | None:
        return self._opening.result().source.facts if self._opening.done() else None

    @override
    def read(
        self, start: int, stop: int, part: Part, without: tuple[int, ...] = ()
    ) -> Callable[[], PartRead]:
        read = self._thread.submit(lambda: self._opening.result().read(start, stop, part, without))
        return read.result

    @override
    def close(self) -> None:
        self._thread.close(_LEAVE_S)

"""A source that several readers read at once. What it gives is what one reader gives.

::

    read(start, stop) ──▶ own part, here     ─┐
                      ──▶ part 1, reader 1   ─┼─▶ merged by position
                      ──▶ part 2, reader 2   ─┘

A reader is a function of positions and holds nothing that cannot be read again. So each read may
be divided among others than the one before it: while one is being opened, the rest read as they
did. Of one that was lost the source reads the part itself, until another has its place: the rest
keep their units, and what they have decoded of them. One may be a thread: decoding and tokenising
let go of the interpreter.
"""

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError
from dataclasses import dataclass

from typing_extensions import override

from omniload.base.clock import Clock, SystemClock
from omniload.base.concurrency.threads import DaemonPool
from omniload.base.errors import OmniloadError, StateError, UnavailableError
from omniload.base.log import get_logger
from omniload.mix.fingerprint import SourceFacts
from omniload.source.parts.reader import (
    OpenPart,
    PartRead,
    PartReader,
    ReaderLostError,
    StartReader,
)
from omniload.source.parts.sample_block import SampleBlock, merged
from omniload.source.parts.share import Part
from omniload.source.record_source import RecordSource
from omniload.source.source import Source
from omniload.source.stores.shard_cache import ShardCache

__all__ = ["DividedSource", "ReadSoFar", "ThreadReader"]

_LOST_MOST = 5
"""Readers that may be lost in one place in a row without a read; the next one would most likely be lost too."""
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


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadSoFar:
    """What all reads of a source have taken so far."""

    busy_s: float = 0.0
    """Processor seconds of the busiest reader of each read, summed over reads."""
    tokens: int = 0
    readers: int = 1
    """Among how many the last read was divided."""


@dataclass(slots=True, eq=False)
class _Place:
    """The place of one of the other readers of a source."""

    reader: PartReader | None = None
    """Who has it; nobody while another is not started yet."""
    is_open: bool = False
    """Whether that one has the source open."""
    takes_part: bool = False
    """Whether reads are divided by it: from when all had the source open, until nobody follows one that was lost."""
    lost: int = 0
    """How many were lost in a row without a read."""
    again_s: float = 0.0
    """When another is started, where the last one was lost for a reason that outlasts it."""


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
        self._others: list[_Place] = []
        self._closed = False
        self._away_s, self._away_until_s = _STORE_AWAY_S, 0.0
        """Wait after the next one that cannot open the source, and when that after the last one ends."""
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
        if self._clock.now_s() < self._look_s:
            return
        if not self._reads.acquire(blocking=False):
            return  # a read looks at them
        try:
            self._look_s = self._clock.now_s() + _LOOK_S
            self._see_others()
        finally:
            self._reads.release()
        self._settle()

    @property
    def lost(self) -> int:
        """Readers that were lost in a row, where so many were that none follows for a while; else 0."""
        lost = max((place.lost for place in list(self._others)), default=0)
        return lost if lost > _LOST_MOST else 0

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
    def block_stop(self, position: int) -> int:
        return self.own.block_stop(position)

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
        taking = self._taking_part()
        of, asked, without_reader = len(taking) + 1, dict[int, Callable[[], PartRead]](), []
        # Asked before this one reads: all of them work meanwhile.
        for number, place in enumerate(taking, 1):
            if place.is_open and (reader := place.reader) is not None:
                asked[number] = reader.read(start, stop, Part(number, of), without)
            else:
                without_reader.append(number)
        if not asked:
            return self.own.read(start, stop, without), 0.0, 1
        began_s = time.thread_time()
        mine = self.own.read_part(start, stop, Part(0, of, tuple(without_reader)), without)
        mine_s = time.thread_time() - began_s
        parts, lost = dict[int, PartRead](), list[tuple[_Place, Exception]]()
        for number, answer in asked.items():
            try:
                parts[number] = answer()
                taking[number - 1].lost = 0  # a host that ends a process now and then is lived with
            except (ReaderLostError, CancelledError) as error:
                lost.append((taking[number - 1], error))
        if lost:
            self._lose(lost)
            # With its own part, once: that is what it reads until others are there.
            beside = tuple(number for number in range(1, of) if number not in parts)
            mine = self.own.read_part(start, stop, Part(0, of, beside), without)
        if self._shards is not None:
            for part in parts.values():
                self._shards.add(part.traffic)
        if len(parts) == self._num_wanted():
            self._away_s = _STORE_AWAY_S
            self._at_once = False  # more of them are started with a read
        beyond_s = max(0.0, max((part.busy_s for part in parts.values()), default=0.0) - mine_s)
        return merged([mine, *(part.block for part in parts.values())]), beyond_s, 1 + len(parts)

    def close(self) -> None:
        """End the readers; what is read after that is read by this one."""
        # First: a reader that is lost by this is not started anew. One that a read starts at this moment ends with it.
        self._closed = True
        self._end_beyond(0)

    def _taking_part(self) -> list[_Place]:
        """Return the places that this read is divided by; nobody is waited for."""
        if self._closed:
            return []
        self._end_beyond(self._num_wanted())
        self._start_missing()
        for facts in self._see_others():
            # It was written anew between two openings: rows of two sources would be merged.
            if facts != self.facts:
                raise StateError(
                    f"source {self.name!r}: another reader found {facts}, this one {self.facts}; "
                    "keep the files of a run as they are"
                )
        there = [place for place in list(self._others) if place.reader is not None]
        # All or as before: with each that opened by itself, units of the block would be decoded by others once more.
        if all(place.is_open for place in there):
            for place in there:
                place.takes_part = True
        return [place for place in list(self._others) if place.takes_part]

    def _see_others(self) -> list[SourceFacts]:
        """Return what those found that have the source open; replace those that are lost."""
        found, lost = list[SourceFacts](), list[tuple[_Place, Exception]]()
        for place in list(self._others):
            try:
                facts = None if place.reader is None else place.reader.facts()
            except (OmniloadError, CancelledError) as error:
                lost.append((place, error))
                continue
            if facts is not None:
                found.append(facts)
                if place.takes_part and not place.is_open:
                    _LOG.info("source %s: another reader is there for one that was lost", self.name)
            place.is_open = facts is not None
        if lost:
            self._lose(lost)
        return found

    def _start_missing(self) -> None:
        for number in range(1, self._num_wanted() + 1):
            with self._ends:
                if len(self._others) < number:
                    self._others.append(_Place())
                place = self._others[number - 1]
            if place.reader is None and self._clock.now_s() >= place.again_s:
                place.reader, place.is_open = self._start(number), False
            if self._closed:  # meanwhile, by another thread, which has ended those that it saw
                self._end(place)
                return

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
        now_s, others = self._clock.now_s(), list(self._others)
        is_due = any(place.reader is None and now_s >= place.again_s for place in others)
        return self._at_once and (is_due or len(others) < self._num_wanted())

    def _lose(self, lost: Sequence[tuple[_Place, Exception]]) -> None:
        """Have others in the place of those that are lost; the rest go on as they do."""
        for place, error in lost:
            self._end(place)
            if self._closed:
                continue
            # An outage outlasts many that are started in it, and the reads here tell of it.
            is_away = isinstance(error, UnavailableError) and not isinstance(error, ReaderLostError)
            place.lost += not is_away
            after_s = _AGAIN_S if place.lost > _LOST_MOST else self._outage_s() if is_away else 0.0
            place.again_s = self._clock.now_s() + after_s
            # Nobody has its place for long: what it read is dealt to the rest.
            place.takes_part = place.takes_part and not after_s
            done = "could not open it" if is_away else "was lost"
            what = f"another is tried in {after_s:.0f} s" if after_s else "another is started"
            _LOG.warning("source %s: a reader %s, %s: %s", self.name, done, what, error)
            # Not with the next read: another opens the source beside what this process reads for it.
            self._at_once = self._at_once or not after_s
        if self._at_once:
            self._start_missing()

    def _outage_s(self) -> float:
        """Return how long none is started after one that could not open the source: once for all in one outage."""
        now_s = self._clock.now_s()
        if now_s >= self._away_until_s:
            self._away_until_s = now_s + self._away_s
            self._away_s = min(2 * self._away_s, _AGAIN_S)
        return self._away_until_s - now_s

    def _end_beyond(self, num: int) -> None:
        """End the last of the other readers, until so many are left: those keep their numbers."""
        while True:
            with self._ends:
                if len(self._others) <= num:
                    return
                place = self._others.pop()
            self._end(place)

    def _end(self, place: _Place) -> None:
        with self._ends:
            reader, place.reader, place.is_open = place.reader, None, False
        # Not in the lock: Ray may take its time.
        if reader is not None:
            reader.close()


class ThreadReader(PartReader):
    """Opens the source once more, and reads its part of it."""

    def __init__(self, open_part: Callable[[], OpenPart]) -> None:
        self._thread = DaemonPool(1, "omniload-part-reader", reads=True)
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

"""A source that several readers read at once, with the same samples as from one reader.

::

    read(start, stop) ──▶ own part, here     ─┐
                      ──▶ part 1, reader 1   ─┼─▶ merged by position
                      ──▶ part 2, reader 2   ─┘

A reader is a function of positions, and everything it holds can be read again. So each read may be divided among other
readers than the read before. While one reader is being opened, the others read as before. If a reader is lost, the
source reads that part itself until a new reader has the place. The other readers keep their units and their decoded
blocks. A reader may be a thread, because decoding and tokenising release the interpreter lock.
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
"""Losses in a row at one place without a read in between; after more, a new reader would most likely be lost too."""
_AGAIN_S = 600.0
"""Pause before readers are started again: memory may be free by then, or the cause of the losses may be gone."""
_STORE_AWAY_S = 5.0
"""The same pause if the store did not answer when a reader opened the source, which says nothing of readers.

It doubles each time in a row, up to ``_AGAIN_S``, because memory or descriptors may be short for good.
"""
_LOG = get_logger(__name__)
_LOOK_S = 0.25
"""Interval between checks of readers that no read waits for, the same as for the roster's checks of roles."""
_LEAVE_S = 1.0
"""Longest wait for a read at the end of a thread; a longer read is abandoned, because nothing needs its result."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadSoFar:
    """Totals over all reads of a source."""

    busy_s: float = 0.0
    """Processor seconds of the busiest reader of each read, summed over the reads."""
    tokens: int = 0
    readers: int = 1
    """Number of readers of the last read."""


@dataclass(slots=True, eq=False)
class _Place:
    """The place of one of the other readers of a source."""

    reader: PartReader | None = None
    """The reader in the place; ``None`` while its successor is not started yet."""
    is_open: bool = False
    """Whether this reader has opened the source."""
    takes_part: bool = False
    """Whether it has a part of reads: from when all have opened the source until it is lost without a successor."""
    lost: int = 0
    """Losses in a row without a read."""
    again_s: float = 0.0
    """Time at which the next reader is started, if the last loss had a lasting cause."""


class DividedSource(Source):
    """A source and its further readers. Not thread-safe, except for ``divide`` and ``close``."""

    def __init__(
        self,
        own: RecordSource,
        readers: int,
        start: StartReader,
        shards: ShardCache | None = None,
        clock: Clock | None = None,
    ) -> None:
        """Have ``readers`` readers including this one. The others start at the first read, or ``at_once``.

        ``shards`` counts what the other readers read from shards.
        """
        self.own, self._shards = own, shards
        self.name, self.facts, self.shards = own.name, own.facts, own.shards
        self.so_far = ReadSoFar()
        self._start, self._clock = start, clock or SystemClock()
        self._wanted, self._at_once = readers, False
        self._others: list[_Place] = []
        self._closed = False
        self._away_s, self._away_until_s = _STORE_AWAY_S, 0.0
        """Pause after the next reader that cannot open the source, and the end of the present pause."""
        self._look_s = 0.0
        """Time of the next check of readers that no read waits for."""
        self._reads = threading.Lock()
        self._ends = threading.Lock()

    def divide(self, readers: int, *, at_once: bool = False) -> None:
        """Set the number of readers from the next read on. Surplus readers end now, or with the read in progress.

        Missing readers are started with the next read, or ``at_once``, that is when surplus readers would end.
        """
        self._wanted, self._at_once = readers, at_once
        self._settle()

    def look(self) -> None:
        """Replace readers that have ended or stopped between reads; otherwise the next read would wait for them first.

        This call does not block. If a read is in progress, that read notices lost readers.
        """
        if self._clock.now_s() < self._look_s:
            return
        if not self._reads.acquire(blocking=False):
            return  # the read in progress checks them
        try:
            self._look_s = self._clock.now_s() + _LOOK_S
            self._see_others()
        finally:
            self._reads.release()
        self._settle()

    @property
    def lost(self) -> int:
        """Return the number of readers lost in a row if it is so large that no new one starts for a while; else 0."""
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
    def decode_ahead(self, start: int, stop: int, without: tuple[int, ...] = ()) -> int:
        # This reader decodes everything, because it serves the first reads alone until the others have opened the
        # source.
        return self.own.decode_ahead(start, stop, without)

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
        """Return the samples, the busiest other reader's time beyond this reader's, and the number of readers."""
        taking = self._taking_part()
        of, asked, without_reader = len(taking) + 1, dict[int, Callable[[], PartRead]](), []
        # The others are asked before this reader reads, so that all work at the same time.
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
                taking[number - 1].lost = 0  # a host that ends a process now and then is tolerated
            except (ReaderLostError, CancelledError) as error:
                lost.append((taking[number - 1], error))
        if lost:
            self._lose(lost)
            # The lost parts are read once with this reader's own number, as in later reads until the new readers are
            # ready.
            beside = tuple(number for number in range(1, of) if number not in parts)
            mine = self.own.read_part(start, stop, Part(0, of, beside), without)
        if self._shards is not None:
            for part in parts.values():
                self._shards.add(part.traffic)
        if len(parts) == self._num_wanted():
            self._away_s = _STORE_AWAY_S
            self._at_once = False  # further readers are started with a read
        beyond_s = max(0.0, max((part.busy_s for part in parts.values()), default=0.0) - mine_s)
        return merged([mine, *(part.block for part in parts.values())]), beyond_s, 1 + len(parts)

    def close(self) -> None:
        """End the other readers; later reads use this reader alone."""
        # Set first, so that no reader is started for one that this call ends. A reader that a read is starting ends
        # with the read.
        self._closed = True
        self._end_beyond(0)

    def _taking_part(self) -> list[_Place]:
        """Return the places that this read is divided among, without waiting for a reader."""
        if self._closed:
            return []
        self._end_beyond(self._num_wanted())
        self._start_missing()
        for facts in self._see_others():
            # The source was written again between two openings, so rows of two sources would be merged.
            if facts != self.facts:
                raise StateError(
                    f"source {self.name!r}: another reader found {facts}, this one {self.facts}; "
                    "keep the files of a run as they are"
                )
        there = [place for place in list(self._others) if place.reader is not None]
        # All at once, because if readers joined one by one, units of the block would move between readers and be
        # decoded again.
        if all(place.is_open for place in there):
            for place in there:
                place.takes_part = True
        return [place for place in list(self._others) if place.takes_part]

    def _see_others(self) -> list[SourceFacts]:
        """Return the facts that the opened readers have found; replace the readers that are lost."""
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
            if self._closed:  # meanwhile, by a thread that has ended the readers it saw
                self._end(place)
                return

    def _settle(self) -> None:
        """End surplus readers, unless a read is in progress; in that case, the read does so at its end."""
        # Checked again after the release of the lock, because a caller that lowered the number meanwhile relied on this
        # thread.
        while (self._are_too_many() or self._are_missing()) and self._reads.acquire(blocking=False):
            try:
                self._end_beyond(self._num_wanted())
                if self._are_missing():
                    self._start_missing()
            finally:
                self._reads.release()

    def _num_wanted(self) -> int:
        """Return the wanted number of other readers."""
        return 0 if self._closed else max(0, self._wanted - 1)

    def _are_too_many(self) -> bool:
        return len(self._others) > self._num_wanted()

    def _are_missing(self) -> bool:
        """Return whether readers must be started before a read needs them."""
        now_s, others = self._clock.now_s(), list(self._others)
        is_due = any(place.reader is None and now_s >= place.again_s for place in others)
        return self._at_once and (is_due or len(others) < self._num_wanted())

    def _lose(self, lost: Sequence[tuple[_Place, Exception]]) -> None:
        """Start new readers in place of the lost ones; the others continue unchanged."""
        for place, error in lost:
            self._end(place)
            if self._closed:
                continue
            # An outage outlasts many readers that start during it, and the reads of this process report it.
            is_away = isinstance(error, UnavailableError) and not isinstance(error, ReaderLostError)
            place.lost += not is_away
            after_s = _AGAIN_S if place.lost > _LOST_MOST else self._outage_s() if is_away else 0.0
            place.again_s = self._clock.now_s() + after_s
            # The place stays empty for long, so its part is divided among the others.
            place.takes_part = place.takes_part and not after_s
            done = "could not open it" if is_away else "was lost"
            what = f"another is tried in {after_s:.0f} s" if after_s else "another is started"
            _LOG.warning("source %s: a reader %s, %s: %s", self.name, done, what, error)
            # Started before the next read, so that the new reader opens the source while this process reads its part.
            self._at_once = self._at_once or not after_s
        if self._at_once:
            self._start_missing()

    def _outage_s(self) -> float:
        """Return the pause after a reader that could not open the source; all readers share the pause of one outage."""
        now_s = self._clock.now_s()
        if now_s >= self._away_until_s:
            self._away_until_s = now_s + self._away_s
            self._away_s = min(2 * self._away_s, _AGAIN_S)
        return self._away_until_s - now_s

    def _end_beyond(self, num: int) -> None:
        """End the last of the other readers until ``num`` are left; those keep their numbers."""
        while True:
            with self._ends:
                if len(self._others) <= num:
                    return
                place = self._others.pop()
            self._end(place)

    def _end(self, place: _Place) -> None:
        with self._ends:
            reader, place.reader, place.is_open = place.reader, None, False
        # Outside the lock, because Ray may take its time.
        if reader is not None:
            reader.close()


class ThreadReader(PartReader):
    """Opens the source a second time in a thread, and reads its part there."""

    def __init__(self, open_part: Callable[[], OpenPart]) -> None:
        self._thread = DaemonPool(1, "omniload-part-reader", reads=True)
        # Opened in the thread that reads, because a source is not thread-safe.
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

"""The Source Loader machine: a bounded buffer of samples of its sources. It never sees ranks.

It alone holds the payload of its sources until a data constructor fetches it. The planner
decides what to read and when to release it, so the plan bounds the buffer.
"""

import math
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, chain, pairwise, zip_longest
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from omniload.base.errors import StateError
from omniload.base.ragged import Ranges
from omniload.machine.held.blocks import HeldSamples, SampleIndex, SampleRange, sample_keys
from omniload.machine.messages import (
    HandedOver,
    ReadAhead,
    ReleaseSamples,
    SamplesReported,
    SliceRequest,
    TakeOver,
)
from omniload.machine.metadata.samples import ReadAheadWithTags, reported_with_tags
from omniload.mix.columns import ColumnRanges, SampleColumns, joined_ranges
from omniload.mix.pieces import POSITION_LIMIT, SUB_LIMIT
from omniload.mix.samples import joined_tables

__all__ = ["DecodedAhead", "Read", "SamplesRead", "SourceLoader"]

_CHUNK = 1024
"""Records per read while a loader that takes over reads lost samples again."""
_PASSED_OVER = 1024
"""Records after which a shadow tries again to decode a source."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplesRead:
    """The shell has read a range."""

    source: int
    block: SampleRange


@dataclass(frozen=True, slots=True, kw_only=True)
class Read:
    """Read raw positions ``start`` to ``stop`` of a source, except the records of some shards."""

    source: int
    start: int
    stop: int
    without: tuple[int, ...] = ()


@dataclass(slots=True, kw_only=True)
class SourceLoader:
    """Holds the samples from the planner's floor to the end of the last read."""

    names: Mapping[int, str]
    """Sources of this loader, by number."""
    _held: defaultdict[int, HeldSamples] = field(
        default_factory=lambda: defaultdict(HeldSamples), init=False
    )
    held_bytes: int = field(default=0, init=False)
    """Memory of the held samples over all sources; kept as a running sum because there may be many sources."""
    _taken_over: dict[int, int] = field(default_factory=dict, init=False)
    """Sources taken over from another loader, each with the position from which on that loader may have read alone."""
    _life: int = field(default=0, init=False)
    """Life of the planner that sent the last request."""
    _tags: tuple[str, ...] = field(default=(), init=False)
    """Whole-sample columns to report; every planner of a plane asks for the same ones."""

    def handle(
        self, event: ReadAhead | SamplesRead | ReleaseSamples | TakeOver | HandedOver
    ) -> tuple[Read | SamplesReported, ...]:
        """Apply one event and return the commands to carry out, in order."""
        match event:
            case ReadAhead(source=source, start=start, stop=stop, life=life, without=without):
                # Noted before reading: from now on, releases by an earlier planner are ignored.
                self._life = max(self._life, life)
                if isinstance(event, ReadAheadWithTags):
                    self._tags = event.tags
                # If part of the range is held already, report that part and read only the rest.
                if held := self._held[source].find(start, stop, frozenset(without)):
                    return (self.reported(source, held, without),)
                return (Read(source=source, start=start, stop=stop, without=without),)
            case SamplesRead(source=source, block=block):
                held_of = self._held[source]
                # Count the difference: a block may replace others, or be held already.
                self.held_bytes -= held_of.size_bytes
                held_of.hold(block)
                self.held_bytes += held_of.size_bytes
                # In rising order, as the planner names them, because it compares them with its request.
                without = tuple(sorted(block.without))
                return (self.reported(source, (block,), without),)
            case ReleaseSamples(floors=floors, life=life):
                # A late release of a lost planner must not free samples that its successor has asked for again.
                for source, floor in floors.items() if life >= self._life else ():
                    self._release(source, floor)
                return ()
            case TakeOver(ranges=ranges):
                for source, (floor, _) in ranges.items():
                    # After a second move or loss, constructors may still ask from the earlier floor.
                    self._taken_over[source] = min(floor, self._taken_over.get(source, floor))
                # Read the first part of every source before any second part: the next step needs samples of all.
                turns = zip_longest(*(_reads_of(source, event) for source in ranges))
                reads = filter(None, chain.from_iterable(turns))
                return tuple(read for read in reads if not self._holds(read))
            case HandedOver(sources=sources):
                # Until constructors hear of the new loader, they ask this one for samples that the new one reads.
                # From position 0, because this command does not say where the new loader begins.
                self._taken_over |= dict.fromkeys(sources, 0)
                return ()

    def reported(
        self, source: int, blocks: Sequence[SampleRange], without: tuple[int, ...]
    ) -> SamplesReported:
        """Return the report of consecutive blocks, with the tags that the planner asked for.

        Raises:
            ConfigError: A tag is longer than a report may carry.
        """
        report = SamplesReported(
            source=source,
            table=joined_tables([block.table for block in blocks]),
            without=without,
            size_bytes=sum(block.size_bytes for block in blocks),
        )
        name = self.names.get(source, str(source))
        return reported_with_tags(report, blocks, self._tags, name)

    def forget(self, source: int) -> None:
        """Release a source that another loader now serves."""
        if (held := self._held.pop(source, None)) is not None:
            self.held_bytes -= held.size_bytes
        self._taken_over.pop(source, None)
        self.names = {s: name for s, name in self.names.items() if s != source}

    def unread(self, requests: Sequence[SliceRequest]) -> tuple[Read, ...]:
        """Return the reads that an answer needs first: samples that a lost loader had read and this one has not."""
        reads = []
        for request in requests if self._taken_over else ():
            floor = self._taken_over.get(request.source)
            if floor is None or not len(request.positions_N):
                continue
            wanted_N = sample_keys(request.positions_N, request.subs_N)
            held_N = self._held[request.source].index().are_held(wanted_N)
            # Nothing before the floor: all ranks have those samples, and a step that asks for them is obsolete.
            positions = request.positions_N[~held_N & (request.positions_N >= floor)]
            if len(positions):
                # Two positions that are far apart may have a whole skipped shard between them.
                each = np.unique(positions)
                runs = np.split(each, np.flatnonzero(np.diff(each) > _CHUNK) + 1)
                reads += [
                    Read(source=request.source, start=int(run[0]), stop=int(run[-1]) + 1)
                    for run in runs
                ]
        return tuple(reads)

    def slices_of(self, requests: Sequence[SliceRequest]) -> list[SampleColumns]:
        """Return the ranges of each request, copied end to end, in the requested order.

        Raises:
            StateError: A sample is not held: it was released, or never read.
        """
        # One gather for all sources, because a step asks many sources for a few ranges each.
        found, others = self._found(requests)
        return [
            SampleColumns(
                tokens=tokens,
                others={
                    name: of_place[place].packed()
                    for name, of_place in others.items()
                    if place in of_place
                },
            )
            for place, tokens in enumerate(found.packed().split(_cuts(requests)))
        ]

    def ranges_of(self, requests: Sequence[SliceRequest]) -> ColumnRanges:
        """Locate the requested ranges, request by request, in the requested order; nothing is copied.

        Columns that were not requested, or that no source of the requests has, are not looked at.

        Raises:
            StateError: A sample is not held: it was released, or never read. Or a range is invalid.
        """
        tokens, others = self._found(requests)
        lengths = [tokens.lengths_N[a:b] for a, b in pairwise(_cuts(requests))] if others else []
        return ColumnRanges(
            tokens=tokens,
            others={
                name: joined_ranges(name, [of_place.get(i, own) for i, own in enumerate(lengths)])
                for name, of_place in sorted(others.items())
            },
        )

    def _found(
        self, requests: Sequence[SliceRequest]
    ) -> tuple[Ranges, dict[str, dict[int, Ranges]]]:
        """Return where the tokens lie, and for each further column the ranges of the requests that have it."""
        nothing = np.empty(0, np.int64)
        # The empty column gives the result its type where there is no request.
        columns: list[NDArray[np.int32]] = [np.empty(0, np.int32)]
        which, first, last = [nothing], [nothing], [nothing]
        others: dict[str, dict[int, Ranges]] = {}
        # Work that is the same for all sources is done once: a small step asks many sources for one sample each.
        asked = _Asked.of(requests)
        cuts = _cuts(requests)
        for place, request in enumerate(requests):
            index = self._held[request.source].index()
            wanted_N = asked.keys_N[cuts[place] : cuts[place + 1]]
            rows_N = index.rows_of(wanted_N)
            if rows_N is None:
                raise self._missing(request, index, wanted_N)
            first.append(index.starts_N[rows_N])
            last.append(index.stops_N[rows_N])
            which.append(index.blocks_N[rows_N] + len(columns))
            columns += index.columns
            for name in index.others.keys() & request.columns:
                others.setdefault(name, {})[place] = index.ranges_of(
                    name, rows_N, request.starts_N, request.stops_N
                )
        first_N, last_N = np.concatenate(first), np.concatenate(last)
        tokens = Ranges(
            columns=columns,
            which_N=np.concatenate(which),
            # A sample that turned out shorter than reported must give fewer tokens, so that the
            # constructor notices, and never tokens of the next sample.
            starts_N=np.minimum(first_N + asked.starts_N, last_N),
            stops_N=np.minimum(first_N + asked.stops_N, last_N),
        )
        return tokens, others

    def held_positions(self, source: int) -> tuple[int, int]:
        """Return the range of raw positions that are held; equal ends when there are none."""
        blocks = self._held[source].blocks
        return (blocks[0].table.start, blocks[-1].table.stop) if blocks else (0, 0)

    def _holds(self, read: Read) -> bool:
        held = self._held[read.source].find(read.start, read.stop, frozenset(read.without))
        return bool(held) and held[-1].table.stop == read.stop

    def _release(self, source: int, floor: int) -> None:
        held = self._held[source]
        self.held_bytes -= held.size_bytes
        held.release(floor)
        self.held_bytes += held.size_bytes
        if source in self._taken_over:
            self._taken_over[source] = max(self._taken_over[source], floor)

    def _missing(
        self, request: SliceRequest, index: SampleIndex, wanted_N: NDArray[np.int64]
    ) -> StateError:
        first, last = self.held_positions(request.source)
        missing = request.positions_N[~index.are_held(wanted_N)]
        return StateError(
            f"source {self.names.get(request.source, request.source)!r} holds positions {first} to {last}, asked for "
            f"{missing.min()} to {missing.max()}: released, or never read; "
            "restart the data plane from the last checkpoint"
        )


def _reads_of(source: int, command: TakeOver) -> Iterable[Read]:
    """Return the reads that restore a source; shards are left out only from the position of their edit on."""
    first, last = command.ranges[source]
    since, without = command.without.get(source, (0, ()))
    at = min(max(since, first), last)
    for start, stop in _chunks(first, at):
        yield Read(source=source, start=start, stop=stop)
    for start, stop in _chunks(at, last):
        yield Read(source=source, start=start, stop=stop, without=without)


def _chunks(start: int, stop: int) -> Iterable[tuple[int, int]]:
    """Cut a range into separate reads, so that a request that comes meanwhile waits for one of them only."""
    return ((at, min(at + _CHUNK, stop)) for at in range(start, stop, _CHUNK))


def _cuts(requests: Sequence[SliceRequest]) -> list[int]:
    """Return where the ranges of each request begin in the concatenation of all requests, and its total length."""
    return list(accumulate((len(request.positions_N) for request in requests), initial=0))


@dataclass(frozen=True, slots=True)
class _Asked:
    """The ranges of several requests, concatenated."""

    keys_N: NDArray[np.int64]
    starts_N: NDArray[np.integer[Any]]
    stops_N: NDArray[np.integer[Any]]

    @classmethod
    def of(cls, requests: Sequence[SliceRequest]) -> Self:
        """Concatenate requests; refuse a range that starts before its sample and so would show another's tokens."""
        if not requests:
            return cls(*(np.empty(0, np.int64),) * 3)
        positions_N = np.concatenate([request.positions_N for request in requests])
        subs_N = np.concatenate([request.subs_N for request in requests])
        starts_N = np.concatenate([request.starts_N for request in requests])
        stops_N = np.concatenate([request.stops_N for request in requests])
        wrong_N = (starts_N < 0) | (stops_N < starts_N)
        for numbers_N, limit in ((positions_N, POSITION_LIMIT), (subs_N, SUB_LIMIT)):
            wrong_N |= (numbers_N < 0) | (numbers_N >= limit)
        if wrong_N.any():
            i = int(wrong_N.argmax())
            source = requests[bisect_right(_cuts(requests), i) - 1].source
            raise StateError(
                f"asked for tokens {starts_N[i]} to {stops_N[i]} of sample {subs_N[i]} of record {positions_N[i]} of "
                f"source {source}, which do not exist; resume from an earlier checkpoint"
            )
        return cls(sample_keys(positions_N, subs_N), starts_N, stops_N)


@dataclass(slots=True)
class DecodedAhead:
    """How far a shadow has decoded each source ahead of a possible take-over, and how far it should."""

    _told: dict[int, int] = field(default_factory=dict, init=False)
    """End of the positions that the planner knew of each source at the last call."""
    _floors: dict[int, range] = field(default_factory=dict, init=False)
    """First positions of reads that need no decoding."""
    _stops: dict[int, float] = field(default_factory=dict, init=False)
    """Ends of such reads."""

    def reach(self, source: int, floor: int, end: int) -> int | None:
        """Return how far a loader that took over now would read until the call after the next one.

        Args:
            source: The source.
            floor: The first position that is needed.
            end: End of the positions that the planner knows.

        Returns:
            ``None`` where all of them are decoded already. That is the usual case: a block lasts for minutes, and this
            is called once a second.
        """
        # At the first call, expect as much again as is known ahead, because that was read for several windows.
        reach = end + max(end - floor, 2 * (end - self._told.get(source, end)))
        self._told[source] = end
        if floor in self._floors.get(source, ()) and reach <= self._stops[source]:
            return None
        return reach

    def note(self, source: int, positions: range) -> None:
        """Note positions whose blocks are decoded."""
        self._floors[source], self._stops[source] = positions, positions.stop

    def pass_over(self, source: int, floor: int) -> None:
        """Leave a source that failed to decode alone for a while."""
        self._floors[source] = range(floor, floor + _PASSED_OVER)
        self._stops[source] = math.inf

    def forget(self, source: int) -> None:
        """Forget a source that was released."""
        for known in (self._told, self._floors, self._stops):
            known.pop(source, None)

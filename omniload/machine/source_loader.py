"""The Source Loader machine: a bounded buffer of samples of its sources. It never sees ranks.

It is the only holder of a source's payload until a data constructor takes it. The
planner says what to read and when to let go, so the buffer is bounded by the plan.
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
from omniload.machine.metadata.tags import ReadAheadWithTags, reported_with_tags
from omniload.mix.columns import ColumnRanges, SampleColumns, joined_ranges
from omniload.mix.pieces import POSITION_LIMIT, SUB_LIMIT
from omniload.mix.samples import joined_tables

__all__ = ["DecodedAhead", "Read", "SamplesRead", "SourceLoader"]

_CHUNK = 1024
"""Records that a loader that takes over reads again at once."""
_PASSED_OVER = 1024
"""Records after which a shadow tries again to decode a source."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplesRead:
    """The shell has read a range."""

    source: int
    block: SampleRange


@dataclass(frozen=True, slots=True, kw_only=True)
class Read:
    """Read raw positions ``start`` to ``stop`` of a source, but for the records of some shards."""

    source: int
    start: int
    stop: int
    without: tuple[int, ...] = ()


@dataclass(slots=True, kw_only=True)
class SourceLoader:
    """Holds samples from the planner's floor to the end of what was read."""

    names: Mapping[int, str]
    """Sources of this loader, by number."""
    _held: defaultdict[int, HeldSamples] = field(
        default_factory=lambda: defaultdict(HeldSamples), init=False
    )
    held_bytes: int = field(default=0, init=False)
    """What held samples take of memory, over all sources; counted as they come and go, as sources are many."""
    _taken_over: dict[int, int] = field(default_factory=dict, init=False)
    """Sources of which what is asked for may have been read by another loader only, and from which position on."""
    _life: int = field(default=0, init=False)
    """Planners before the one that asked last."""
    _tags: tuple[str, ...] = field(default=(), init=False)
    """Columns of whole samples that are reported: of a plane each planner asks for the same."""

    def handle(
        self, event: ReadAhead | SamplesRead | ReleaseSamples | TakeOver | HandedOver
    ) -> tuple[Read | SamplesReported, ...]:
        """Apply one event and return what must now be done, in order."""
        match event:
            case ReadAhead(source=source, start=start, stop=stop, life=life, without=without):
                # Noted before anything is read: what a planner before this one lets go of from now on is kept.
                self._life = max(self._life, life)
                if isinstance(event, ReadAheadWithTags):
                    self._tags = event.tags
                # Asked again: of a range of which the first part is held, that is told, and the rest asked for.
                if held := self._held[source].find(start, stop, frozenset(without)):
                    return (self.reported(source, held, without),)
                return (Read(source=source, start=start, stop=stop, without=without),)
            case SamplesRead(source=source, block=block):
                held_of = self._held[source]
                # By the difference: a block may take the place of others, or be held already.
                self.held_bytes -= held_of.size_bytes
                held_of.hold(block)
                self.held_bytes += held_of.size_bytes
                # Rising, as the planner names them: it compares them with what it asked for.
                without = tuple(sorted(block.without))
                return (self.reported(source, (block,), without),)
            case ReleaseSamples(floors=floors, life=life):
                # What a lost planner let go of comes late, once the next one has asked for it again.
                for source, floor in floors.items() if life >= self._life else ():
                    self._release(source, floor)
                return ()
            case TakeOver(ranges=ranges):
                for source, (floor, _) in ranges.items():
                    # Told again, at another move or loss: constructors may still ask from the earlier floor.
                    self._taken_over[source] = min(floor, self._taken_over.get(source, floor))
                # The first part of each source before the second of any: the next step needs samples of all of them.
                turns = zip_longest(*(_reads_of(source, event) for source in ranges))
                reads = filter(None, chain.from_iterable(turns))
                return tuple(read for read in reads if not self._holds(read))
            case HandedOver(sources=sources):
                # What the next loader reads is asked of this one too, until constructors know better.
                # From the first position on: nobody says here where the next loader began.
                self._taken_over |= dict.fromkeys(sources, 0)
                return ()

    def reported(
        self, source: int, blocks: Sequence[SampleRange], without: tuple[int, ...]
    ) -> SamplesReported:
        """Return what is told of blocks that follow each other, with the tags that were asked for.

        Raises:
            ConfigError: A text is longer than a planner is told.
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
        """Let go of a source that another loader serves."""
        if (held := self._held.pop(source, None)) is not None:
            self.held_bytes -= held.size_bytes
        self._taken_over.pop(source, None)
        self.names = {s: name for s, name in self.names.items() if s != source}

    def unread(self, requests: Sequence[SliceRequest]) -> tuple[Read, ...]:
        """Return what must be read before these can be answered: what another loader had read, and died."""
        reads = []
        for request in requests if self._taken_over else ():
            floor = self._taken_over.get(request.source)
            if floor is None or not len(request.positions_N):
                continue
            wanted_N = sample_keys(request.positions_N, request.subs_N)
            held_N = self._held[request.source].index().are_held(wanted_N)
            # Not before the floor: all ranks have those, and who asks for them builds a step anew in vain.
            positions = request.positions_N[~held_N & (request.positions_N >= floor)]
            if len(positions):
                # Between two that lie far apart may be all of a shard that is left out.
                each = np.unique(positions)
                runs = np.split(each, np.flatnonzero(np.diff(each) > _CHUNK) + 1)
                reads += [
                    Read(source=request.source, start=int(run[0]), stop=int(run[-1]) + 1)
                    for run in runs
                ]
        return tuple(reads)

    def slices_of(self, requests: Sequence[SliceRequest]) -> list[SampleColumns]:
        """Return the asked ranges of each request, copied end to end, in the order asked for.

        Raises:
            StateError: A sample is not held: it was released, or never read.
        """
        # One gather for the tokens of all sources: a step asks many of them for a few ranges each.
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
        """Say where the asked ranges lie, request by request, in the order asked for; nothing is copied.

        A column that was not asked for, or that no source of the requests has, is not looked at.

        Raises:
            StateError: A sample is not held: it was released, or never read. Or a range is none.
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
        """Return where the tokens lie, and of each further column the ranges of the requests that have it."""
        nothing = np.empty(0, np.int64)
        # An empty column first: without any request the result has its type from it.
        columns: list[NDArray[np.int32]] = [np.empty(0, np.int32)]
        which, first, last = [nothing], [nothing], [nothing]
        others: dict[str, dict[int, Ranges]] = {}
        # Whatever is the same for all sources is done once: a small step asks many of them for a sample each.
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
            # A sample that turned out shorter than reported must give fewer tokens, for the
            # constructor to notice, and never those of the sample behind it.
            starts_N=np.minimum(first_N + asked.starts_N, last_N),
            stops_N=np.minimum(first_N + asked.stops_N, last_N),
        )
        return tokens, others

    def held_positions(self, source: int) -> tuple[int, int]:
        """Return the range of raw positions at hand; equal ends when there are none."""
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
    """Return what is read again of a source: shards that are left out, are so from a position on."""
    first, last = command.ranges[source]
    since, without = command.without.get(source, (0, ()))
    at = min(max(since, first), last)
    for start, stop in _chunks(first, at):
        yield Read(source=source, start=start, stop=stop)
    for start, stop in _chunks(at, last):
        yield Read(source=source, start=start, stop=stop, without=without)


def _chunks(start: int, stop: int) -> Iterable[tuple[int, int]]:
    """Cut a range into parts that are read at once: what is asked for meanwhile waits for one part only."""
    return ((at, min(at + _CHUNK, stop)) for at in range(start, stop, _CHUNK))


def _cuts(requests: Sequence[SliceRequest]) -> list[int]:
    """Return where the ranges of each request begin among those of all, and where the last one stops."""
    return list(accumulate((len(request.positions_N) for request in requests), initial=0))


@dataclass(frozen=True, slots=True)
class _Asked:
    """The ranges of some requests end to end."""

    keys_N: NDArray[np.int64]
    starts_N: NDArray[np.integer[Any]]
    stops_N: NDArray[np.integer[Any]]

    @classmethod
    def of(cls, requests: Sequence[SliceRequest]) -> Self:
        """Refuse ranges that start before their sample, which would show the tokens of another."""
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
                f"source {source}, which are none; resume from an earlier checkpoint"
            )
        return cls(sample_keys(positions_N, subs_N), starts_N, stops_N)


@dataclass(slots=True)
class DecodedAhead:
    """Where of each source a shadow has decoded what it would read, and how far it is to decode as it is told more."""

    _told: dict[int, int] = field(default_factory=dict, init=False)
    """End of what the planner knew of each source the last time."""
    _floors: dict[int, range] = field(default_factory=dict, init=False)
    """First positions of reads at which nothing need be decoded."""
    _stops: dict[int, float] = field(default_factory=dict, init=False)
    """Ends of such reads."""

    def reach(self, source: int, floor: int, end: int) -> int | None:
        """Return the position before which a loader would read that takes over until the next time but one.

        Args:
            source: The source.
            floor: The first position that is needed.
            end: End of what is known to the planner.

        Returns:
            ``None`` where all of it is at hand: told once a second, while a block lasts for minutes, that is usual.
        """
        # Of one that was told nothing yet: as much again as is known ahead, which several windows were read for.
        reach = end + max(end - floor, 2 * (end - self._told.get(source, end)))
        self._told[source] = end
        if floor in self._floors.get(source, ()) and reach <= self._stops[source]:
            return None
        return reach

    def note(self, source: int, positions: range) -> None:
        """Note which positions are read from what is decoded."""
        self._floors[source], self._stops[source] = positions, positions.stop

    def pass_over(self, source: int, floor: int) -> None:
        """Try no more for a while to decode a source that could not be."""
        self._floors[source] = range(floor, floor + _PASSED_OVER)
        self._stops[source] = math.inf

    def forget(self, source: int) -> None:
        """Begin anew with a source that was let go of."""
        for known in (self._told, self._floors, self._stops):
            known.pop(source, None)

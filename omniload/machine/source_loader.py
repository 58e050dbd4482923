"""The Source Loader machine: a bounded buffer of samples of its sources. It never sees ranks.

It is the only holder of a source's payload until a data constructor takes it. The
planner says what to read and when to let go, so the buffer is bounded by the plan.
"""

from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from omniload.base.errors import StateError
from omniload.base.ragged import Ragged, Ranges
from omniload.machine.messages import (
    HandedOver,
    ReadAhead,
    ReleaseSamples,
    SamplesReported,
    SliceRequest,
    TakeOver,
)
from omniload.mix.columns import COLUMNS, ColumnRanges, SampleColumns, joined_ranges
from omniload.mix.pieces import POSITION_LIMIT, SUB_LIMIT
from omniload.mix.samples import SampleTable, joined_tables

__all__ = ["Read", "SamplesRead", "SourceLoader"]

_CHUNK = 1024
"""Records that a loader that takes over reads again at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplesRead:
    """The shell has read a range."""

    source: int
    table: SampleTable
    tokens: Ragged
    skipped: int
    others: Mapping[str, Ragged] = field(default_factory=dict)
    """Further columns by name, in the order of the table."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Read:
    """Read raw positions ``start`` to ``stop`` of a source."""

    source: int
    start: int
    stop: int


@dataclass(slots=True)
class _Held:
    table: SampleTable
    tokens: Ragged
    others: Mapping[str, Ragged]

    @property
    def size_bytes(self) -> int:
        """What it takes of memory."""
        columns = (self.tokens, *self.others.values())
        return sum(column.values_V.nbytes + column.offsets.nbytes for column in columns)

    def within(self, start: int, stop: int) -> "_Held":
        """Return the part from ``start`` to ``stop``; nothing is copied."""
        if (start, stop) == (self.table.start, self.table.stop):
            return self
        table = self.table.within(start, stop)
        first = int(np.searchsorted(self.table.positions_N, start))
        last = first + len(table)
        others = {name: column.between(first, last) for name, column in self.others.items()}
        return _Held(table, self.tokens.between(first, last), others)


@dataclass(slots=True)
class _Column:
    """One further column of every held sample of one source."""

    starts_N: NDArray[np.int64]
    stops_N: NDArray[np.int64]
    values: list[NDArray[Any]]
    """Values of each block."""


@dataclass(slots=True)
class _Index:
    """Where every held sample of one source lies."""

    keys_N: NDArray[np.int64]
    """Rising."""
    blocks_N: NDArray[np.int64]
    starts_N: NDArray[np.int64]
    stops_N: NDArray[np.int64]
    columns: list[NDArray[np.int32]]
    """Tokens of each block."""
    others: dict[str, _Column]
    """Further columns by name."""


@dataclass(slots=True, kw_only=True)
class SourceLoader:
    """Holds samples from the planner's floor to the end of what was read."""

    names: Mapping[int, str]
    """Sources of this loader, by number."""
    _held: dict[int, deque[_Held]] = field(default_factory=dict, init=False)
    _held_bytes: int = field(default=0, init=False)
    _indexes: dict[int, _Index] = field(default_factory=dict, init=False)
    """Indexes of what is held; made anew when asked for after a change."""
    _taken_over: dict[int, int] = field(default_factory=dict, init=False)
    """Sources of which what is asked for may have been read by another loader only, and from which position on."""
    _life: int = field(default=0, init=False)
    """Planners before the one that asked last."""

    def handle(
        self, event: ReadAhead | SamplesRead | ReleaseSamples | TakeOver | HandedOver
    ) -> tuple[Read | SamplesReported, ...]:
        """Apply one event and return what must now be done, in order."""
        match event:
            case ReadAhead(source=source, start=start, stop=stop, life=life):
                self._life = max(self._life, life)
                if (held := self._find(source, start, stop)) is not None:  # asked again
                    return (SamplesReported(source=source, table=held),)
                return (Read(source=source, start=start, stop=stop),)
            case SamplesRead(
                source=source, table=table, tokens=tokens, skipped=skipped, others=others
            ):
                self._hold(source, _Held(table, tokens, others))
                return (SamplesReported(source=source, table=table, skipped=skipped),)
            case ReleaseSamples(floors=floors, life=life):
                # What a lost planner let go of comes late, once the next one has asked for it again.
                for source, floor in floors.items() if life >= self._life else ():
                    self._release(source, floor)
                return ()
            case TakeOver(ranges=ranges):
                for source, (floor, _) in ranges.items():
                    self._taken_over[source] = min(floor, self._taken_over.get(source, floor))
                return tuple(
                    Read(source=source, start=start, stop=stop)
                    for source, (first, last) in ranges.items()
                    for start, stop in _chunks(first, last)
                    if self._find(source, start, stop) is None
                )
            case HandedOver(sources=sources):
                # What the next loader reads is asked of this one too, until constructors know better.
                self._taken_over |= dict.fromkeys(sources, 0)
                return ()

    def forget(self, source: int) -> None:
        """Let go of a source that another loader serves."""
        self._held_bytes -= sum(block.size_bytes for block in self._held.pop(source, ()))
        for known in (self._indexes, self._taken_over):
            known.pop(source, None)
        self.names = {s: name for s, name in self.names.items() if s != source}

    def unread(self, requests: Sequence[SliceRequest]) -> tuple[Read, ...]:
        """Return what must be read before these can be answered: what another loader had read, and died."""
        reads = []
        for request in requests if self._taken_over else ():
            floor = self._taken_over.get(request.source)
            if floor is None or not len(request.positions_N):
                continue
            keys_N = self._index_of(request.source).keys_N
            missing = ~np.isin(_keys(request.positions_N, request.subs_N), keys_N)
            positions = request.positions_N[missing & (request.positions_N >= floor)]
            if len(positions):
                start, stop = int(positions.min()), int(positions.max()) + 1
                reads.append(Read(source=request.source, start=start, stop=stop))
        return tuple(reads)

    def slices(self, request: SliceRequest) -> SampleColumns:
        """Return the asked token ranges of one source; see ``slices_of``."""
        return self.slices_of([request])[0]

    def slices_of(self, requests: Sequence[SliceRequest]) -> list[SampleColumns]:
        """Return the asked ranges of each request, copied end to end, in the order asked for.

        Raises:
            StateError: A sample is not held: it was released, or never read.
        """
        # One gather for the tokens of all sources: a step asks many of them for a few ranges each.
        found, others = self._found(requests)
        cuts = np.cumsum([0, *(len(request.positions_N) for request in requests)]).tolist()
        tokens = found.packed()
        return [
            SampleColumns(
                tokens=tokens.part(a, b),
                others={
                    name: of_place[place].packed()
                    for name, of_place in others.items()
                    if place in of_place
                },
            )
            for place, (a, b) in enumerate(pairwise(cuts))
        ]

    def ranges_of(self, requests: Sequence[SliceRequest]) -> ColumnRanges:
        """Say where the asked ranges lie, request by request, in the order asked for; nothing is copied.

        A column that was not asked for, or that no source of the requests has, is not looked at.

        Raises:
            StateError: A sample is not held: it was released, or never read. Or a range is none.
        """
        tokens, others = self._found(requests)
        cuts = np.cumsum([0, *(len(request.positions_N) for request in requests)]).tolist()
        lengths = [tokens.lengths_N[a:b] for a, b in pairwise(cuts)] if others else []
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
        columns: list[NDArray[np.int32]] = [np.empty(0, np.int32)]
        which, starts, stops = [nothing], [nothing], [nothing]
        others: dict[str, dict[int, Ranges]] = {}
        for place, request in enumerate(requests):
            _require_ranges(request)
            index = self._index_of(request.source)
            wanted = _keys(request.positions_N, request.subs_N)
            row = np.searchsorted(index.keys_N, wanted)
            if not _all_found(index.keys_N, row, wanted):
                raise self._missing(request, index, wanted)
            # A sample that turned out shorter than reported must give fewer tokens, for the
            # constructor to notice, and never those of the sample behind it.
            first, last = index.starts_N[row], index.stops_N[row]
            starts.append(np.minimum(first + request.starts_N, last))
            stops.append(np.minimum(first + request.stops_N, last))
            which.append(index.blocks_N[row] + len(columns))
            columns += index.columns
            for name in index.others.keys() & request.columns:
                others.setdefault(name, {})[place] = _ranges_in(name, index, row, request)
        tokens = Ranges(
            columns=columns,
            which_N=np.concatenate(which),
            starts_N=np.concatenate(starts),
            stops_N=np.concatenate(stops),
        )
        return tokens, others

    def held_positions(self, source: int) -> tuple[int, int]:
        """Return the range of raw positions at hand; equal ends when there are none."""
        queue = self._held.get(source)
        return (queue[0].table.start, queue[-1].table.stop) if queue else (0, 0)

    def held_tokens(self) -> int:
        """Return the tokens held, over all sources."""
        return sum(len(block.tokens.values_V) for queue in self._held.values() for block in queue)

    def held_bytes(self) -> int:
        """Return what held samples take of memory, over all sources."""
        # Counted as blocks come and go: it is asked for with each read, and sources are many.
        return self._held_bytes

    def _find(self, source: int, start: int, stop: int) -> SampleTable | None:
        """Return the metadata of a range of which every position is held."""
        parts, reached = [], start
        for block in self._held.get(source, ()):
            if block.table.start <= reached < block.table.stop:
                parts.append(block.within(reached, min(stop, block.table.stop)).table)
                reached = parts[-1].stop
            if reached >= stop:
                return joined_tables(parts)
        return None

    def _hold(self, source: int, read: _Held) -> None:
        """Take in of a block what is not held yet: it may have been read twice, in other parts."""
        queue = self._held.setdefault(source, deque())
        new, start = [], read.table.start
        for block in queue:
            if start < block.table.start:
                new.append(read.within(start, min(block.table.start, read.table.stop)))
            start = max(start, block.table.stop)
            if start >= read.table.stop:
                break
        if start < read.table.stop:
            new.append(read.within(start, read.table.stop))
        for block in new:
            if block.table.stop > block.table.start:
                at = bisect_left(queue, block.table.start, key=lambda held: held.table.start)
                queue.insert(at, block)
                self._held_bytes += block.size_bytes
                self._indexes.pop(source, None)

    def _release(self, source: int, floor: int) -> None:
        queue = self._held.get(source, deque())
        while queue and queue[0].table.stop <= floor:
            self._held_bytes -= queue.popleft().size_bytes
            self._indexes.pop(source, None)
        if source in self._taken_over:
            self._taken_over[source] = max(self._taken_over[source], floor)

    def _index_of(self, source: int) -> _Index:
        index = self._indexes.get(source)
        if index is None:
            index = self._indexes[source] = _index_of(self._held.get(source, ()))
        return index

    def _missing(
        self, request: SliceRequest, index: _Index, wanted_N: NDArray[np.int64]
    ) -> StateError:
        first, last = self.held_positions(request.source)
        missing = request.positions_N[~np.isin(wanted_N, index.keys_N)]
        return StateError(
            f"source {self.names.get(request.source, request.source)!r} holds positions {first} to {last}, asked for "
            f"{missing.min()} to {missing.max()}: released, or never read; "
            "restart the data plane from the last checkpoint"
        )


def _chunks(start: int, stop: int) -> Iterable[tuple[int, int]]:
    """Cut a range into parts that are read at once: what is asked for meanwhile waits for one part only."""
    return ((at, min(at + _CHUNK, stop)) for at in range(start, stop, _CHUNK))


def _index_of(blocks: Iterable[_Held]) -> _Index:
    held = [block for block in blocks if len(block.table)]
    nothing = np.empty(0, np.int64)

    def bounds(columns: list[Ragged]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        starts_N = np.concatenate([nothing, *(column.offsets[:-1] for column in columns)])
        return starts_N, np.concatenate([nothing, *(column.offsets[1:] for column in columns)])

    starts_N, stops_N = bounds([b.tokens for b in held])
    others = {
        name: _Column(
            *bounds([b.others[name] for b in held]), [b.others[name].values_V for b in held]
        )
        for name in (held[0].others if held else ())
    }
    return _Index(
        keys_N=np.concatenate(
            [nothing, *(_keys(b.table.positions_N, b.table.subs_N) for b in held)]
        ),
        blocks_N=np.repeat(np.arange(len(held)), [len(b.table) for b in held]),
        starts_N=starts_N,
        stops_N=stops_N,
        columns=[b.tokens.values_V for b in held],
        others=others,
    )


def _ranges_in(
    name: str, index: _Index, rows_N: NDArray[np.int64], request: SliceRequest
) -> Ranges:
    """Say where the asked ranges of a further column lie."""
    column = index.others[name]
    first, last = column.starts_N[rows_N], column.stops_N[rows_N]
    if COLUMNS[name].aligned:
        starts_N = np.minimum(first + request.starts_N, last)
        stops_N = np.minimum(first + request.stops_N, last)
    else:  # with the piece that holds the sample's first token
        starts_N, stops_N = first, np.where(request.starts_N == 0, last, first)
    return Ranges(
        columns=column.values, which_N=index.blocks_N[rows_N], starts_N=starts_N, stops_N=stops_N
    )


def _require_ranges(request: SliceRequest) -> None:
    """Refuse ranges that start before their sample, which would show the tokens of another."""
    wrong_N = (
        (request.starts_N < 0)
        | (request.stops_N < request.starts_N)
        | (request.positions_N < 0)
        | (request.positions_N >= POSITION_LIMIT)
        | (request.subs_N < 0)
        | (request.subs_N >= SUB_LIMIT)
    )
    if wrong_N.any():
        i = int(wrong_N.argmax())
        raise StateError(
            f"asked for tokens {request.starts_N[i]} to {request.stops_N[i]} of sample {request.subs_N[i]} of record "
            f"{request.positions_N[i]} of source {request.source}, which are none; "
            "resume from an earlier checkpoint"
        )


def _keys(positions_N: NDArray[np.int64], subs_N: NDArray[np.int32]) -> NDArray[np.int64]:
    return positions_N * SUB_LIMIT + subs_N


def _all_found(
    keys_N: NDArray[np.int64], row: NDArray[np.int64], wanted: NDArray[np.int64]
) -> bool:
    inside = row < len(keys_N)
    return bool(inside.all()) and np.array_equal(keys_N[row], wanted)

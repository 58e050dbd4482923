"""The Source Loader machine: a bounded buffer of samples of its sources. It never sees ranks.

It is the only holder of a source's payload until a data constructor takes it. The
planner says what to read and when to let go, so the buffer is bounded by the plan.
"""

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from omniload.base.errors import StateError
from omniload.base.ragged import Ragged, Ranges
from omniload.machine.messages import ReadAhead, ReleaseSamples, SamplesReported, SliceRequest
from omniload.mix.pieces import POSITION_LIMIT, SUB_LIMIT
from omniload.mix.samples import SampleTable

__all__ = ["Read", "SamplesRead", "SourceLoader"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplesRead:
    """The shell has read a range."""

    source: int
    table: SampleTable
    tokens: Ragged
    skipped: int


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


@dataclass(slots=True, kw_only=True)
class SourceLoader:
    """Holds samples from the planner's floor to the end of what was read."""

    names: Mapping[int, str]
    """Sources of this loader, by number."""
    _held: dict[int, deque[_Held]] = field(default_factory=dict, init=False)
    _indexes: dict[int, _Index] = field(default_factory=dict, init=False)
    """Indexes of what is held; made anew when asked for after a change."""

    def handle(
        self, event: ReadAhead | SamplesRead | ReleaseSamples
    ) -> tuple[Read | SamplesReported, ...]:
        """Apply one event and return what must now be done, in order."""
        match event:
            case ReadAhead(source=source, start=start, stop=stop):
                held = self._find(source, start, stop)
                if held is not None:  # asked again: the answer is at hand
                    return (SamplesReported(source=source, table=held.table),)
                return (Read(source=source, start=start, stop=stop),)
            case SamplesRead(source=source, table=table, tokens=tokens, skipped=skipped):
                queue = self._held.setdefault(source, deque())
                if not queue or queue[-1].table.stop <= table.start:  # else read twice: it is held
                    queue.append(_Held(table, tokens))
                    self._indexes.pop(source, None)
                return (SamplesReported(source=source, table=table, skipped=skipped),)
            case ReleaseSamples(floors=floors):
                for source, floor in floors.items():
                    queue = self._held.get(source, deque())
                    while queue and queue[0].table.stop <= floor:
                        queue.popleft()
                        self._indexes.pop(source, None)
                return ()

    def slices(self, request: SliceRequest) -> Ragged:
        """Return the asked token ranges of one source; see ``slices_of``."""
        return self.slices_of([request])[0]

    def slices_of(self, requests: Sequence[SliceRequest]) -> list[Ragged]:
        """Return the asked token ranges of each request, copied end to end, in the order asked for.

        Raises:
            StateError: A sample is not held: it was released, or never read.
        """
        # One gather for all sources: a step asks many of them for a few ranges each.
        packed = self.ranges_of(requests).packed()
        values, offsets = packed.values_V, packed.offsets
        cuts = np.cumsum([0, *(len(request.positions_N) for request in requests)]).tolist()
        return [
            Ragged(
                values_V=values[offsets[a] : offsets[b]], offsets=offsets[a : b + 1] - offsets[a]
            )
            for a, b in pairwise(cuts)
        ]

    def ranges_of(self, requests: Sequence[SliceRequest]) -> Ranges:
        """Say where the asked token ranges lie, request by request, in the order asked for; nothing is copied.

        Raises:
            StateError: A sample is not held: it was released, or never read. Or a range is none.
        """
        nothing = np.empty(0, np.int64)
        columns: list[NDArray[np.int32]] = [np.empty(0, np.int32)]
        which, starts, stops = [nothing], [nothing], [nothing]
        for request in requests:
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
        return Ranges(
            columns=columns,
            which_N=np.concatenate(which),
            starts_N=np.concatenate(starts),
            stops_N=np.concatenate(stops),
        )

    def held_positions(self, source: int) -> tuple[int, int]:
        """Return the range of raw positions at hand; equal ends when there are none."""
        queue = self._held.get(source)
        return (queue[0].table.start, queue[-1].table.stop) if queue else (0, 0)

    def held_tokens(self) -> int:
        """Return the tokens held, over all sources."""
        return sum(len(block.tokens.values_V) for queue in self._held.values() for block in queue)

    def _find(self, source: int, start: int, stop: int) -> _Held | None:
        return next(
            (
                b
                for b in self._held.get(source, ())
                if b.table.start == start and b.table.stop == stop
            ),
            None,
        )

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


def _index_of(blocks: Iterable[_Held]) -> _Index:
    held = list(blocks)
    nothing = np.empty(0, np.int64)
    return _Index(
        keys_N=np.concatenate(
            [nothing, *(_keys(b.table.positions_N, b.table.subs_N) for b in held)]
        ),
        blocks_N=np.repeat(np.arange(len(held)), [len(b.table) for b in held]),
        starts_N=np.concatenate([nothing, *(b.tokens.offsets[:-1] for b in held)]),
        stops_N=np.concatenate([nothing, *(b.tokens.offsets[1:] for b in held)]),
        columns=[b.tokens.values_V for b in held],
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

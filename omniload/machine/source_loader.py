"""The Source Loader machine: a bounded buffer of samples of its sources. It never sees ranks.

It is the only holder of a source's payload until a data constructor takes it. The
planner says what to read and when to let go, so the buffer is bounded by the plan.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from omniload.base.errors import StateError
from omniload.base.ragged import Ragged, gather_ranges
from omniload.machine.messages import ReadAhead, ReleaseSamples, SamplesReported, SliceRequest
from omniload.mix.samples import SampleTable

__all__ = ["Read", "SamplesRead", "SourceLoader"]

_SUB_BITS = 20


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
    keys_N: NDArray[np.int64]
    table: SampleTable
    tokens: Ragged


@dataclass(slots=True, kw_only=True)
class SourceLoader:
    """Holds samples from the planner's floor to the end of what was read."""

    names: Mapping[int, str]
    """Sources of this loader, by number."""
    _held: dict[int, deque[_Held]] = field(default_factory=dict, init=False)

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
                    queue.append(_Held(_keys(table.positions_N, table.subs_N), table, tokens))
                return (SamplesReported(source=source, table=table, skipped=skipped),)
            case ReleaseSamples(floors=floors):
                for source, floor in floors.items():
                    queue = self._held.get(source, deque())
                    while queue and queue[0].table.stop <= floor:
                        queue.popleft()
                return ()

    def slices(self, request: SliceRequest) -> Ragged:
        """Return the asked token ranges, end to end, in the order asked for.

        Raises:
            StateError: A sample is not held: it was released, or never read.
        """
        blocks = self._held.get(request.source, deque())
        wanted = _keys(request.positions_N, request.subs_N)
        stops = np.asarray([block.table.stop for block in blocks], np.int64)
        block_of = np.searchsorted(stops, request.positions_N, side="right")
        starts, ends = np.zeros(len(wanted), np.int64), np.zeros(len(wanted), np.int64)
        parts: list[tuple[NDArray[np.int64], Ragged]] = []
        for number in np.unique(block_of).tolist():
            at = np.flatnonzero(block_of == number)
            block = blocks[number] if number < len(blocks) else None
            row = np.searchsorted(block.keys_N, wanted[at]) if block is not None else at
            if block is None or not _all_found(block.keys_N, row, wanted[at]):
                raise self._missing(request, at)
            # A sample that turned out shorter than reported must give fewer tokens, for the
            # constructor to notice, and never those of the sample behind it.
            first, last = block.tokens.offsets[row], block.tokens.offsets[row + 1]
            starts[at] = np.minimum(first + request.starts_N[at], last)
            ends[at] = np.minimum(first + request.stops_N[at], last)
            values, offsets = gather_ranges(block.tokens.values_V, starts[at], ends[at])
            parts.append((at, Ragged(values_V=values, offsets=offsets)))
        if len(parts) == 1:
            return parts[0][1]
        return _in_order(parts, len(wanted))

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

    def _missing(self, request: SliceRequest, at: NDArray[np.int64]) -> StateError:
        first, last = self.held_positions(request.source)
        return StateError(
            f"source {self.names.get(request.source, request.source)!r} holds positions {first} to {last}, asked for "
            f"{request.positions_N[at].min()} to {request.positions_N[at].max()}: released, or never read; "
            "restart the data plane from the last checkpoint"
        )


def _keys(positions_N: NDArray[np.int64], subs_N: NDArray[np.int32]) -> NDArray[np.int64]:
    return (positions_N << _SUB_BITS) | subs_N


def _all_found(
    keys_N: NDArray[np.int64], row: NDArray[np.int64], wanted: NDArray[np.int64]
) -> bool:
    inside = row < len(keys_N)
    return bool(inside.all()) and np.array_equal(keys_N[row], wanted)


def _in_order(parts: Sequence[tuple[NDArray[np.int64], Ragged]], count: int) -> Ragged:
    """Put sequences gathered block by block back into the order asked for."""
    place = np.empty(count, np.int64)
    place[np.concatenate([at for at, _ in parts])] = np.arange(count)
    values = np.concatenate([ragged.values_V for _, ragged in parts])
    lengths = np.concatenate([ragged.lengths_N for _, ragged in parts])
    offsets = np.concatenate(([0], np.cumsum(lengths)))
    return Ragged(values_V=values, offsets=offsets).take(place)

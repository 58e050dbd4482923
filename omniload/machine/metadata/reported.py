"""What a source reported of its samples, report by report, until every rank has the steps that they were drawn for.

Shape suffixes:
    N  samples held of one source        P  pieces
"""

from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Generic, Protocol, Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from omniload.machine.held.blocks import sample_keys
from omniload.mix.pieces import SUB_LIMIT, PieceTable
from omniload.mix.samples import SampleTable

__all__ = ["Report", "Reports"]


class _Held(Protocol):
    """A column, or several, of the samples of a report."""

    def between(self, first: int, last: int) -> Self:
        """Return that of the samples ``first`` to before ``last``."""
        ...


Held = TypeVar("Held", bound=_Held)


@dataclass(slots=True)
class Report(Generic[Held]):
    """What one report held of some samples."""

    stop: int
    """First raw position behind the samples."""
    keys_N: NDArray[np.int64]
    """Rising."""
    held_N: Held

    def reaches(self, first: int, last: int) -> bool:
        """Tell whether samples of keys from ``first`` to ``last`` may be among them."""
        return bool(len(self.keys_N) and self.keys_N[0] <= last and self.keys_N[-1] >= first)

    def rows_of(self, keys_P: NDArray[np.int64]) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
        """Return which of some pieces are of samples that were reported here, and the rows of these samples."""
        rows_P = self.keys_N.searchsorted(keys_P)
        inside = rows_P < len(self.keys_N)
        inside[inside] = self.keys_N[rows_P[inside]] == keys_P[inside]
        here = inside.nonzero()[0]
        return here, rows_P[here]


@dataclass(slots=True)
class Reports(Generic[Held]):
    """Reports of all sources, from the planner's floor on; sources that report nothing cost nothing."""

    _of_source: dict[int, deque[Report[Held]]] = field(default_factory=dict, init=False)

    def keep(self, source: int, table: SampleTable, held_N: Held) -> None:
        """Keep what a source reported of the samples of ``table``, ``[N]``."""
        keys_N = sample_keys(table.positions_N, table.subs_N)
        known = self._of_source.setdefault(source, deque())
        known.append(Report(table.stop, keys_N, held_N))

    def forget(self, source: int, position: int) -> None:
        """Let go of a source's samples from a position on: they are reported again."""
        known = self._of_source.get(source, deque())
        while known and known[-1].stop > position:
            last = known.pop()
            count = int(np.searchsorted(last.keys_N, position * SUB_LIMIT))
            if count:
                held_N = last.held_N.between(0, count)
                # A report that reaches over the position is cut there: what lies before it is not told again.
                known.append(Report(position, last.keys_N[:count], held_N))

    def release(self, floors: Mapping[int, int]) -> None:
        """Let go of samples before these positions."""
        for source, known in self._of_source.items():
            # Whole reports: the rest of one goes with its last sample.
            while known and known[0].stop <= floors.get(source, 0):
                known.popleft()

    def of_pieces(
        self, pieces: PieceTable
    ) -> Iterator[tuple[NDArray[np.intp], NDArray[np.int64], list[Report[Held]]]]:
        """Yield the places of the pieces of each source that reports, their keys, and what may hold them."""
        for source, known in self._of_source.items():
            at = (pieces.sources_P == source).nonzero()[0]
            if len(at):
                keys_P = sample_keys(pieces.positions_P[at], pieces.subs_P[at])
                first, last = int(keys_P.min()), int(keys_P.max())
                # Most reports hold none of a small step, and are passed over by two numbers each.
                yield at, keys_P, [each for each in known if each.reaches(first, last)]

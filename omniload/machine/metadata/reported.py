"""Reported metadata of samples, report by report, kept until every rank has the steps that draw these samples.

Shape suffixes:
    N  samples held of one source        P  pieces
"""

from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Generic, Protocol, Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from omniload.base.ragged import Ragged
from omniload.machine.held.blocks import sample_keys
from omniload.mix.pieces import SUB_LIMIT, PieceTable
from omniload.mix.samples import SampleTable

__all__ = ["Report", "ReportedSpans", "Reports"]


class _Held(Protocol):
    """One or several columns of the samples of a report."""

    def between(self, first: int, last: int) -> Self:
        """Return the part for the samples from ``first`` up to ``last``, excluded."""
        ...


Held = TypeVar("Held", bound=_Held)


@dataclass(slots=True)
class Report(Generic[Held]):
    """The metadata of one report."""

    stop: int
    """First raw position after the samples."""
    keys_N: NDArray[np.int64]
    """Keys of the samples, rising."""
    held_N: Held

    def reaches(self, first: int, last: int) -> bool:
        """Return whether the report may have samples with keys from ``first`` to ``last``."""
        return bool(len(self.keys_N) and self.keys_N[0] <= last and self.keys_N[-1] >= first)

    def rows_of(self, keys_P: NDArray[np.int64]) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
        """Return which pieces belong to samples of this report, and the rows of these samples."""
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
        """Keep the metadata that a source reported for the samples of ``table``, ``[N]``."""
        keys_N = sample_keys(table.positions_N, table.subs_N)
        known = self._of_source.setdefault(source, deque())
        known.append(Report(table.stop, keys_N, held_N))

    def forget(self, source: int, position: int) -> None:
        """Forget a source's samples from ``position`` on, because they will be reported again."""
        known = self._of_source.get(source, deque())
        while known and known[-1].stop > position:
            last = known.pop()
            count = int(np.searchsorted(last.keys_N, position * SUB_LIMIT))
            if count:
                held_N = last.held_N.between(0, count)
                # A report that extends over the position is cut there: samples before it will not be reported again.
                known.append(Report(position, last.keys_N[:count], held_N))

    def release(self, floors: Mapping[int, int]) -> None:
        """Release samples before these positions."""
        for source, known in self._of_source.items():
            # Only whole reports: a report stays until its last sample can go.
            while known and known[0].stop <= floors.get(source, 0):
                known.popleft()

    def of_pieces(
        self, pieces: PieceTable
    ) -> Iterator[tuple[NDArray[np.intp], NDArray[np.int64], list[Report[Held]]]]:
        """Yield, for each source with reports, the indices of its pieces, their keys, and the reports that may fit."""
        for source, known in self._of_source.items():
            at = (pieces.sources_P == source).nonzero()[0]
            if len(at):
                keys_P = sample_keys(pieces.positions_P[at], pieces.subs_P[at])
                first, last = int(keys_P.min()), int(keys_P.max())
                # Most reports have no sample of a small step; comparing two numbers rules them out.
                yield at, keys_P, [each for each in known if each.reaches(first, last)]


@dataclass(slots=True)
class ReportedSpans(Reports[Ragged]):
    """Reports of one column by source; sources without it cost nothing."""

    column: ClassVar[str]

    def add(self, source: int, table: SampleTable) -> None:
        """Add a report of a source."""
        spans_N = table.metadata.get(self.column)
        if spans_N is not None:
            self.keep(source, table, spans_N)

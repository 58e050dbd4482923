"""Which tokens of a sample are trained on, as the planner knows it: the count of a step's labels needs it.

Shape suffixes:
    N  samples held of one source        P  pieces        Q  pieces and spans that meet
"""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from omniload.base.ragged import Ragged
from omniload.batch.rows import stops_with_next
from omniload.mix.columns import LOSS_SPANS
from omniload.mix.pieces import SUB_LIMIT, PieceTable
from omniload.mix.samples import SampleTable

__all__ = ["LossSpans"]


@dataclass(slots=True)
class _Known:
    stop: int
    """First raw position behind the samples."""
    keys_N: NDArray[np.int64]
    spans_N: Ragged


@dataclass(slots=True)
class LossSpans:
    """Spans of the samples of masked sources, from the planner's floor on; sources without a mask cost nothing."""

    _of_source: dict[int, deque[_Known]] = field(default_factory=dict, init=False)

    def add(self, source: int, table: SampleTable) -> None:
        """Take in what was reported of a source."""
        spans = table.metadata.get(LOSS_SPANS)
        if spans is not None:
            keys_N = table.positions_N * SUB_LIMIT + table.subs_N
            self._of_source.setdefault(source, deque()).append(_Known(table.stop, keys_N, spans))

    def forget(self, source: int, position: int) -> None:
        """Let go of a source's samples from a position on: they are reported again."""
        known = self._of_source.get(source, deque())
        while known and known[-1].stop > position:
            last = known.pop()
            count = int(np.searchsorted(last.keys_N, position * SUB_LIMIT))
            if count:
                known.append(_Known(position, last.keys_N[:count], last.spans_N.between(0, count)))

    def release(self, floors: Mapping[int, int]) -> None:
        """Let go of samples before these positions."""
        for source, known in self._of_source.items():
            while known and known[0].stop <= floors.get(source, 0):
                known.popleft()

    def labels_left_out(self, pieces: PieceTable) -> int:
        """Return how many labels of a step's pieces are not trained on: of the tokens behind each piece's first."""
        left_out, stops_P = 0, stops_with_next(pieces)
        for source in self._of_source:
            at = np.flatnonzero(pieces.sources_P == source)
            if len(at):
                mine, stops = pieces.take(at), stops_P[at]
                labels = int((stops - mine.starts_P - 1).sum())
                left_out += labels - self._kept(source, mine, stops)
        return left_out

    def _kept(self, source: int, pieces: PieceTable, stops_P: NDArray[np.int32]) -> int:
        keys_P = pieces.positions_P * SUB_LIMIT + pieces.subs_P
        kept = 0
        for known in self._of_source[source]:
            row_P = np.searchsorted(known.keys_N, keys_P)
            inside = row_P < len(known.keys_N)
            inside[inside] = known.keys_N[row_P[inside]] == keys_P[inside]
            here = np.flatnonzero(inside)
            if len(here):
                kept += _overlap(
                    known.spans_N.take(row_P[here]), pieces.starts_P[here] + 1, stops_P[here]
                )
        return kept


def _overlap(spans_P: Ragged, starts_P: NDArray[np.int32], stops_P: NDArray[np.int32]) -> int:
    """Return the tokens that lie both in a piece's range and in one of its spans."""
    bounds_Q2 = spans_P.values_V.reshape(-1, 2)
    piece_Q = np.repeat(np.arange(len(spans_P)), spans_P.lengths_N // 2)
    common = np.minimum(bounds_Q2[:, 1], stops_P[piece_Q])
    common -= np.maximum(bounds_Q2[:, 0], starts_P[piece_Q])
    return int(np.maximum(common, 0).sum(dtype=np.int64))

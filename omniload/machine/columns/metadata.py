"""Metadata of samples that rows need once they are drawn: which tokens are trained on, where images are.

Shape suffixes:
    N  samples held of one source        P  pieces        I  images of the pieces
"""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypedDict

import numpy as np
from numpy.typing import NDArray

from omniload.base.ragged import Ragged
from omniload.machine.loss_spans import LossSpans
from omniload.mix.columns import IMAGE_SPANS
from omniload.mix.pieces import SUB_LIMIT, PieceTable
from omniload.mix.samples import SampleTable
from omniload.plan.images.table import ImageTable

__all__ = ["PieceFacts", "SampleMetadata"]


@dataclass(slots=True)
class _Known:
    stop: int
    """First raw position behind the samples."""
    keys_N: NDArray[np.int64]
    spans_N: Ragged
    """First placeholder, placeholders and patches of each image."""


class PieceFacts(TypedDict):
    """What ``place`` is told of the pieces of a step beside their lengths."""

    labels_left_out: int
    """Labels that are not trained on."""
    images: ImageTable | None
    """Their images; ``None`` where they hold none."""


@dataclass(slots=True)
class SampleMetadata:
    """What sources report beside lengths, from the planner's floor on; sources that report nothing cost nothing."""

    _loss_spans: LossSpans = field(default_factory=LossSpans, init=False)
    _images_of_source: dict[int, deque[_Known]] = field(default_factory=dict, init=False)

    def add(self, source: int, table: SampleTable) -> None:
        """Take in what was reported of a source."""
        self._loss_spans.add(source, table)
        spans = table.metadata.get(IMAGE_SPANS)
        if spans is not None:
            keys_N = table.positions_N * SUB_LIMIT + table.subs_N
            known = self._images_of_source.setdefault(source, deque())
            known.append(_Known(table.stop, keys_N, spans))

    def forget(self, source: int, position: int) -> None:
        """Let go of a source's samples from a position on: they are reported again."""
        self._loss_spans.forget(source, position)
        known = self._images_of_source.get(source, deque())
        while known and known[-1].stop > position:
            last = known.pop()
            count = int(np.searchsorted(last.keys_N, position * SUB_LIMIT))
            if count:
                known.append(_Known(position, last.keys_N[:count], last.spans_N.between(0, count)))

    def release(self, floors: Mapping[int, int]) -> None:
        """Let go of samples before these positions."""
        self._loss_spans.release(floors)
        for source, known in self._images_of_source.items():
            while known and known[0].stop <= floors.get(source, 0):
                known.popleft()

    def of(self, pieces: PieceTable) -> PieceFacts:
        """Return what is to be known of the pieces of a step."""
        return {
            "labels_left_out": self._loss_spans.labels_left_out(pieces),
            "images": self._images_of(pieces),
        }

    def _images_of(self, pieces: PieceTable) -> ImageTable | None:
        owners, found = [], []
        for source, known in self._images_of_source.items():
            at = np.flatnonzero(pieces.sources_P == source)
            keys_P = pieces.positions_P[at] * SUB_LIMIT + pieces.subs_P[at]
            for each in known if len(at) else ():
                rows_P = np.searchsorted(each.keys_N, keys_P)
                inside = rows_P < len(each.keys_N)
                inside[inside] = each.keys_N[rows_P[inside]] == keys_P[inside]
                spans_P = each.spans_N.take(rows_P[inside])
                owners.append(np.repeat(at[inside], spans_P.lengths_N // 3))
                found.append(spans_P.values_V.reshape(-1, 3))
        if not sum(map(len, owners)):
            return None
        pieces_I, spans_I3 = np.concatenate(owners), np.concatenate(found)
        # Images of one piece lie together in their order, which a stable sort keeps.
        order_I = np.argsort(pieces_I, kind="stable")
        pieces_I, spans_I3 = pieces_I[order_I], spans_I3[order_I]
        numbers_I = np.arange(len(pieces_I)) - np.searchsorted(pieces_I, pieces_I)
        return ImageTable(
            pieces_I=pieces_I,
            numbers_I=numbers_I.astype(np.int32),
            firsts_I=spans_I3[:, 0],
            tokens_I=spans_I3[:, 1],
            patches_I=spans_I3[:, 2],
        )

"""The images of a step: which rows hold them, which ranks encode them, where their embeddings belong.

Two views of the same samples are balanced apart: rows by what the backbone pays, images by what the
encoder pays. An embedding goes from the rank that encoded it to the rank of its row::

    rank that encodes    images          embeddings go to
    0                    a  c            a -> rank 1, c -> rank 0
    1                    b               b -> rank 1

Shape suffixes:
    I  images of the step, or of some of its rows        P  pieces of the step        R  rows
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Self

import numpy as np
from numpy.typing import NDArray

from omniload.mix.pieces import PieceTable
from omniload.plan.images.table import ImageTable
from omniload.plan.placement import Placement

__all__ = ["ImagePlan"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ImagePlan:
    """Where every image of a step is encoded and trained on: by rank and microbatch of its row, then by place."""

    keys_I4: NDArray[np.int64]
    """Source, position and sub of its sample, and its number in it."""
    tokens_I: NDArray[np.int64]
    """Embeddings of each."""
    dp_ranks_I: NDArray[np.int32]
    """Rank that trains on it."""
    microbatches_I: NDArray[np.int32]
    """Microbatch that does: of that rank, and of the rank that encodes it."""
    places_I: NDArray[np.int64]
    """Its first placeholder in the flattened rows of that microbatch."""
    encoders_I: NDArray[np.int32]
    """Rank that encodes it."""
    num_ranks: int
    """Ranks that images go to."""

    @classmethod
    def of(
        cls,
        images: ImageTable,
        pieces: PieceTable,
        row_offsets: NDArray[np.int64],
        placement: Placement,
        row_length: int,
    ) -> Self:
        """Return the plan of the images of a step whose rows and images are placed."""
        assert placement.encoders_I is not None, "the placement deals images"
        rows_I = images.rows_I(row_offsets)
        begins_P = np.cumsum(pieces.lengths_P, dtype=np.int64) - pieces.lengths_P
        # From the row's start: tokens before the piece in the step, less those before the row.
        columns_I = begins_P[images.pieces_I] - begins_P[row_offsets[rows_I]] + images.firsts_I
        dp_ranks_R, microbatches_R = placement.buckets_N, placement.microbatches_N
        # As constructors lay rows out: those of a microbatch in the order of the step.
        order_R = np.lexsort((microbatches_R, dp_ranks_R))
        cells_R = (dp_ranks_R.astype(np.int64) * placement.num_microbatches + microbatches_R)[
            order_R
        ]
        row_in_cell_R = np.empty(len(order_R), np.int64)
        row_in_cell_R[order_R] = np.arange(len(order_R)) - np.searchsorted(cells_R, cells_R)
        places_I = row_in_cell_R[rows_I] * row_length + columns_I
        # Sorted once: what a rank encodes, and what it receives, is then in order by leaving out the rest.
        order_I = np.lexsort((places_I, microbatches_R[rows_I], dp_ranks_R[rows_I]))
        found = pieces.take(images.pieces_I)
        keys_I4 = np.column_stack(
            (found.sources_P, found.positions_P, found.subs_P, images.numbers_I)
        ).astype(np.int64)
        return cls(
            keys_I4=keys_I4,
            tokens_I=images.tokens_I.astype(np.int64),
            dp_ranks_I=dp_ranks_R[rows_I],
            microbatches_I=microbatches_R[rows_I],
            places_I=places_I,
            encoders_I=placement.encoders_I,
            num_ranks=placement.tree.size_of("dp"),
        ).take(order_I)

    def __len__(self) -> int:
        return len(self.tokens_I)

    def take(self, indices: NDArray[np.int64]) -> Self:
        """Return the images at ``indices``."""
        columns = [field.name for field in fields(self) if field.name != "num_ranks"]
        return replace(self, **{name: getattr(self, name)[indices] for name in columns})

    def part_of(self, dp_ranks: Sequence[int]) -> Self:
        """Return the images that some ranks encode or train on."""
        # A constructor sends what its ranks encode, and tells them where embeddings come from: it needs both.
        theirs_I = np.isin(self.dp_ranks_I, dp_ranks) | np.isin(self.encoders_I, dp_ranks)
        return self.take(np.flatnonzero(theirs_I))

    def encoded_by(self, rank: int, microbatch: int) -> NDArray[np.int64]:
        """Return the images that a rank encodes, by the rank they go to, then by place."""
        mine_I = (self.encoders_I == rank) & (self.microbatches_I == microbatch)
        return np.flatnonzero(mine_I)

    def arriving_at(self, rank: int, microbatch: int) -> NDArray[np.int64]:
        """Return the images whose embeddings a rank receives, by the rank they come from, then by place."""
        mine_I = (self.dp_ranks_I == rank) & (self.microbatches_I == microbatch)
        found = np.flatnonzero(mine_I)
        return found[np.argsort(self.encoders_I[found], kind="stable")]

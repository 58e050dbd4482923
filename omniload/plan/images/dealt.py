"""The images of a step: which rows hold them, which ranks encode them, where their embeddings belong.

Two views of the same samples are balanced apart: rows by what the backbone pays, images by what the
encoder pays. An embedding goes from the rank that encoded it to the rank of its row::

    rank that encodes    images          embeddings go to
    0                    a  c            a -> rank 1, c -> rank 0
    1                    b               b -> rank 1

Of ranks that take the same rows, along tp and pp, the one that fetches them wants their embeddings; the others
encode for it. Ranks along cp want those of their slices.

Shape suffixes:
    I  images of the step, or of some of its rows        P  pieces of the step        R  rows
    W  ranks
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from itertools import pairwise
from typing import Self

import numpy as np
from numpy.typing import NDArray

from omniload.mix.pieces import PieceTable
from omniload.plan.images.table import ImageTable
from omniload.plan.place_tree import ClientPlaceTree
from omniload.plan.placement import Placement

__all__ = ["ImagePlan"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ImagePlan:
    """Where images of a step are encoded and trained on, ordered by rank and microbatch of the row, then by place."""

    keys_I4: NDArray[np.int64]
    """Source, position and sub of its sample, and its number in it."""
    tokens_I: NDArray[np.int64]
    """Embeddings of each."""
    dp_ranks_I: NDArray[np.int32]
    """Data-parallel rank that trains on it."""
    microbatches_I: NDArray[np.int32]
    """Microbatch in which the image is trained on and encoded, the same on both ranks."""
    places_I: NDArray[np.int64]
    """Its first placeholder in the flattened whole rows of that microbatch."""
    encoders_I: NDArray[np.int32]
    """Rank of the tree that encodes it."""
    tree: ClientPlaceTree
    """The ranks that images go to."""
    row_length: int
    """Tokens in a row."""

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
        # In the order in which constructors lay out rows: within a microbatch, as in the step.
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
            tree=placement.tree,
            row_length=row_length,
        ).take(order_I)

    def __len__(self) -> int:
        return len(self.tokens_I)

    @property
    def num_ranks(self) -> int:
        """Ranks that images go to."""
        return self.tree.world_size

    def take(self, indices: NDArray[np.int64]) -> Self:
        """Return the images at ``indices``."""
        columns = [f.name for f in fields(self) if f.name not in {"tree", "row_length"}]
        return replace(self, **{name: getattr(self, name)[indices] for name in columns})

    def part_of(self, dp_ranks: Sequence[int]) -> Self:
        """Return the images that ranks of some data-parallel ranks encode or train on."""
        # A constructor sends what its ranks encode, and tells them where embeddings come from: it needs both.
        theirs_I = np.isin(self.dp_ranks_I, dp_ranks) | self.are_encoded_at(dp_ranks)
        return self.take(np.flatnonzero(theirs_I))

    def parts_of(self, owners_D: NDArray[np.int64], count: int) -> list[Self]:
        """Return ``part_of`` the ranks of each of ``count`` data constructors, in one pass over the images.

        Args:
            owners_D: Number of the constructor of each data-parallel rank, ``[D]``; from ``count`` on of none.
            count: Constructors.
        """
        trains_I = owners_D[self.dp_ranks_I]
        encodes_I = owners_D[_dp_ranks_of(self.tree)[self.encoders_I]]
        twice = np.flatnonzero(trains_I != encodes_I)
        owners = np.concatenate((trains_I, encodes_I[twice]))
        found = np.concatenate((np.arange(len(self)), twice))
        order = np.lexsort((found, owners))
        bounds = owners[order].searchsorted(range(count + 1)).tolist()
        return [self.take(found[order[a:b]]) for a, b in pairwise(bounds)]

    def are_encoded_at(self, dp_ranks: Sequence[int]) -> NDArray[np.bool_]:
        """Tell which images are encoded by a rank of some data-parallel ranks."""
        return np.isin(_dp_ranks_of(self.tree)[self.encoders_I], dp_ranks)

    def encoded_at(self, dp_rank: int, microbatch: int) -> NDArray[np.int64]:
        """Return the images that ranks of a data-parallel rank encode: by rank, by the dp rank they go to, by place."""
        found = np.flatnonzero(self.are_encoded_at([dp_rank]) & (self.microbatches_I == microbatch))
        return found[np.argsort(self.encoders_I[found], kind="stable")]

    def arriving_at(self, dp_rank: int, microbatch: int) -> NDArray[np.int64]:
        """Return the images of a data-parallel rank's rows, by place."""
        mine_I = (self.dp_ranks_I == dp_rank) & (self.microbatches_I == microbatch)
        return np.flatnonzero(mine_I)


@lru_cache(maxsize=8)
def _dp_ranks_of(tree: ClientPlaceTree) -> NDArray[np.int64]:
    """Return the data-parallel rank of each rank, ``[W]``."""
    ranks_DCP = tree.ranks_by_place()
    dp_ranks_W = np.empty(tree.world_size, np.int64)
    dp_ranks_W[ranks_DCP.reshape(-1)] = np.repeat(np.arange(len(ranks_DCP)), ranks_DCP[0].size)
    return dp_ranks_W

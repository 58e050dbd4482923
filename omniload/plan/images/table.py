"""The images of a step before they are dealt.

Shape suffixes:
    I  images of the step        P  pieces of the step
"""

from dataclasses import dataclass, fields, replace
from typing import Self

import numpy as np
from numpy.typing import NDArray

from omniload.plan.dgraph import DGraph, read_only

__all__ = ["ImageTable"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageTable:
    """Metadata of a step's images before they are dealt, in the order of its pieces."""

    pieces_I: NDArray[np.int64]
    """Piece of the step that holds each image."""
    numbers_I: NDArray[np.int32]
    """Its number in the sample."""
    firsts_I: NDArray[np.int32]
    """Its first placeholder, from the start of the piece."""
    tokens_I: NDArray[np.int32]
    """Placeholders, and embeddings, of each."""
    patches_I: NDArray[np.int32]
    """Patches of each: what the encoder pays by."""

    @classmethod
    def empty(cls) -> Self:
        """Return the table of a step without images."""
        none = np.empty(0, np.int32)
        return cls(
            pieces_I=none.astype(np.int64),
            numbers_I=none,
            firsts_I=none,
            tokens_I=none,
            patches_I=none,
        )

    def read_only(self) -> Self:
        """Return the table with read-only arrays, for a user's strategy."""
        columns = {each.name: read_only(getattr(self, each.name)) for each in fields(self)}
        return replace(self, **columns)

    def __len__(self) -> int:
        return len(self.pieces_I)

    def patches_P(self, num_pieces: int) -> NDArray[np.int64]:
        """Return the patches of each piece."""
        # Summed as doubles, and exact: patches of a step are far fewer than 2**53.
        return np.bincount(self.pieces_I, self.patches_I, num_pieces).astype(np.int64)

    def rows_I(self, row_offsets: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the row of each image."""
        found: NDArray[np.int64] = np.searchsorted(row_offsets, self.pieces_I, side="right") - 1
        return found

    def graph_of(self, images: NDArray[np.int64]) -> DGraph:
        """Return the graph of some images: a member each, with its ``patches``."""
        return DGraph.of_samples(self.tokens_I[images], columns={"patches": self.patches_I[images]})

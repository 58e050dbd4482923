"""Beginnings of documents inside pieces of samples that join several documents with separate attention.

Shape suffixes:
    D  pieces of all rows, and the padding of each        K  pieces        I  documents that begin inside a piece
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from omniload.base.ragged import Ragged
from omniload.mix.columns import DOCUMENT_STARTS

__all__ = ["positions_between", "starts_inside", "with_starts"]


def starts_inside(
    cu_seqlens: NDArray[np.int32], sources_D: NDArray[np.int16], columns_K: Mapping[str, Ragged]
) -> NDArray[np.int32]:
    """Return the tokens that documents inside pieces begin with, ``[I]``, rising.

    Args:
        cu_seqlens: Bounds of the pieces in the flattened rows, ``[D + 1]``.
        sources_D: Number of the source of each; -1 for padding.
        columns_K: Whole-sample columns of the pieces.
    """
    starts_K = columns_K.get(DOCUMENT_STARTS)
    if starts_K is None or not len(starts_K.values_V):
        return np.empty(0, np.int32)
    begins_K = cu_seqlens[:-1][sources_D >= 0]
    starts: NDArray[np.int32] = np.repeat(begins_K, starts_K.lengths_N) + starts_K.values_V
    return starts


def with_starts(cu_seqlens: NDArray[np.int32], starts: NDArray[Any]) -> NDArray[np.int32]:
    """Return bounds with further ones inside."""
    return (
        np.sort(np.concatenate((cu_seqlens, starts))).astype(np.int32)
        if len(starts)
        else cu_seqlens
    )


def positions_between(bounds: NDArray[np.int32]) -> NDArray[np.int32]:
    """Return the place of each token behind the bound before it, of all from the first bound, 0, to the last."""
    positions = np.arange(int(bounds[-1]), dtype=np.int32)
    positions -= np.repeat(bounds[:-1], np.diff(bounds))
    return positions

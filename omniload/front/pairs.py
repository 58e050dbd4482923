"""Preference pairs of packed rows: each is one piece, and two documents to a model.

Shape suffixes:
    R  rows      T  tokens in a row      D  documents of all rows      P  pairs
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from omniload.base.errors import ConfigError
from omniload.batch.microbatch import CpSlice, Microbatch
from omniload.mix.columns import REJECTED_AT

__all__ = ["Documents", "documents_of"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Documents:
    """The documents of some rows, as a model shall see them."""

    cu_seqlens: NDArray[np.int32]
    """Bounds in the flattened rows, ``[D + 1]``; of a pair also the one between its sides."""
    positions: NDArray[np.int32]
    """Place of each token in its document; of cp peers, those of the slice."""
    pairs_P2: NDArray[np.int64]
    """Documents that are the chosen and the rejected side of each pair."""


def documents_of(part: Microbatch | CpSlice) -> Documents:
    """Return the documents of some rows, each side of a pair as one.

    Raises:
        ConfigError: Pairs lie in rows that are shared among cp peers.
    """
    rejected_K = part.columns_K.get(REJECTED_AT)
    none = rejected_K is None or not len(rejected_K.values_V)
    if isinstance(part, CpSlice):
        if not none:
            raise ConfigError(
                "rows of preference pairs are shared among cp peers, which no pair is laid out for; set cp to 1"
            )
        return _without_pairs(part.cu_seqlens, part.positions_RC)
    if rejected_K is None or none:
        return _without_pairs(part.cu_seqlens, part.positions_RT)
    starts_D = part.cu_seqlens[:-1]
    is_piece_D = part.sources_D >= 0
    is_pair_K = rejected_K.lengths_N > 0
    starts_P = starts_D[is_piece_D][is_pair_K]
    stops_P = part.cu_seqlens[1:][is_piece_D][is_pair_K]
    between_P = starts_P + rejected_K.values_V
    bounds = np.sort(np.concatenate((part.cu_seqlens, between_P)))
    back = np.zeros(part.positions_RT.size + 1, np.int32)
    back[between_P] = rejected_K.values_V
    back[stops_P] -= rejected_K.values_V
    positions = part.positions_RT - np.cumsum(back[:-1], dtype=np.int32).reshape(
        part.positions_RT.shape
    )
    second_P = np.searchsorted(bounds, between_P)
    return Documents(
        cu_seqlens=bounds.astype(np.int32),
        positions=positions,
        pairs_P2=np.column_stack((second_P - 1, second_P)).astype(np.int64),
    )


def _without_pairs(cu_seqlens: NDArray[np.int32], positions: NDArray[np.int32]) -> Documents:
    return Documents(
        cu_seqlens=cu_seqlens, positions=positions, pairs_P2=np.empty((0, 2), np.int64)
    )

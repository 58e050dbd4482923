"""Columns of sequences of unequal length: one flat array of values, one of offsets.

Shape suffixes:
    N  sequences        V  values of all sequences together
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

__all__ = ["Ragged", "gather_ranges"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ragged:
    """``N`` sequences end to end; sequence ``i`` is ``values_V[offsets[i]:offsets[i + 1]]``."""

    values_V: NDArray[Any]
    """Values of all sequences, in order."""
    offsets: NDArray[np.int64]
    """Boundaries, ``[N + 1]``, from 0 to ``V``, never falling."""

    @classmethod
    def of(cls, sequences: Sequence[NDArray[Any]], dtype: type[np.generic] = np.int32) -> Self:
        """Lay ``sequences`` end to end."""
        lengths = np.fromiter((len(s) for s in sequences), dtype=np.int64, count=len(sequences))
        values = (
            np.concatenate(sequences).astype(dtype, copy=False) if sequences else np.empty(0, dtype)
        )
        return cls(values_V=values, offsets=np.concatenate(([0], np.cumsum(lengths))))

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, i: int) -> NDArray[Any]:
        return self.values_V[self.offsets[i] : self.offsets[i + 1]]

    @property
    def lengths_N(self) -> NDArray[np.int64]:
        """Length of each sequence."""
        return np.diff(self.offsets)

    def take(self, indices: NDArray[np.integer[Any]]) -> Self:
        """Return the sequences at ``indices``, copied end to end."""
        starts, stops = self.offsets[indices], self.offsets[indices + 1]
        values, offsets = gather_ranges(self.values_V, starts, stops)
        return type(self)(values_V=values, offsets=offsets)


def gather_ranges(
    values_V: NDArray[Any], starts_N: NDArray[np.int64], stops_N: NDArray[np.int64]
) -> tuple[NDArray[Any], NDArray[np.int64]]:
    """Copy ``values_V[starts[i]:stops[i]]`` for every ``i`` end to end.

    Returns:
        The copied values, and their boundaries ``[N + 1]``.
    """
    lengths = stops_N - starts_N
    offsets = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    total = int(offsets[-1])
    if total == 0:
        return values_V[:0], offsets
    out = np.empty(total, values_V.dtype)
    # One slice copy per range: memcpy speed, where an index array would touch 8 bytes per value.
    for start, stop, at in zip(starts_N.tolist(), stops_N.tolist(), offsets.tolist(), strict=False):
        out[at : at + stop - start] = values_V[start:stop]
    return out, offsets

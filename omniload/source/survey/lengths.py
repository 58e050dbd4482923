"""Lengths of documents in bounded memory: a fine histogram, and what is read from it.

Shape suffixes:
    N  documents        B  bins
"""

import numpy as np
from numpy.typing import NDArray

from omniload.mix.schema.records import Overlong

__all__ = ["LengthHistogram", "trained_on"]

_BINS_A_DOUBLING = 16
"""A quantile is at most a 16th of a doubling above the true one: 5 %."""
_DOUBLINGS = 32
_EDGES_B = np.unique(
    np.floor(2.0 ** (np.arange(_DOUBLINGS * _BINS_A_DOUBLING) / _BINS_A_DOUBLING)).astype(np.int64)
)
"""First length of each bin; short lengths have a bin each."""


class LengthHistogram:
    """Counts documents by their length; those of no tokens are counted apart."""

    def __init__(self) -> None:
        self.documents = 0
        """Of at least one token."""
        self.empty = 0
        """Records that gave no token."""
        self.tokens = 0
        self.longest = 0
        self._counts_B = np.zeros(len(_EDGES_B), np.int64)

    def add(self, lengths_N: NDArray[np.int64]) -> None:
        """Take in lengths, each at least 0."""
        given = lengths_N[lengths_N > 0]
        self.empty += len(lengths_N) - len(given)
        self.documents += len(given)
        self.tokens += int(given.sum())
        self.longest = max(self.longest, int(given.max(initial=0)))
        bins = np.searchsorted(_EDGES_B, given, side="right") - 1
        self._counts_B += np.bincount(bins, minlength=len(_EDGES_B))

    @property
    def mean(self) -> float:
        """Tokens of a record; one that gives none counts."""
        return self.tokens / max(self.documents + self.empty, 1)

    def quantile(self, part: float) -> int:
        """Return a length that ``part`` of the documents do not exceed; at most 5 % above the least such length."""
        if not self.documents:
            return 0
        at = int(np.searchsorted(np.cumsum(self._counts_B), part * self.documents))
        last = int(_EDGES_B[at + 1]) - 1 if at + 1 < len(_EDGES_B) else self.longest
        return min(last, self.longest)

    def by_doubling(self) -> list[int]:
        """Return how many documents have 1 token, 2 to 3, 4 to 7 and so on, up to the longest."""
        doubling_B = np.floor(np.log2(_EDGES_B)).astype(np.int64)
        counts = np.bincount(doubling_B, weights=self._counts_B).astype(np.int64)
        return [int(count) for count in counts[: self.longest.bit_length()]]


def trained_on(lengths_N: NDArray[np.int64], length: int, overlong: Overlong) -> NDArray[np.int64]:
    """Return the tokens of each document that a row of ``length`` takes, by the policy for overlong ones."""
    if overlong == "truncate":
        return np.minimum(lengths_N, length)
    if overlong == "drop":
        return np.where(lengths_N > length, 0, lengths_N)
    return lengths_N

"""How lengths differ between places of a source, and along each: files that are sorted show in either.

Lengths are compared by their logarithms: one document far longer than all others is no order of a file.

Shape suffixes:
    P  places      N  records      U  units
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

__all__ = ["Differences", "Spread", "evenly", "unevenness"]

_PLACES = 3
"""Places, and records of each, below which nothing is said of how they differ."""
_RECORDS = 32
"""Records below which nothing is said of an order."""
_ALIKE = 0.01
"""Variance of the logarithm of lengths below which all records are taken to be of one length."""
_UNITS = 8
"""Units below which their sizes say nothing: of fewer, one with a long document would decide."""
_CHANCE = 6.0
"""Standard errors of a unit's mean that two units differ by without any order, at most."""
_NEIGHBOURS = 0.6
"""Part of what units differ anyway by which neighbours differ, at most, where they lie in an order. Without one it is
about 1, however rare the documents are that make some units long: of those the first records may have none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Differences:
    """What is known of how the lengths of a source differ from place to place; nothing where all is 0."""

    units: int
    """Its units."""
    between: float = 0.0
    """As ``Spread.between``."""
    along: float = 0.0
    """As ``Spread.along``."""
    times: float = 1.0
    """As ``unevenness``."""


class Spread:
    """Takes in lengths, place by place; holds a few numbers of each place."""

    def __init__(self) -> None:
        self._sums: dict[int, NDArray[np.float64]] = {}

    @classmethod
    def of(cls, places: Iterable[NDArray[np.integer[Any]]]) -> Self:
        """Return that of lengths of records, place by place."""
        spread = cls()
        for place, lengths_N in enumerate(places):
            spread.add(place, lengths_N)
        return spread

    def add(self, place: int, lengths_N: NDArray[np.integer[Any]]) -> None:
        """Take in lengths of records of a place, in their order there; those of 0 are left out."""
        logs_N = np.log1p(lengths_N[lengths_N > 0].astype(np.float64))
        sums = self._sums.setdefault(place, np.zeros(6))
        at_N = sums[0] + np.arange(len(logs_N))
        sums += [
            len(logs_N),
            logs_N.sum(),
            (logs_N**2).sum(),
            at_N.sum(),
            (at_N**2).sum(),
            (at_N * logs_N).sum(),
        ]

    @property
    def between(self) -> float:
        """Part of the variance of all that lies between places; 0 of few, or where all are alike.

        Less what chance alone has lie there, as of three records a place a third does.

        Source:
            Adjusted R squared; Ezekiel, "Methods of Correlation Analysis" (1930).
        """
        sums_P6 = self._sums_P6()
        if (
            len(sums_P6) < _PLACES
            or sums_P6[:, 0].min() < _PLACES
            or sums_P6[:, 0].sum() < _RECORDS
        ):
            return 0.0
        counts_P, logs_P, squares_P = sums_P6[:, :3].T
        mean = logs_P.sum() / counts_P.sum()
        total = float(squares_P.sum() - mean * logs_P.sum())
        means = float((counts_P * (logs_P / counts_P - mean) ** 2).sum())
        if total <= _ALIKE * counts_P.sum():
            return 0.0
        count = int(counts_P.sum())
        return max(0.0, 1 - (1 - means / total) * (count - 1) / (count - len(counts_P)))

    @property
    def along(self) -> float:
        """Part of the variance within places that goes by where a record lies: near 1 where each is sorted alike."""
        sums_P6 = self._sums_P6()
        if not len(sums_P6) or sums_P6[:, 0].sum() < _RECORDS:
            return 0.0
        counts_P, logs_P, squares_P, at_P, at_squares_P, products_P = sums_P6.T
        within = float((squares_P - logs_P**2 / counts_P).sum())
        apart = float((at_squares_P - at_P**2 / counts_P).sum())
        together = float((products_P - at_P * logs_P / counts_P).sum())
        return together**2 / (within * apart) if within > _ALIKE * counts_P.sum() else 0.0

    def _sums_P6(self) -> NDArray[np.float64]:
        given = [sums for sums in self._sums.values() if sums[0]]
        return np.array(given) if given else np.empty((0, 6))


def unevenness(
    sizes_U: NDArray[np.int64], rows_U: NDArray[np.int64], first_N: NDArray[np.integer[Any]]
) -> float:
    """Return how many times as long records of some units are as those of others, by the sizes of units alone.

    Args:
        sizes_U: Bytes or tokens of each unit; below 0 where that is not known.
        rows_U: Records of each.
        first_N: Lengths of the first records, which say how far lengths differ anyway.

    Returns:
        A mean of a unit over another's, the largest and the smallest of ten units left out; 1 where units are few,
        where no more than chance has them differ, or where those side by side differ as any others do.

    Source:
        What neighbours differ by, over the variance: von Neumann, "Distribution of the ratio of the mean square
        successive difference to the variance" (1941).
    """
    known_U = (sizes_U > 0) & (rows_U > 0)
    given_N = first_N[first_N > 0]
    if known_U.sum() < _UNITS or len(given_N) < _PLACES:
        return 1.0
    rows_U = rows_U[known_U]
    means_U = sizes_U[known_U] / rows_U
    low = float(np.quantile(means_U, 0.1, method="higher"))
    high = float(np.quantile(means_U, 0.9, method="lower"))
    by_chance = float(given_N.std() / given_N.mean()) / np.sqrt(float(rows_U.mean()))
    if np.log(high / low) <= _CHANCE * by_chance:
        return 1.0
    logs_U = np.log(means_U)
    neighbours = float((np.diff(logs_U) ** 2).mean() / 2)
    return high / low if neighbours < _NEIGHBOURS * float(logs_U.var()) else 1.0


def evenly(count: int, wanted: int) -> NDArray[np.int64]:
    """Return at most ``wanted`` numbers below ``count``, in the middle of equal parts."""
    wanted = min(count, max(1, wanted))
    return (np.arange(wanted) * 2 + 1) * count // (2 * wanted)

"""Differences of lengths between places of a source, and along each place, which show files that are sorted.

Logarithms of lengths are compared, because a single document that is far longer than others does not mean an order.

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
"""Fewest places, and records per place, for a statement about their differences."""
_RECORDS = 32
"""Fewest records for a statement about an order."""
_ALIKE = 0.01
"""Least variance of the logarithm of lengths; below it, all records count as equally long."""
_UNITS = 8
"""Fewest units for a statement about their sizes; with fewer, one long document would decide."""
_CHANCE = 6.0
"""Most standard errors of a unit's mean by which two units differ without any order."""
_NEIGHBOURS = 0.6
"""Largest difference between neighbours, relative to all units, in an ordered source. Without an order the ratio is
about 1, even if rare documents, perhaps none of the first records, make some units long."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Differences:
    """Known differences of lengths between places of a source; all 0 if nothing is known."""

    units: int
    """Number of units."""
    between: float = 0.0
    """Value of ``Spread.between``."""
    along: float = 0.0
    """Value of ``Spread.along``."""
    times: float = 1.0
    """Result of ``unevenness``."""


class Spread:
    """Accumulates lengths place by place, with a few numbers per place."""

    def __init__(self) -> None:
        self._sums: dict[int, NDArray[np.float64]] = {}

    @classmethod
    def of(cls, places: Iterable[NDArray[np.integer[Any]]]) -> Self:
        """Return the spread of lengths of records, given place by place."""
        spread = cls()
        for place, lengths_N in enumerate(places):
            spread.add(place, lengths_N)
        return spread

    def add(self, place: int, lengths_N: NDArray[np.integer[Any]]) -> None:
        """Add lengths of records of a place, in their order there; lengths of 0 are ignored."""
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
        """Share of the variance that lies between places; 0 for few places, or if all lengths are alike.

        The share that chance alone explains is subtracted, such as a third for three records per place.

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
        """Share of the variance within places that depends on a record's place: near 1 if each is sorted alike."""
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
    """Return the ratio of record lengths between the largest and the smallest units, from unit sizes alone.

    Args:
        sizes_U: Bytes or tokens of each unit; below 0 if unknown.
        rows_U: Records of each unit.
        first_N: Lengths of the first records, which show how much lengths differ in general.

    Returns:
        Ratio of two units' means, after the largest and the smallest tenth are left out. It is 1 if there are few
        units, if chance explains the difference, or if neighbours differ as much as any other units.

    Source:
        Differences of neighbours divided by the variance: von Neumann, "Distribution of the ratio of the mean square
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

"""The cost that measured compute times come to: a fit that outliers and slow ranks do not move, or why there is none.

Errors count by their part of the time that was measured. So a step that took a hundred times as long, as a checkpoint
was written in it, pulls no harder than one that took twice as long; and what is far from the median is left out of the
next round of the fit. Ranks differ in speed: of each, the median of its times over the fit is divided out.

Source:
    Rousseeuw and Croux, "Alternatives to the Median Absolute Deviation" (1993), for 1.4826 times that deviation as the
    width of what is normal.

Shape suffixes:
    M  measurements
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from omniload.mix.journal.times import MeasuredTimes
from omniload.plan.cost import QuadraticCost

__all__ = ["FittedCost", "Unfitted", "fitted_cost"]

LEAST_MEASURED = 32
"""Measurements that a fit takes at least."""
_ROUNDS = 16
"""Most rounds of a fit; for times that are near a line it settles after two or three."""
_NORMAL = 4 * 1.4826
"""A time is an outlier beyond this many median deviations; of normal noise, one in fifteen thousand is."""
_LEAST_WIDTH = 0.01
"""Part of the fit up to which a time is always near enough: clocks that repeat exactly have no deviation."""
_NOISE = 0.002
"""Part of a time that is taken for noise at least: exact figures of rows that are all alike tell nothing either."""
_MOST_UNSURE = 0.05
"""Standard error of the share of token pairs that a fit may have."""
_NOTHING = 1e-4
"""Part of the work that is none."""
_DIGITS = 4
"""Digits of a coefficient; further ones are noise, and the printed value can be typed into a mix file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Unfitted:
    """That times come to no cost."""

    why: str
    """What was found, and what would be needed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FittedCost:
    """A cost that was fitted to times."""

    cost: QuadraticCost
    """Seconds of a token and of a token pair, on a rank of middling speed."""
    measured: int
    """Times that were there."""
    used: int
    """Times that were used, without outliers."""
    residual: float
    """Median distance of a used time from the fit, as a part of it."""
    squares_per_token: float
    """Sum of the squared lengths of the documents over their tokens: the length that a token has around it."""
    unsure: float
    """Standard error of ``pair_share``."""

    @property
    def pair_share(self) -> float:
        """Part of the work that token pairs take, by the fit: what the lengths of documents decide."""
        return self.pair_share_by(self.cost.linear, self.cost.quadratic)

    def pair_share_by(self, linear: float, quadratic: float) -> float:
        """Return the part of the same work that token pairs would take by other coefficients.

        Shares are compared, not coefficients: only the quotient of coefficients matters, and it may be infinite.
        """
        pairs = quadratic * self.squares_per_token
        return pairs / (linear + pairs)


def fitted_cost(times: MeasuredTimes) -> FittedCost | Unfitted:
    """Return the cost of a token and of a token pair that times come to.

    Returns:
        The fit, the same for the same times in whatever order; coefficients are at least 0 and not both 0. Or why
        there is none: too few times, documents too alike to tell the two apart, or times that no cost comes to.
    """
    if len(times) < LEAST_MEASURED:
        return Unfitted(
            why=f"{len(times)} times were reported, and a fit takes {LEAST_MEASURED}: report those of each microbatch "
            "by loader.observe(rows, seconds=...)"
        )
    try:
        with np.errstate(over="ignore"):
            return _fit_of_near(times)
    except ValueError as error:
        return Unfitted(
            why=f"{len(times)} times come to no cost ({error}): look at what is given as seconds=..."
        )


def _fit_of_near(times: MeasuredTimes) -> FittedCost | Unfitted:
    """Fit the times that are not far from all others.

    Raises:
        ValueError: No cost above 0 is in the range of floating point.
    """
    # Sorted: sums in floating point depend on the order, and files are read in any.
    order = np.lexsort((times.squares_M, times.tokens_M, times.seconds_M, times.ranks_M))
    ranks_M, seconds_M = times.ranks_M[order], times.seconds_M[order]
    tokens_M, squares_M = times.tokens_M[order], times.squares_M[order]
    near_M, even_M = np.ones(len(order), np.bool_), seconds_M.astype(np.float64)
    for _ in range(_ROUNDS):
        cost = _relative_fit(tokens_M[near_M], squares_M[near_M], even_M[near_M])
        fit_M = cost.linear * tokens_M + cost.quadratic * squares_M
        even_M = _of_even_ranks(ranks_M, seconds_M, fit_M)
        ratio_M = np.log(even_M / fit_M)
        off_M = np.abs(ratio_M - np.median(ratio_M))
        before, near_M = near_M, off_M <= max(_LEAST_WIDTH, _NORMAL * float(np.median(off_M)))
        if np.array_equal(before, near_M):
            break
    tokens_M, squares_M, even_M = tokens_M[near_M], squares_M[near_M], even_M[near_M]
    squares_per_token = float(squares_M.sum() / tokens_M.sum())
    cost = _rounded(_relative_fit(tokens_M, squares_M, even_M), squares_per_token)
    off_M = np.abs(even_M / (cost.linear * tokens_M + cost.quadratic * squares_M) - 1)
    unsure = _unsure(tokens_M / even_M, squares_M / even_M, float(np.sqrt(np.mean(off_M**2))))
    if unsure > _MOST_UNSURE:
        return Unfitted(
            why=f"{len(even_M)} times tell the share of token pairs to {min(unsure, 1):.0%} only, and a fit takes "
            f"{_MOST_UNSURE:.0%}: documents of all microbatches are too alike, or times too noisy; report more of them"
        )
    return FittedCost(
        cost=cost,
        measured=len(order),
        used=len(even_M),
        residual=float(np.median(off_M)),
        squares_per_token=squares_per_token,
        unsure=unsure,
    )


def _relative_fit(
    tokens_M: NDArray[np.float64], squares_M: NDArray[np.float64], seconds_M: NDArray[np.float64]
) -> QuadraticCost:
    """Return the coefficients of least squared errors, each as a part of its time."""
    return QuadraticCost.fit(tokens_M / seconds_M, squares_M / seconds_M, np.ones(len(seconds_M)))


def _of_even_ranks(
    ranks_M: NDArray[np.int64], seconds_M: NDArray[np.float64], fit_M: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Return the times scaled to the speed of the median rank."""
    _, rank_M = np.unique(ranks_M, return_inverse=True)
    ratio_M = seconds_M / fit_M
    slow_R = np.array([np.median(ratio_M[rank_M == rank]) for rank in range(rank_M.max() + 1)])
    even_M: NDArray[np.float64] = seconds_M * (np.median(slow_R) / slow_R[rank_M])
    return even_M


def _unsure(tokens_M: NDArray[np.float64], squares_M: NDArray[np.float64], noise: float) -> float:
    """Return the standard error of the share of token pairs, for a fit of ones by two columns with mean 1."""
    columns_M2 = np.stack((tokens_M / tokens_M.mean(), squares_M / squares_M.mean()), axis=1)
    ((a, b), (_, d)) = (columns_M2.T @ columns_M2).tolist()
    # The variance of the second coefficient: noise squared times an element of the inverse.
    determinant = a * d - b * b
    if determinant <= a * d * 1e-12:
        return float("inf")
    return float(max(noise, _NOISE) * np.sqrt(a / determinant))


def _rounded(cost: QuadraticCost, squares_per_token: float) -> QuadraticCost:
    """Return a cost in a few digits, without a coefficient that takes next to nothing of the work."""
    parts = cost.linear, cost.quadratic * squares_per_token
    linear, quadratic = (
        float(f"{coefficient:.{_DIGITS}g}") if part > sum(parts) * _NOTHING else 0.0
        for coefficient, part in zip((cost.linear, cost.quadratic), parts, strict=True)
    )
    return QuadraticCost(linear, quadratic)

"""The cost of training on a sample, from its metadata alone.

Attention is quadratic within a document and everything else is linear, so two rows of
the same number of tokens can differ several times in work.

Shape suffixes:
    N  samples or pieces      P  pieces, grouped by row      R  rows      M  measurements
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, Self

import numpy as np
from numpy.typing import NDArray

__all__ = [
    "CostFunction",
    "QuadraticCost",
    "combined_cost",
    "require_costs",
    "row_costs",
]


class CostFunction(Protocol):
    """A cost of every sample, from one or several columns of metadata.

    Any function of arrays will do: ``lambda lengths_N, patches_N: lengths_N + 4.0 * patches_N``. If a mix file names
    the function and it reads more than the lengths, its attribute ``of`` lists the columns.
    """

    def __call__(self, *columns_N: NDArray[Any]) -> NDArray[np.float64]:
        """Return the cost of each sample, ``[N]``; finite and at least 0."""
        ...


@dataclass(frozen=True, slots=True)
class QuadraticCost:
    """Cost ``linear * L + quadratic * L ** 2`` of a document of ``L`` tokens.

    Only the quotient of the two matters for balance. For a dense transformer it is about six times the hidden width.
    For a mixture of experts, count only the active part.
    """

    linear: float
    """Cost of a token."""
    quadratic: float
    """Cost of a pair of tokens."""

    def __post_init__(self) -> None:
        for name in ("linear", "quadratic"):
            value = getattr(self, name)
            if not 0 <= value < float("inf"):
                raise ValueError(f"{name} is {value}; a cost is finite and at least 0")
        if self.linear == 0 and self.quadratic == 0:
            raise ValueError("linear and quadratic are both 0; give a cost to balance")

    @classmethod
    def fit(cls, tokens_M: NDArray[Any], squares_M: NDArray[Any], seconds_M: NDArray[Any]) -> Self:
        """Fit a cost to measured times, by least squares with coefficients of at least 0.

        There is no constant term. A fixed time in every measurement does not change the best dealing of rows, but it
        does bias this fit. Subtract it if you know it.

        Args:
            tokens_M: Tokens of each measurement (of a step or microbatch of one rank).
            squares_M: Sum of the squared lengths of its documents.
            seconds_M: Time of each measurement.

        Returns:
            The cost in seconds.

        Raises:
            ValueError: There are fewer than two measurements, their columns differ in length or are not finite, or no
                coefficient above 0 fits them.
        """
        columns = [np.asarray(column, np.float64) for column in (tokens_M, squares_M, seconds_M)]
        counts = [len(column) for column in columns]
        if len(set(counts)) != 1 or counts[0] < 2:
            raise ValueError(
                f"measurements have {counts} tokens, squares and seconds; give each at least two"
            )
        if not all(np.isfinite(column).all() for column in columns):
            raise ValueError("measurements hold values that are not finite; leave those steps out")
        features_M2, seconds = np.stack(columns[:2], axis=1), columns[2]
        # Squares are thousands of times larger than tokens: unscaled, the system is near singular.
        scales = np.linalg.norm(features_M2, axis=0)
        scaled_M2 = features_M2 / np.where(scales > 0, scales, 1.0)
        both, _, rank, _ = np.linalg.lstsq(scaled_M2, seconds, rcond=None)
        # A system of one rank has many answers, and a cost below 0 is none: either way one column says it alone.
        if rank < 2 or both.min() < 0:
            both = _one_coefficient(scaled_M2, seconds)
        linear, quadratic = (both / np.where(scales > 0, scales, 1.0)).tolist()
        if linear == 0 and quadratic == 0:
            raise ValueError(
                f"seconds sum to {seconds.sum()}; no cost above 0 fits them, measure again"
            )
        return cls(linear, quadratic)

    def __call__(self, *columns_N: NDArray[Any]) -> NDArray[np.float64]:
        """Return the cost of each sample, ``[N]``, from the one column of lengths in tokens."""
        (lengths_N,) = columns_N
        # In floating point before the product: the square of an int32 length overflows at 46,341.
        tokens_N = np.asarray(lengths_N, np.float64)
        return tokens_N * (self.linear + self.quadratic * tokens_N)


def row_costs(cost_P: NDArray[np.floating[Any]], row_offsets: NDArray[Any]) -> NDArray[np.float64]:
    """Sum the cost of the pieces of every row.

    Args:
        cost_P: Cost of each piece.
        row_offsets: Boundaries of the rows in the pieces, ``[R + 1]``, from 0 to ``P``.

    Returns:
        Cost of each row, ``[R]``; 0 for a row without pieces.

    Raises:
        ValueError: The boundaries fall, or do not run from 0 to ``P``.
    """
    offsets = np.asarray(row_offsets, np.int64)
    if len(offsets) == 0 or offsets[0] != 0 or offsets[-1] != len(cost_P):
        ends = (int(offsets[0]), int(offsets[-1])) if len(offsets) else ()
        raise ValueError(
            f"row_offsets runs over {ends} for {len(cost_P)} pieces; it goes from 0 to their number"
        )
    counts_R = offsets[1:] - offsets[:-1]
    if counts_R.min(initial=0) < 0:
        at = int(np.argmin(counts_R))
        raise ValueError(
            f"row_offsets falls from {offsets[at]} to {offsets[at + 1]} at row {at}; it never falls"
        )
    out_R = np.zeros(len(counts_R), np.float64)
    # reduceat gives an empty slice its first element, so rows without pieces are left out of it.
    filled_R = counts_R > 0
    if filled_R.any():
        out_R[filled_R] = np.add.reduceat(np.asarray(cost_P, np.float64), offsets[:-1][filled_R])
    return out_R


def require_costs(
    function: CostFunction, columns: Mapping[str, NDArray[Any]], of: Sequence[str], module: str
) -> NDArray[np.float64]:
    """Return the cost of each sample or piece for one module of the model, once it is seen to be one.

    Args:
        function: The cost.
        columns: Metadata by name, ``lengths`` always.
        of: Columns that the function is called with, in order.
        module: Name of the module, for messages.

    Raises:
        ValueError: A column is missing, or a cost is not finite and at least 0.
    """
    if missing := [name for name in of if name not in columns]:
        raise ValueError(f"columns {missing} are not among {sorted(columns)}; load them")
    # A user's function may return any numeric type, but one value per piece, or later sums would mix up pieces.
    values = np.asarray(function(*(columns[name] for name in of)), np.float64)
    if values.shape != columns["lengths"].shape:
        raise ValueError(
            f"cost of {module!r} has shape {values.shape} for {len(columns['lengths'])} "
            "samples or pieces; return one for each"
        )
    wrong = ~(values >= 0) | ~np.isfinite(values)
    if wrong.any():
        at = int(np.argmax(wrong))
        raise ValueError(
            f"cost of {module!r} at {at} is {values[at]}; a cost is finite and at least 0"
        )
    return values


def combined_cost(costs: Mapping[str, NDArray[np.float64]]) -> NDArray[np.float64]:
    """Return the one module's cost, ``[N]``, or the sum of all, each over its mean."""
    if len(costs) == 1:
        return next(iter(costs.values()))
    # Costs of two modules need not have one unit: over its mean, none drowns the other.
    parts = [c / c.mean() for c in costs.values() if len(c) and c.mean() > 0]
    return np.sum(parts, axis=0) if parts else np.zeros(len(next(iter(costs.values()))))


def _one_coefficient(
    scaled_M2: NDArray[np.float64], seconds_M: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Return the better of the fits with one coefficient alone; the other is 0.

    With two unknowns the constrained optimum lies on an axis whenever the free one
    is outside the quadrant, so this is exact. Ties go to the linear term.
    """
    # Columns have the norm 1, so that a product with them is the fit by one alone.
    alone = np.maximum(scaled_M2.T @ seconds_M, 0.0)
    residuals = [float(np.sum((scaled_M2[:, i] * alone[i] - seconds_M) ** 2)) for i in (0, 1)]
    best = 0 if residuals[0] <= residuals[1] else 1
    out = np.zeros(2)
    out[best] = alone[best]
    return out

"""The message to a data constructor in one call, as bytes, because a planner sends hundreds of them each step.

Arrays travel as their bytes. Pickled as arrays, an order would take five times as long, half of the time of Ray's own
call.
"""

import pickle
from collections.abc import Sequence
from dataclasses import dataclass, fields
from operator import attrgetter
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from omniload.mix.pieces import PieceTable
from omniload.plan.records import StepPlan
from omniload.plan.world import Edition, RanksServed

__all__ = ["BuildOrder"]

_Array: TypeAlias = tuple[str, tuple[int, ...], bytes]
"""Type, shape and content, in C order."""
_ARRAYS = ("row_offsets", "dp_ranks_R", "microbatches_R")
"""Arrays of every plan in addition to its pieces."""
_OTHERS = tuple(f.name for f in fields(StepPlan) if f.name not in ("pieces", *_ARRAYS))
_arrays_of, _others_of = attrgetter("pieces.columns_CP", *_ARRAYS), attrgetter(*_OTHERS)
_served_of = attrgetter("dp_ranks", "generation", "step")
_edition_of = attrgetter("life", "turn", "since")


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildOrder:
    """Plans to build, their ranks, the steps to release, and a question for reports."""

    plans: Sequence[StepPlan]
    served: RanksServed
    released_to: int
    heard: int | None
    """Number of reports that were heard; ``None`` to ask for none."""

    def packed(self) -> bytes:
        """Return the order as bytes; Ray would take twice as long for each of its values."""
        plans = [(_others_of(plan), [*map(_flat, _arrays_of(plan))]) for plan in self.plans]
        served = _served_of(self.served), _edition_of(self.served.edition)
        return pickle.dumps((plans, served, self.released_to, self.heard), protocol=5)

    @staticmethod
    def unpacked(packed: bytes) -> "BuildOrder":
        """Return the order that another process packed, as Ray does with its own arguments; arrays are read-only."""
        content = pickle.loads(packed)  # noqa: S301 -- it came as an argument of an actor, which Ray unpickles as well
        plans, ((dp_ranks, generation, step), (life, turn, since)), released_to, heard = content
        edition = Edition(life=life, turn=turn, since=since)
        return BuildOrder(
            plans=[_plan_of(*plan) for plan in plans],
            served=RanksServed(
                dp_ranks=dp_ranks, generation=generation, step=step, edition=edition
            ),
            released_to=released_to,
            heard=heard,
        )


def _flat(array: NDArray[Any]) -> _Array:
    return array.dtype.str, array.shape, array.tobytes()


def _plan_of(others: Sequence[Any], arrays: Sequence[_Array]) -> StepPlan:
    columns, *found = (np.ndarray(shape, dtype, content) for dtype, shape, content in arrays)
    columns_of: dict[str, Any] = dict(zip((*_ARRAYS, *_OTHERS), (*found, *others), strict=True))
    return StepPlan(pieces=PieceTable(columns), **columns_of)

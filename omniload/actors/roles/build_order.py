"""What a data constructor is told and asked in one call, as bytes: a planner sends hundreds of them a step.

Arrays travel as their bytes: pickled as arrays, an order takes five times as long, half as long as Ray's own call.
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
"""Columns that every plan has, beside its pieces."""
_OTHERS = tuple(f.name for f in fields(StepPlan) if f.name not in ("pieces", *_ARRAYS))
_arrays_of, _others_of = attrgetter("pieces.columns_CP", *_ARRAYS), attrgetter(*_OTHERS)
_served_of = attrgetter("dp_ranks", "generation", "step")
_edition_of = attrgetter("life", "turn", "since")


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildOrder:
    """Plans to build, for whom, what may be let go, and what is asked."""

    plans: Sequence[StepPlan]
    served: RanksServed
    released_to: int
    heard: int | None
    """Words of its ranks that were heard, where more are asked for."""

    def packed(self) -> bytes:
        """Return it as bytes: Ray takes twice as long over each of its values."""
        plans = [(_others_of(plan), [*map(_flat, _arrays_of(plan))]) for plan in self.plans]
        served = _served_of(self.served), _edition_of(self.served.edition)
        return pickle.dumps((plans, served, self.released_to, self.heard), protocol=5)

    @staticmethod
    def unpacked(packed: bytes) -> "BuildOrder":
        """Return what was packed in the process that sent it, as Ray's own arguments are; no array can be written."""
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

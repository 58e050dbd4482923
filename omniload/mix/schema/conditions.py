"""What a mix file says of which records of a source are drawn: conditions on their columns."""

from typing import Annotated, Self

from pydantic import (
    AfterValidator,
    Field,
    StrictBool,
    StrictFloat,
    StrictInt,
    StrictStr,
    model_validator,
)

from omniload.base.config import StrictModel, fault_at

__all__ = ["Between", "Condition", "Value", "Where", "kind_of"]

_MOST = 1e300
Number = Annotated[float, Field(ge=-_MOST, le=_MOST, allow_inf_nan=False)]
# Strict: else pydantic would take a truth for a number, and a number for a text.
Value = (
    StrictBool
    | Annotated[StrictInt, Field(ge=-(1 << 63), lt=1 << 63)]
    | Annotated[StrictFloat, Field(ge=-_MOST, le=_MOST, allow_inf_nan=False)]
    | StrictStr
)


class Between(StrictModel):
    """A range of numbers."""

    at_least: Number | None = None
    """Smaller values are left out."""
    at_most: Number | None = None
    """Larger values are left out."""

    @model_validator(mode="after")
    def _some_limit(self) -> Self:
        if self.at_least is None and self.at_most is None:
            raise fault_at("neither at_least nor at_most is given; give one", "at_least")
        if None not in (self.at_least, self.at_most) and self.at_least > self.at_most:  # type: ignore[operator]
            raise fault_at(
                f"at_least is {self.at_least:g}, more than at_most {self.at_most:g}; no value lies between",
                "at_least",
            )
        return self


def kind_of(value: object) -> str | None:
    """Return whether a value is a ``text``, a ``number`` or a ``truth``; ``None`` where it is none of them."""
    # First: to Python a truth is a number.
    if isinstance(value, bool):
        return "truth"
    return (
        "text" if isinstance(value, str) else "number" if isinstance(value, int | float) else None
    )


def _of_one_kind(values: tuple[Value, ...]) -> tuple[Value, ...]:
    # One kind: a column is compared in its own type, and has no value of another.
    if len({kind_of(value) for value in values}) > 1:
        raise fault_at(
            f"the values {list(values)!r:.60} are of several kinds; give texts, numbers or truths alone"
        )
    return values


Condition = (
    Value
    | Between
    | Annotated[tuple[Value, ...], Field(min_length=1), AfterValidator(_of_one_kind)]
)
"""A value, one of several, or a range."""
Where = dict[Annotated[str, Field(min_length=1)], Condition]
"""Conditions by column or key; a record is drawn where all of them hold."""

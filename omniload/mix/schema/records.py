"""What a mix file says of the records of a source of any type: which are drawn, their order, the bad ones."""

import re
from decimal import Decimal
from typing import Annotated, Literal, Self, TypeAlias

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    StrictBool,
    StrictFloat,
    StrictInt,
    StrictStr,
    model_validator,
)

from omniload.base.config import StrictModel, fault_at
from omniload.base.errors import IntegrityError
from omniload.base.units import parse_count

__all__ = [
    "MOST_BLOCK_UNITS",
    "Between",
    "Condition",
    "Dedupe",
    "OnError",
    "Overlong",
    "ShuffleConfig",
    "Value",
    "Where",
    "kind_of",
    "parse_count_or_percentage",
]

Dedupe: TypeAlias = Literal["content", "key"]
"""What records are compared by."""
Overlong: TypeAlias = Literal["split", "truncate", "drop", "refuse"]
"""What becomes of a document that is longer than a row: cut into pieces, cut off, left out and counted, or the run
ends."""

MOST_BLOCK_UNITS = 4_096
"""Units of a block at most."""


_MOST_RECORDS = 10**12
# No longer than a share of the most records needs: a number of a million digits takes long to work out.
_PERCENTAGE = re.compile(r"\s*([0-9]{1,3}(?:\.[0-9]{1,15})?)\s*%\s*")


def parse_count_or_percentage(value: object) -> object:
    """Read a count of records, or leave a percentage such as ``0.1%`` as it is written.

    Raises:
        ValueError: It is neither, is negative, or is more than all.
    """
    if isinstance(value, str) and (said := _PERCENTAGE.fullmatch(value)):
        if Decimal(said[1]) > 100:
            raise ValueError(f"{value!r} is more than all records; write at most 100%")
        return f"{said[1]}%"
    counted = parse_count(value)
    if isinstance(counted, float) and counted.is_integer():
        counted = int(counted)  # 1e3, as YAML reads it
    if isinstance(counted, bool) or not isinstance(counted, int):
        raise ValueError(  # noqa: TRY004 -- pydantic tells of these with their line
            f"{value!r:.60} is neither a count nor a percentage such as 0.1%"
        )
    if not 0 <= counted <= _MOST_RECORDS:
        raise ValueError(f"{value!r:.60} is not among 0 to 10^12 records")
    return counted


class OnError(StrictModel):
    """What to do with a record that cannot be decoded."""

    policy: Literal["raise", "skip"] = "raise"
    """``raise`` stops the run at the first bad record. ``skip`` counts the record and continues."""
    limit: Annotated[
        int | str,
        BeforeValidator(
            parse_count_or_percentage,
            json_schema_input_type=Annotated[int, Field(ge=0, le=_MOST_RECORDS)] | str,
        ),
    ] = 100
    """With ``skip``: the largest number of bad records of a source. The run ends before the step that would exceed it.
    Each bad record counts once, whatever the number of epochs. A percentage, such as ``0.1%``, is of all records of the
    source, rounded down."""

    def most_of(self, records: int) -> int:
        """Return how many of the ``records`` of a source may be bad."""
        if isinstance(self.limit, int):
            return self.limit
        # Decimal: 0.1% of 1,000 is one record, and as a float it could be none.
        return int(Decimal(self.limit.removesuffix("%")) * records / 100)

    def said_of(self, records: int) -> str:
        """Say the limit, and of a percentage what it is of a source of so many records."""
        if isinstance(self.limit, int):
            return str(self.limit)
        return f"{self.limit} ({self.most_of(records):,} of {records:,} records)"

    def excess(self, name: str, records: int, reason: str, place: str = "") -> IntegrityError:
        """Return what ends a run that would go past more bad records of a source than it may have.

        Args:
            name: Of the source.
            records: How many it holds.
            reason: What is wrong with one of the bad ones; how many of those are known hangs on what was read ahead.
            place: File and number of the one that is one too many, where that is known.
        """
        last, count = f", the last of them {place}" if place else "", self.most_of(records) + 1
        return IntegrityError(
            f"sources.{name}: {count:,} record{'s' * (count > 1)} could not be decoded, more than on_error.limit "
            f"{self.said_of(records)}{last}; what is wrong with one that was found: {reason}; mend the files or raise "
            "the limit"
        )


class ShuffleConfig(StrictModel):
    """How far the order of a source departs from the order of its files."""

    method: Literal["none", "shards", "block", "units", "full"] = "block"
    """``none``: as stored. ``shards``: shards are permuted. ``block``: shards are permuted, then the rows inside each
    block. ``units``: the units of all shards are permuted, then the rows inside each block. Compressed JSON lines need
    a place to enter the shard at most 64 MiB before each unit. ``full``: all rows are permuted. The source may have at
    most 4,096 units and is decoded whole when the run begins."""
    block_units: int = Field(default=4, ge=1, le=MOST_BLOCK_UNITS)
    """Units (row groups, file ranges) whose rows are permuted together. These units are held decoded: in
    ``loader.memory``, and on the node's disk if they do not fit."""

    def units_together(self, units: int) -> int:
        """Return how many of the ``units`` of a source are decoded together at most."""
        of_blocks = {"block": self.block_units, "units": self.block_units, "full": max(1, units)}
        return of_blocks.get(self.method, 1)


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

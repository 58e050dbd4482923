"""What a mix file says of the records of a source of any type: which are drawn, their order, the bad ones."""

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from decimal import Decimal
from typing import Annotated, Any, Literal, Self, TypeAlias, cast, get_args

import numpy as np
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
from pydantic_core import PydanticCustomError

from omniload.base.config import StrictModel, fault_at
from omniload.base.errors import IntegrityError
from omniload.base.units import parse_count
from omniload.mix.columns import (
    LONGEST_TAG,
    ColumnName,
    OwnDtype,
    TableColumn,
    TagDtype,
    TagValue,
    WholeColumn,
    name_inside,
    tag_inside,
)

__all__ = [
    "MOST_BLOCK_UNITS",
    "Between",
    "ColumnLabel",
    "Condition",
    "Dedupe",
    "NamesColumns",
    "OnError",
    "Overlong",
    "OwnColumn",
    "ShuffleConfig",
    "Value",
    "Where",
    "faults_of_columns",
    "kind_of",
    "parse_count_or_percentage",
    "require_columns",
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
    """What happens to a record that cannot be decoded."""

    policy: Literal["raise", "skip"] = "raise"
    """``raise`` stops the run at the first one; ``skip`` counts it and goes on."""
    limit: Annotated[
        int | str,
        BeforeValidator(
            parse_count_or_percentage,
            json_schema_input_type=Annotated[int, Field(ge=0, le=_MOST_RECORDS)] | str,
        ),
    ] = 100
    """With ``skip``: the run ends before the step that would go past more bad records of a source than this. Each
    counts once, however many epochs there are. A percentage, such as ``0.1%``, is of all records that the source
    holds, rounded down."""

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
    """``none``: as stored. ``shards``: shards permuted. ``block``: shards permuted, then rows inside a block.
    ``units``: units of all shards permuted, then rows inside a block; of compressed JSON lines where a shard can be
    entered at most 64 MiB before each.
    ``full``: all rows permuted, of a source of at most 4,096 units, which is decoded whole before its first sample."""
    block_units: int = Field(default=4, ge=1, le=MOST_BLOCK_UNITS)
    """Units (row groups, file ranges) whose rows are permuted together; they are held decoded, on the node's disk what
    is over ``loader.memory``."""

    def units_together(self, units: int) -> int:
        """Return how many of the ``units`` of a source are decoded together at most."""
        of_blocks = {"block": self.block_units, "units": self.block_units, "full": max(1, units)}
        return of_blocks.get(self.method, 1)


_Whole = Annotated[StrictInt, Field(ge=-(1 << 63), lt=1 << 63)]
_Real = Annotated[StrictFloat, Field(ge=-1e308, le=1e308, allow_inf_nan=False)]


class OwnColumn(StrictModel):
    """A column of yours: a value for each token, cut, packed and padded as tokens are, or one for a whole record."""

    column: str = Field(min_length=1)
    """Column of the file, of ``jsonl`` the key: a list of numbers or of booleans, one for each token, and a record with
    more or fewer is bad; ``of: samples`` one text, number or boolean."""
    dtype: OwnDtype | Literal["text"] = "float32"
    """Type that batches bring it in; a value that it does not hold makes its record a bad one. Of ``samples`` one of
    ``text`` (4,096 bytes of UTF-8 at most), ``bool``, ``int64``, ``float32``, ``float64``."""
    of: Literal["tokens", "labels", "samples"] = "tokens"
    """Where a value stands in a batch: at its token, or, of ``labels``, where its token is the label: one to the left,
    also where a row cuts the document. Weights of a loss are of labels. Of ``samples`` it is the value of the whole
    record, and with each piece of it."""
    default: StrictBool | _Whole | _Real | StrictStr | None = None
    """Value of every token, or sample, of a source without this column; left out, all sources must have it. Of
    ``samples`` also of a record where it is null, or a line without the key; left out, that is a bad record."""

    @model_validator(mode="after")
    def _default_fits(self) -> Self:
        whole = get_args(TagDtype)
        if self.is_tag and self.dtype not in whole:
            raise fault_at(
                f"dtype is {self.dtype}, and a value of whole samples is one of {', '.join(whole)}",
                "dtype",
            )
        if not self.is_tag and self.dtype == "text":
            raise fault_at("dtype is text, of which no token has one; say of: samples", "dtype")
        if self.default is not None and not _holds_value(self.dtype, self.default):
            raise fault_at(
                f"default is {self.default!r:.60}, which {self.dtype} does not hold; give another, or another dtype",
                "default",
            )
        return self

    @property
    def is_tag(self) -> bool:
        """Whether it has one value for a whole sample."""
        return self.of == "samples"

    def inside(self, name: str) -> str:
        """Return what the column is called between the parts of a data plane, where a source calls it ``name``."""
        if self.is_tag:
            return tag_inside(name, cast("TagDtype", self.dtype), self.default)
        dtype, default = cast("OwnDtype", self.dtype), cast("float | None", self.default)
        return name_inside(name, dtype, default, of_labels=self.of == "labels")


ColumnLabel: TypeAlias = Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]{0,63}$")]
Columns: TypeAlias = Mapping[str, str | OwnColumn]
_FOR_TABLES = frozenset(get_args(TableColumn))
_TAKEN = frozenset(
    {
        *(*get_args(ColumnName), "tokens", "labels", "images", "input_ids", "attention_mask"),
        *("position_ids", "cu_seqlens", "source_ids", "padding_mask", "pairs", "use_cache"),
    }
)
"""What batches, and the inputs of models, have by these names already."""


def require_columns(columns: Columns, *, holds_text: bool) -> None:
    """Refuse columns that are written as those of another kind, or that have a value for each token of a text.

    Raises:
        PydanticCustomError: Says which.
    """
    for name, said in columns.items():
        own = isinstance(said, OwnColumn)
        is_tag = isinstance(said, OwnColumn) and said.is_tag
        if isinstance(said, OwnColumn) and name in _TAKEN:
            raise fault_at(
                f"columns.{name} is a column of yours by a name that is taken; "
                + (f"write {name}: {said.column}" if name in _FOR_TABLES else "give it another"),
                *("columns", name),
            )
        if not own and name not in _FOR_TABLES:
            raise fault_at(
                f"columns.{name} is none of {', '.join(sorted(_FOR_TABLES))}; of a column of yours, a value for each "
                f"token, write {name}: {{column: {said}, dtype: float32}}",
                *("columns", name),
            )
        if holds_text and not is_tag and (own or name == "loss_mask"):
            raise fault_at(
                f"columns.{name} has a value for each token and the source holds text; name its column of token ids "
                f"under tokens, {'say of: samples, ' if own else ''}or leave the {'column' if own else 'mask'} out",
                *("columns", name),
            )


class NamesColumns(StrictModel):
    """What names further columns of its records under ``columns``, where it has any."""

    @property
    def _named(self) -> Columns:
        return getattr(self, "columns", {})

    @property
    def own_columns(self) -> dict[str, OwnColumn]:
        """Columns of yours by name, each with a value for each token, or for each sample."""
        return {name: said for name, said in self._named.items() if isinstance(said, OwnColumn)}

    @property
    def columns_read(self) -> dict[str, str]:
        """The column of the file of each further column, by its name between the parts of a data plane."""
        return {
            name if isinstance(said, str) else said.inside(name): said
            if isinstance(said, str)
            else said.column
            for name, said in self._named.items()
        }

    def using(self, columns: Collection[str]) -> Self:
        """Return the source without further columns that are not among ``columns``, as known inside: not read."""
        inside = zip(self._named.items(), self.columns_read, strict=True)
        kept = {name: said for (name, said), each in inside if each in columns}
        return self if len(kept) == len(self._named) else self.model_copy(update={"columns": kept})


def faults_of_columns(
    sources: Mapping[str, Any], wanted: Sequence[str]
) -> Iterator[PydanticCustomError]:
    """Yield what is wrong with the columns that batches bring: of one name and two kinds, or of some sources alone.

    Args:
        sources: Sources of the mix by name.
        wanted: ``batch.columns``.
    """
    for i, name in enumerate(wanted):
        if name in get_args(WholeColumn):
            continue
        having = {
            s: each.own_columns[name] for s, each in sources.items() if name in each.own_columns
        }
        if not having:
            own = sorted({each for source in sources.values() for each in source.own_columns})
            yield fault_at(
                f"batch.columns[{i}] is {name!r}, which no source has under columns; there are "
                f"{', '.join((*get_args(WholeColumn), *own))}",
                *("batch", "columns", i),
            )
            continue
        first, column = next(iter(having.items()))
        for source, other in having.items():
            if other.inside(name) != column.inside(name):
                yield fault_at(
                    f"is {_said(other)}, and of {first!r} {_said(column)}; say the same of both",
                    *("sources", source, "columns", name),
                )
        lacking = [source for source in sources if source not in having]
        if lacking and column.default is None:
            more = f" and {len(lacking) - 1:,} more" if len(lacking) > 1 else ""
            yield fault_at(
                f"batch.columns[{i}] is {name!r}, which {lacking[0]!r}{more} of the sources lack, and no default is "
                f"given; say columns.{name}.default of {first!r}, or give every source the column",
                *("batch", "columns", i),
            )


def _said(column: OwnColumn) -> str:
    return f"{column.dtype} of {column.of}, default {column.default}"


def _holds_value(dtype: str, value: TagValue) -> bool:
    if dtype != "text" and not isinstance(value, str):
        return _holds(np.dtype(dtype), value)
    # Half a surrogate pair is no UTF-8, and left out.
    held = value.encode(errors="ignore") if isinstance(value, str) and dtype == "text" else None
    return held is not None and len(held) <= LONGEST_TAG and held.decode() == value


def _holds(dtype: np.dtype[Any], value: float) -> bool:
    if dtype.kind == "b" or isinstance(value, bool):
        return dtype.kind == "b" and value in {0, 1}
    if dtype.kind == "f":
        # NaN compares with nothing: it is held by none.
        return abs(value) <= float(np.finfo(dtype).max)
    limits = np.iinfo(dtype)
    return (
        value == int(value) and limits.min <= value <= limits.max if abs(value) < _MOST else False
    )


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

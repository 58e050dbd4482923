"""Columns that a source names: those of a user's own, with a value for each token or record, and known ones."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal, Self, TypeAlias, cast, get_args

import numpy as np
from pydantic import Field, StrictBool, StrictFloat, StrictInt, StrictStr, model_validator
from pydantic_core import PydanticCustomError

from omniload.base.config import StrictModel, fault_at
from omniload.mix.columns import (
    LABELS,
    LONGEST_TAG,
    LOSS_MASK,
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
    "ColumnLabel",
    "NamesColumns",
    "OwnColumn",
    "OwnColumns",
    "faults_of_columns",
    "none_named",
    "require_columns",
]

_Whole = Annotated[StrictInt, Field(ge=-(1 << 63), lt=1 << 63)]
_Real = Annotated[StrictFloat, Field(ge=-1e308, le=1e308, allow_inf_nan=False)]


class OwnColumn(StrictModel):
    """Your own column: a value for each token, cut, packed and padded like the tokens, or a value for each record."""

    column: str = Field(min_length=1)
    """Column of the file, or key of ``jsonl``: a list of numbers or booleans, one for each token. A record with more or
    fewer is bad. With ``of: samples``, one text, number or boolean. For ``webdataset``, a key of the JSON object, a
    member by its extension (``.cls``), or ``__key__``. For ``numpy``, a file next to that of the tokens
    (``"*.weights.npy"``)."""
    dtype: OwnDtype | Literal["text"] = "float32"
    """Type of the column in batches; a value that does not fit makes its record a bad one. With ``of: samples``, one of
    ``text`` (at most 4,096 bytes of UTF-8), ``bool``, ``int64``, ``float32``, ``float64``."""
    of: Literal["tokens", "labels", "samples"] = "tokens"
    """Where a value stands in a batch. ``tokens``: at its token. ``labels``: where its token is the label, one place to
    the left, even if a row cuts the document there; use it for loss weights. ``samples``: one value for the whole
    record, which every piece of the record carries."""
    default: StrictBool | _Whole | _Real | StrictStr | None = None
    """Value for every token, or sample, of a source without this column. Without a default, all sources must have the
    column. With ``of: samples``, also the value of a record that lacks it: a null, a line without the key, an empty
    field of ``csv`` that is not a text, or a sample of ``webdataset`` without the member. Without a default, such a
    record is bad."""

    @model_validator(mode="after")
    def _default_fits(self) -> Self:
        whole = get_args(TagDtype)
        if self.is_tag and self.dtype not in whole:
            raise fault_at(
                f"dtype is {self.dtype}, and a value of whole samples is one of {', '.join(whole)}",
                "dtype",
            )
        if not self.is_tag and self.dtype == "text":
            raise fault_at(
                "dtype is text, which a single token cannot have; say of: samples", "dtype"
            )
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
_MOST = 1e300
OwnColumns: TypeAlias = dict[ColumnLabel, OwnColumn]
_FOR_TABLES = frozenset(get_args(TableColumn))
_TAKEN = frozenset(
    {
        *(*get_args(ColumnName), "tokens", "labels", "images", "input_ids", "attention_mask"),
        *("position_ids", "cu_seqlens", "source_ids", "padding_mask", "pairs", "use_cache"),
    }
)
"""What batches, and the inputs of models, have by these names already."""


def none_named(columns: Mapping[str, object]) -> bool:
    """Whether a source names no column: it is written, and digested, as by releases that knew none."""
    return not columns


def require_columns(columns: Columns, *, holds_text: bool, may_hold_tokens: bool = True) -> None:
    """Refuse columns that are written as those of another kind, or that have a value for each token of a text.

    Args:
        columns: What the source names.
        holds_text: Whether its records are text.
        may_hold_tokens: Whether those of another source of its type may be token ids.

    Raises:
        PydanticCustomError: Says which.
    """
    for name, said in columns.items():
        own = isinstance(said, OwnColumn)
        is_tag = isinstance(said, OwnColumn) and said.is_tag
        if isinstance(said, OwnColumn) and name in _TAKEN:
            raise fault_at(
                f"columns.{name} is your own column, but its name is taken; "
                + (
                    f"of a table write {name}: {said.column}, else give it another"
                    if name in _FOR_TABLES
                    else "give it another"
                ),
                *("columns", name),
            )
        if not own and name not in _FOR_TABLES:
            raise fault_at(
                f"columns.{name} is none of {', '.join(sorted(_FOR_TABLES))}; for your own column with a value for "
                f"each token, write {name}: {{column: {said}, dtype: float32}}",
                *("columns", name),
            )
        if name == LABELS and LOSS_MASK in columns:
            raise fault_at(
                f"columns.{name} and columns.{LOSS_MASK} both say which tokens are trained on; name one of them",
                *("columns", name),
            )
        if holds_text and not is_tag and (own or name in {LOSS_MASK, LABELS}):
            ids = (
                "name its column of token ids under tokens"
                if may_hold_tokens
                else "write token ids to a source of type parquet, arrow, lance, jsonl, mds or numpy"
            )
            raise fault_at(
                f"columns.{name} has a value for each token and the source holds text; {ids}, "
                f"{'say of: samples, ' if own else ''}or leave the {'column' if own else 'mask'} out",
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
        # Labels become the mask.
        kept = {
            name: said
            for (name, said), each in inside
            if (LOSS_MASK if each == LABELS else each) in columns
        }
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

"""Columns of a sample: ``tokens``, which is always there, and further columns.

An *aligned* column has one value for each token and is cut where the tokens are cut. A *whole* column belongs to the
sample: its values stay with the piece that holds the sample's first token. A *tag*, which is a custom column, belongs
to the sample too, and every piece of the sample has it.

Shape suffixes:
    N  samples, or ranges of them        K  pieces        V  values of all samples together
"""

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from types import MappingProxyType
from typing import Any, Literal, Self, TypeAlias, get_args

import numpy as np
from numpy.typing import NDArray

from omniload.base.ragged import Ragged, Ranges, offsets_of

__all__ = [
    "ALWAYS_USED",
    "COLUMNS",
    "DOCUMENT_STARTS",
    "GRIDS",
    "IGNORE_LABEL",
    "IMAGES",
    "IMAGE_COLUMNS",
    "IMAGE_PLACES",
    "IMAGE_SPANS",
    "LABELS",
    "LONGEST_TAG",
    "LOSS_MASK",
    "LOSS_SPANS",
    "NO_COLUMNS",
    "REJECTED_AT",
    "TEXT",
    "ColumnKind",
    "ColumnName",
    "ColumnRanges",
    "OwnDtype",
    "SampleColumns",
    "TableColumn",
    "TagDtype",
    "TagValue",
    "WholeColumn",
    "column_kind",
    "joined_ranges",
    "metadata_of",
    "name_inside",
    "name_outside",
    "overlap_of",
    "said_of_inside",
    "spans_of",
    "starts_in",
    "tag_inside",
]

WholeColumn = Literal["scores", "text"]
"""Columns that belong to whole samples and that a mix requests by name."""
TableColumn = Literal["labels", "loss_mask", "scores", "text"]
"""Columns that are read from a column of a table."""
ColumnName = Literal[
    "loss_mask",
    "scores",
    "text",
    "images",
    "grids",
    "image_places",
    "rejected_at",
    "document_starts",
]
"""Columns in addition to the tokens. A closed list: each new one needs an entry in ``COLUMNS`` on how it is cut."""
OwnDtype: TypeAlias = Literal[
    "bool", "int8", "uint8", "int16", "int32", "int64", "float16", "float32", "float64"
]
"""Types of a custom column. A closed list, because only numbers of these types are sent and kept."""
TagDtype: TypeAlias = Literal["text", "bool", "int64", "float32", "float64"]
"""Types of a custom column with one value for a whole sample. In a batch, a text is UTF-8."""
TagValue: TypeAlias = bool | int | float | str
LONGEST_TAG = 4_096
"""Largest size of a text of a custom column in bytes of UTF-8; every piece of its sample has the text."""
LOSS_MASK: ColumnName = "loss_mask"
LABELS: TableColumn = "labels"
"""Column that is read instead of a mask and never kept: the id of each trained token, otherwise ``IGNORE_LABEL``."""
IGNORE_LABEL = -100
"""Label of a token that predicts nothing, the value torch's cross entropy ignores."""
TEXT: ColumnName = "text"
"""A text together with the tokens, as UTF-8."""
IMAGES: ColumnName = "images"
"""Patches of all images of a sample, end to end: ``patch * patch * 3`` values each, image by image."""
GRIDS: ColumnName = "grids"
"""Rows and columns of patches of each image."""
IMAGE_PLACES: ColumnName = "image_places"
"""First placeholder of each image in its sample, and its number of placeholders."""
REJECTED_AT: ColumnName = "rejected_at"
"""First token of the rejected side of a preference pair, within the sample; the chosen side lies before it."""
DOCUMENT_STARTS: ColumnName = "document_starts"
"""First token of each document of a sample in which documents were joined and stay apart, except for the first
document; rising. Such a sample is never cut."""
IMAGE_COLUMNS: tuple[ColumnName, ...] = (IMAGES, GRIDS, IMAGE_PLACES)
"""Columns that a transform of images makes; they always occur together."""
ALWAYS_USED: tuple[ColumnName, ...] = (LOSS_MASK, REJECTED_AT, DOCUMENT_STARTS, *IMAGE_COLUMNS)
"""Columns that are in a batch whenever a source has them, without being named in the mix."""
LOSS_SPANS = "loss_spans"
"""Metadata: pairs of the start and the end of each range of trained tokens of a sample."""
IMAGE_SPANS = "image_spans"
"""Metadata: first placeholder, number of placeholders and number of patches of each image of a sample."""
NO_COLUMNS: Mapping[Any, Any] = MappingProxyType({})
"""Default for arguments; a value that may be sent holds its own dictionary."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ColumnKind:
    """How a column is kept and cut."""

    dtype: np.dtype[Any]
    aligned: bool
    """Whether it has one value for each token; otherwise its values belong to the whole sample."""
    fill: float = 0
    """Value of each token of a sample that lacks an aligned column."""
    of_labels: bool = False
    """Whether a value belongs to its token as a label; it then stands at the place of the token before."""
    is_tag: bool = False
    """Whether each sample has one value, a number or a text, which each of its pieces has."""
    default: TagValue | None = None
    """Value of a tag for a sample without it; ``None`` if every sample must have it."""

    @property
    def default_V(self) -> NDArray[Any]:
        """Values of a whole column for a sample that lacks it: the default of a tag, otherwise none."""
        if self.default is None:
            return np.empty(0, self.dtype)
        if isinstance(self.default, str):
            return np.frombuffer(self.default.encode(), np.uint8)
        return np.array([self.default], self.dtype)


COLUMNS: Mapping[str, ColumnKind] = MappingProxyType(
    {
        "loss_mask": ColumnKind(dtype=np.dtype(np.bool_), aligned=True, fill=1),
        "scores": ColumnKind(dtype=np.dtype(np.float32), aligned=False),
        "text": ColumnKind(dtype=np.dtype(np.uint8), aligned=False),
        "images": ColumnKind(dtype=np.dtype(np.uint8), aligned=False),
        "grids": ColumnKind(dtype=np.dtype(np.int32), aligned=False),
        "image_places": ColumnKind(dtype=np.dtype(np.int32), aligned=False),
        "rejected_at": ColumnKind(dtype=np.dtype(np.int32), aligned=False),
        "document_starts": ColumnKind(dtype=np.dtype(np.int32), aligned=False),
    }
)
assert set(COLUMNS) == set(get_args(ColumnName)), "every column has a kind"
_LABELS = ColumnKind(dtype=np.dtype(np.int32), aligned=True)
_OF, _OF_SAMPLES = ("tokens", "labels"), "samples"


def name_inside(name: str, dtype: OwnDtype, fill: float | None, *, of_labels: bool = False) -> str:
    """Return the name of a custom column between the parts of a data plane; the name contains its kind.

    Therefore requests and answers need no separate table, and two columns of one name but different kinds never mix::

        loss_weight:float32:tokens:1.0
    """
    value = np.dtype(dtype).type(0 if fill is None else fill).item()
    return f"{name}:{dtype}:{_OF[of_labels]}:{value!r}"


def tag_inside(name: str, dtype: TagDtype, default: TagValue | None) -> str:
    """Return the name of a custom column of whole samples between the parts, with its default as JSON.

    ::

        lang:text:samples:"en"
    """
    if default is not None and not isinstance(default, str):
        default = np.dtype(dtype).type(default).item()
    return f"{name}:{dtype}:{_OF_SAMPLES}:{json.dumps(default)}"


def name_outside(name: str) -> str:
    """Return the user's name of a column."""
    return name.partition(":")[0]


@lru_cache(maxsize=1_024)
def column_kind(name: str) -> ColumnKind:
    """Return how a column is kept and cut.

    Raises:
        KeyError: There is no such column.
    """
    if (kind := _LABELS if name == LABELS else COLUMNS.get(name)) is not None:
        return kind
    # A text may contain colons, so it comes last.
    match name.split(":", 3):
        case [_, dtype, of, said] if dtype in get_args(TagDtype) and of == _OF_SAMPLES:
            kept = np.dtype(np.uint8 if dtype == "text" else dtype)
            return ColumnKind(dtype=kept, aligned=False, is_tag=True, default=_read(name, said))
        case [_, dtype, of, value] if dtype in get_args(OwnDtype) and of in _OF:
            fill = value == "True" if dtype == "bool" else float(value)
            if dtype in {"int64", "int32"}:  # a float cannot hold all of them
                fill = int(value)
            return ColumnKind(
                dtype=np.dtype(dtype), aligned=True, fill=fill, of_labels=of == "labels"
            )
    raise KeyError(name)


def _read(name: str, said: str) -> TagValue | None:
    try:
        value: TagValue | None = json.loads(said)
    except json.JSONDecodeError as error:
        raise KeyError(name) from error
    return value


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleColumns:
    """Columns of some samples, or of ranges of samples, copied end to end."""

    tokens: Ragged
    """Token ids (int32)."""
    others: Mapping[str, Ragged] = field(default_factory=dict)
    """Further columns by name; an aligned column has the lengths of ``tokens``."""

    def __len__(self) -> int:
        return len(self.tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class ColumnRanges:
    """Columns of ranges of samples, as references; nothing is copied."""

    tokens: Ranges
    others: Mapping[str, Ranges] = field(default_factory=dict)

    @classmethod
    def of(cls, parts: Sequence[SampleColumns]) -> Self:
        """Join the ranges of several answers, in order; columns that an answer lacks are filled in."""
        names = {name for part in parts for name in part.others}
        return cls(
            tokens=Ranges.of([part.tokens for part in parts]),
            others={
                name: joined_ranges(
                    name, [part.others.get(name, part.tokens.lengths_N) for part in parts]
                )
                # Sorted, because a set has another order in every process, and what is built must not.
                for name in sorted(names)
            },
        )

    def take(self, indices: NDArray[np.integer[Any]]) -> Self:
        """Return the ranges at ``indices``; no value is copied."""
        return type(self)(
            tokens=self.tokens.take(indices),
            others={name: ranges.take(indices) for name, ranges in self.others.items()},
        )


def joined_ranges(name: str, parts: Sequence[Ranges | Ragged | NDArray[np.int64]]) -> Ranges:
    """Return the ranges of one column from several places as one, in order.

    Args:
        name: The column.
        parts: Ranges, or sequences end to end; or, for samples without the column, the lengths of their tokens. For
            such samples, every token is trained on, or has the default of the custom column; a whole column is empty,
            and a tag has its default.
    """
    kind = column_kind(name)
    lacking = [part for part in parts if isinstance(part, np.ndarray)]
    is_filled = kind.aligned and lacking
    # One array of the greatest length serves all parts that lack the column: all their ranges begin at its start.
    longest = int(np.concatenate(lacking).max(initial=0)) if is_filled else 0
    filled = np.full(longest, kind.fill, kind.dtype) if kind.aligned else kind.default_V
    columns: list[NDArray[Any]] = [filled]
    which, starts, stops = [], [], []
    for part in parts:
        match part:
            case Ranges():
                which.append(part.which_N + len(columns))
                starts.append(part.starts_N)
                stops.append(part.stops_N)
                columns += part.columns
            case Ragged():
                which.append(np.full(len(part), len(columns)))
                starts.append(part.offsets[:-1])
                stops.append(part.offsets[1:])
                columns.append(part.values_V)
            case _:
                nothing = np.zeros(len(part), np.int64)
                which.append(nothing)
                starts.append(nothing)
                stops.append(part.astype(np.int64) if kind.aligned else nothing + len(filled))
    return Ranges(
        columns=columns,
        which_N=np.concatenate(which),
        starts_N=np.concatenate(starts),
        stops_N=np.concatenate(stops),
    )


def spans_of(mask: Ragged) -> Ragged:
    """Return the start and the end of each run of true values in each sequence, alternately (int32).

    The mask of a chat has two numbers for each turn. The planner counts labels from these numbers and never sees the
    mask::

        0 0 1 1 1 0 1    ->    2 5 6 7
    """
    values_V = mask.values_V
    is_first_V, is_last_V = (np.zeros(len(values_V), np.bool_) for _ in range(2))
    filled = np.flatnonzero(mask.lengths_N)
    is_first_V[mask.offsets[filled]] = True
    is_last_V[mask.offsets[filled + 1] - 1] = True
    # Values that ``roll`` wraps around or takes from the neighbouring sequence are overruled by first and last.
    before_V, behind_V = np.roll(values_V, 1), np.roll(values_V, -1)
    starts = np.flatnonzero(values_V & (is_first_V | ~before_V))
    stops = np.flatnonzero(values_V & (is_last_V | ~behind_V)) + 1
    # Side "right", because an empty sequence begins where the next one does.
    sequences = np.searchsorted(mask.offsets, starts, side="right") - 1
    bounds = np.column_stack((starts, stops)) - mask.offsets[sequences][:, None]
    offsets = offsets_of(2 * np.bincount(sequences, minlength=len(mask)))
    return Ragged(values_V=bounds.astype(np.int32).reshape(-1), offsets=offsets)


def starts_in(starts: NDArray[np.int64], offsets: NDArray[np.int64]) -> Ragged:
    """Return the column ``document_starts`` of sequences that are stored end to end.

    Args:
        starts: Starts of documents among the values of all sequences, rising.
        offsets: Boundaries of the sequences; no sequence is empty.
    """
    # Side "left", because a start at the beginningning of a sequence, or at the end of the last, is not inside any.
    owners = np.searchsorted(offsets, starts) - 1
    inside = (owners >= 0) & (owners < len(offsets) - 1)
    inside[inside] = starts[inside] < offsets[owners[inside] + 1]
    starts, owners = starts[inside], owners[inside]
    sizes = np.bincount(owners, minlength=len(offsets) - 1)
    return Ragged(
        values_V=(starts - offsets[owners]).astype(np.int32),
        offsets=offsets_of(sizes),
    )


def _all_but(starts: Ragged) -> Ragged:
    """Return spans of everything except some tokens of each sample; the last span is open, as a piece has its own end.

    ::

        3 7    ->    0 3 4 7 8 ...
    """
    offsets = 2 * (starts.offsets + np.arange(len(starts) + 1))
    bounds_V = np.empty(int(offsets[-1]), np.int32)
    is_inner_V = np.ones(len(bounds_V), np.bool_)
    is_inner_V[offsets[:-1]] = is_inner_V[offsets[1:] - 1] = False
    bounds_V[offsets[:-1]] = 0
    bounds_V[offsets[1:] - 1] = np.iinfo(np.int32).max
    bounds_V[is_inner_V] = np.repeat(starts.values_V, 2)
    bounds_V[is_inner_V] += np.tile(np.array([0, 1], np.int32), len(starts.values_V))
    return Ragged(values_V=bounds_V, offsets=offsets)


def overlap_of(spans_P: Ragged, starts_P: NDArray[np.int64], stops_P: NDArray[np.int64]) -> int:
    """Return the number of tokens that lie both in the range of a piece and in one of its spans."""
    bounds_Q2 = spans_P.values_V.reshape(-1, 2)
    piece_Q = np.repeat(np.arange(len(spans_P)), spans_P.lengths_N // 2)
    common = np.minimum(bounds_Q2[:, 1], stops_P[piece_Q])
    common -= np.maximum(bounds_Q2[:, 0], starts_P[piece_Q])
    return int(np.maximum(common, 0).sum(dtype=np.int64))


def metadata_of(others: Mapping[str, Ragged]) -> dict[str, Ragged]:
    """Return what the planner needs of further columns: spans for labels, documents for costs, images to deal."""
    found = {LOSS_SPANS: spans_of(others[LOSS_MASK])} if LOSS_MASK in others else {}
    if DOCUMENT_STARTS in others:
        found[DOCUMENT_STARTS] = others[DOCUMENT_STARTS]
        # A mask, if there is one, already leaves these tokens out.
        found.setdefault(LOSS_SPANS, _all_but(others[DOCUMENT_STARTS]))
    if GRIDS in others:
        grids, places = others[GRIDS], others[IMAGE_PLACES]
        patches_I = grids.values_V[::2] * grids.values_V[1::2]
        spans_I3 = np.column_stack((places.values_V.reshape(-1, 2), patches_I))
        # A grid has two numbers for each image, and a span three.
        found[IMAGE_SPANS] = Ragged(
            values_V=spans_I3.astype(np.int32).reshape(-1), offsets=grids.offsets // 2 * 3
        )
    return found


def said_of_inside(name: str, names: Collection[str]) -> str:
    """Return a hint for a column name that is meant to reach inside another column; empty for any other name."""
    outer, dot, _ = name.partition(".")
    if not dot or outer not in names:
        return ""
    return f"; a name does not reach inside {outer!r}: write what is there as a column or key of its own"

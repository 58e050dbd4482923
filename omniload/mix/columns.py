"""A sample's columns: ``tokens`` always, and what goes with them.

An *aligned* column has one value a token and is cut where the tokens are cut. A *whole* column
belongs to the sample: its values stay with the piece that holds the sample's first token. A *tag* of
a user's own belongs to it too, and is with each of its pieces.

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
"""Columns that belong to whole samples, and that a mix asks for by name."""
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
"""Columns beside the tokens. A closed list: whoever adds one says in ``COLUMNS`` how it is cut."""
OwnDtype: TypeAlias = Literal[
    "bool", "int8", "uint8", "int16", "int32", "int64", "float16", "float32", "float64"
]
"""Types of a column of yours. A closed list: what travels and what is kept are numbers of these types."""
TagDtype: TypeAlias = Literal["text", "bool", "int64", "float32", "float64"]
"""Types of a column of yours that has one value for a whole sample. A text is UTF-8 in a batch."""
TagValue: TypeAlias = bool | int | float | str
LONGEST_TAG = 4_096
"""Bytes of a text of a column of yours at most, in UTF-8: every piece of its sample has it."""
LOSS_MASK: ColumnName = "loss_mask"
LABELS: TableColumn = "labels"
"""Read in place of a mask, and never kept: of each token its own id where it is trained on, else ``IGNORE_LABEL``."""
IGNORE_LABEL = -100
"""Label of a token that predicts nothing, the value torch's cross entropy ignores."""
TEXT: ColumnName = "text"
"""A text beside the tokens, as UTF-8."""
IMAGES: ColumnName = "images"
"""Patches of all images of a sample, end to end: ``patch * patch * 3`` values each, image by image."""
GRIDS: ColumnName = "grids"
"""Rows and columns of patches of each image."""
IMAGE_PLACES: ColumnName = "image_places"
"""First placeholder of each image in its sample, and how many it has."""
REJECTED_AT: ColumnName = "rejected_at"
"""Of a preference pair: the token of the sample that its rejected side begins with; the chosen side lies before it."""
DOCUMENT_STARTS: ColumnName = "document_starts"
"""Of documents that were joined and stay apart: the tokens of the sample that each of them begins with, but for the
first; rising. Such a sample is never cut."""
IMAGE_COLUMNS: tuple[ColumnName, ...] = (IMAGES, GRIDS, IMAGE_PLACES)
"""Columns that a transform of images makes; they go together."""
ALWAYS_USED: tuple[ColumnName, ...] = (LOSS_MASK, REJECTED_AT, DOCUMENT_STARTS, *IMAGE_COLUMNS)
"""Columns that become part of a batch wherever a source has them, without a word of the mix."""
LOSS_SPANS = "loss_spans"
"""Metadata: where the tokens of a sample that are trained on begin and stop, in turns."""
IMAGE_SPANS = "image_spans"
"""Metadata: first placeholder, placeholders and patches of each image of a sample, in turns."""
NO_COLUMNS: Mapping[Any, Any] = MappingProxyType({})
"""For arguments; a value that may travel holds a dictionary of its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ColumnKind:
    """How a column is kept and cut."""

    dtype: np.dtype[Any]
    aligned: bool
    """One value a token; else values of the whole sample."""
    fill: float = 0
    """Value of each token of a sample that lacks an aligned one."""
    of_labels: bool = False
    """Whether a value belongs to its token as a label: it stands where the token before it does."""
    is_tag: bool = False
    """Whether each sample has one value, a number or a text, that is with each of its pieces."""
    default: TagValue | None = None
    """Of a tag, what a sample without it has; ``None`` where it must have one."""

    @property
    def default_V(self) -> NDArray[Any]:
        """Of a whole column, the values of a sample that lacks it: of a tag its default, else none."""
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
    """Return what a column of yours is called between the parts of a data plane: its kind stands in its name.

    So neither a request nor an answer needs a table beside it, and two columns of one name and two kinds never meet::

        loss_weight:float32:tokens:1.0
    """
    value = np.dtype(dtype).type(0 if fill is None else fill).item()
    return f"{name}:{dtype}:{_OF[of_labels]}:{value!r}"


def tag_inside(name: str, dtype: TagDtype, default: TagValue | None) -> str:
    """Return what a column of yours of whole samples is called there, with what they have by default as JSON.

    ::

        lang:text:samples:"en"
    """
    if default is not None and not isinstance(default, str):
        default = np.dtype(dtype).type(default).item()
    return f"{name}:{dtype}:{_OF_SAMPLES}:{json.dumps(default)}"


def name_outside(name: str) -> str:
    """Return what a user calls a column."""
    return name.partition(":")[0]


@lru_cache(maxsize=1_024)
def column_kind(name: str) -> ColumnKind:
    """Return how a column is kept and cut.

    Raises:
        KeyError: There is no such column.
    """
    if (kind := _LABELS if name == LABELS else COLUMNS.get(name)) is not None:
        return kind
    # A text may hold colons: it comes last.
    match name.split(":", 3):
        case [_, dtype, of, said] if dtype in get_args(TagDtype) and of == _OF_SAMPLES:
            kept = np.dtype(np.uint8 if dtype == "text" else dtype)
            return ColumnKind(dtype=kept, aligned=False, is_tag=True, default=_read(name, said))
        case [_, dtype, of, value] if dtype in get_args(OwnDtype) and of in _OF:
            fill = value == "True" if dtype == "bool" else float(value)
            if dtype in {"int64", "int32"}:  # a float holds not all of them
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
    """Columns of some samples, or of ranges of them, copied end to end."""

    tokens: Ragged
    """Token ids (int32)."""
    others: Mapping[str, Ragged] = field(default_factory=dict)
    """Further columns by name; an aligned one has the lengths of ``tokens``."""

    def __len__(self) -> int:
        return len(self.tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class ColumnRanges:
    """Columns of ranges of samples where they lie; nothing is copied."""

    tokens: Ranges
    others: Mapping[str, Ranges] = field(default_factory=dict)

    @classmethod
    def of(cls, parts: Sequence[SampleColumns]) -> Self:
        """Show the ranges of several answers as one, in order; what one lacks is filled in."""
        names = {name for part in parts for name in part.others}
        return cls(
            tokens=Ranges.of([part.tokens for part in parts]),
            others={
                name: joined_ranges(
                    name, [part.others.get(name, part.tokens.lengths_N) for part in parts]
                )
                # Sorted: a set has another order in every process, and what is built must not.
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
        parts: Ranges, or sequences end to end; or, of samples without the column, the lengths of their tokens:
            every token of theirs is trained on, or has the default of a column of yours; a whole column is empty, but
            a tag is its default.
    """
    kind = column_kind(name)
    lacking = [part for part in parts if isinstance(part, np.ndarray)]
    is_filled = kind.aligned and lacking
    # One array of the longest serves all that lack the column: their ranges begin where it does.
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
    """Return where the true values of each sequence begin and stop, in turns (int32).

    A mask of a chat has two numbers a turn; the planner counts labels by them and never sees
    the mask::

        0 0 1 1 1 0 1    ->    2 5 6 7
    """
    values_V = mask.values_V
    is_first_V, is_last_V = (np.zeros(len(values_V), np.bool_) for _ in range(2))
    filled = np.flatnonzero(mask.lengths_N)
    is_first_V[mask.offsets[filled]] = True
    is_last_V[mask.offsets[filled + 1] - 1] = True
    # What comes round from an end, or out of the sequence beside, is overruled by first and last.
    before_V, behind_V = np.roll(values_V, 1), np.roll(values_V, -1)
    starts = np.flatnonzero(values_V & (is_first_V | ~before_V))
    stops = np.flatnonzero(values_V & (is_last_V | ~behind_V)) + 1
    # From the right: an empty sequence begins where the next one does.
    sequences = np.searchsorted(mask.offsets, starts, side="right") - 1
    bounds = np.column_stack((starts, stops)) - mask.offsets[sequences][:, None]
    offsets = offsets_of(2 * np.bincount(sequences, minlength=len(mask)))
    return Ragged(values_V=bounds.astype(np.int32).reshape(-1), offsets=offsets)


def starts_in(starts: NDArray[np.int64], offsets: NDArray[np.int64]) -> Ragged:
    """Return the column ``document_starts`` of sequences that lie end to end.

    Args:
        starts: Where documents begin among the values of all, rising.
        offsets: Boundaries of the sequences; none is empty.
    """
    # From the left: where a sequence begins or the last one stops nothing begins inside.
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
    """Return spans of everything but some tokens of each sample, without an end: a piece has its own.

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
    """Return the tokens that lie both in a piece's range and in one of its spans."""
    bounds_Q2 = spans_P.values_V.reshape(-1, 2)
    piece_Q = np.repeat(np.arange(len(spans_P)), spans_P.lengths_N // 2)
    common = np.minimum(bounds_Q2[:, 1], stops_P[piece_Q])
    common -= np.maximum(bounds_Q2[:, 0], starts_P[piece_Q])
    return int(np.maximum(common, 0).sum(dtype=np.int64))


def metadata_of(others: Mapping[str, Ragged]) -> dict[str, Ragged]:
    """Return what the planner needs of further columns: labels by spans, costs by documents, images to deal."""
    found = {LOSS_SPANS: spans_of(others[LOSS_MASK])} if LOSS_MASK in others else {}
    if DOCUMENT_STARTS in others:
        found[DOCUMENT_STARTS] = others[DOCUMENT_STARTS]
        # A mask has left them out already where there is one.
        found.setdefault(LOSS_SPANS, _all_but(others[DOCUMENT_STARTS]))
    if GRIDS in others:
        grids, places = others[GRIDS], others[IMAGE_PLACES]
        patches_I = grids.values_V[::2] * grids.values_V[1::2]
        spans_I3 = np.column_stack((places.values_V.reshape(-1, 2), patches_I))
        # Grids have two numbers an image, and its span has three.
        found[IMAGE_SPANS] = Ragged(
            values_V=spans_I3.astype(np.int32).reshape(-1), offsets=grids.offsets // 2 * 3
        )
    return found


def said_of_inside(name: str, names: Collection[str]) -> str:
    """Return what is said of the name of a column that is meant to reach inside another; empty of any other name."""
    outer, dot, _ = name.partition(".")
    if not dot or outer not in names:
        return ""
    return f"; a name does not reach inside {outer!r}: write what is there as a column or key of its own"

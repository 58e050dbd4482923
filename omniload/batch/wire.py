"""A batch as bytes, which one rank sends to peers that train on the same rows: to each what it uses.

::

    stage          first, 2 ranks      middle, 2 ranks     last, 2 ranks
    line 0         bounds, sources, keys and figures: all six
    line 1         tokens: first and last, for labels of whole rows are tokens
    line 2         what leaves labels out, scores: last
    own            images that the rank encodes, to each of them alone

    a buffer:      length of the head, 8 bytes │ head, JSON │ array │ ...     each array at a multiple of 64 bytes

A line is one broadcast to those ranks that take it. Both ends of it are of one job.

Shape suffixes:
    B  bytes
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Self, cast, get_args

import numpy as np
from numpy.typing import NDArray

from omniload.base.errors import IntegrityError
from omniload.base.ragged import Ragged
from omniload.batch.absent import Absent, absent_column
from omniload.batch.encoding import EncoderShare
from omniload.batch.microbatch import Batch, CpSlice, Microbatch, aligned_of
from omniload.batch.stages import LABELS, OWN, TOKENS, Stage, column_of
from omniload.mix.columns import IMAGES, WholeColumn

__all__ = ["Parts", "Routes", "from_bytes", "from_parts", "to_bytes", "to_parts"]

_WIRE_VERSION = 7
_LENGTH_BYTES = 8
# A line of the processor's cache, and more than any type of numpy asks for: arrays are used where they lie.
_ALIGNMENT = 64
_NUMBERS = "biuf"
"""Kinds of numpy's types that an array may have: truth, whole numbers, floating point."""
_KINDS: Mapping[str, type[Microbatch] | type[CpSlice]] = {"rows": Microbatch, "slice": CpSlice}
_MADE = {"positions_RC", "label_tokens_RT"}
"""Arrays that do not travel: they follow from others."""
_COLUMNS = (TOKENS, LABELS, IMAGES, OWN, *get_args(WholeColumn))
_NOBODY = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """A batch in buffers, as it is sent, or as it comes to one rank."""

    shared: Sequence[NDArray[np.uint8]] = ()
    """One buffer for each line of ``Routes``; a receiving rank has only the lines that it takes."""
    own: Sequence[NDArray[np.uint8]] = ()
    """One buffer for each rank including the sender; a receiving rank has only its own. Empty if none is sent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Routes:
    """Which of some peers take which columns of a batch."""

    lines: tuple[tuple[int, ...], ...]
    """Numbers of the peers on each line, the one that sends first; all of them are on line 0."""
    line_of: Mapping[str, int] = field(default_factory=dict)
    """Line of each column that not all peers take; -1 for one that the sender alone uses."""
    apart: int = 0
    """Peers whose images to encode travel apart; 0 where all go with the rows."""

    @classmethod
    def among(cls, stages: Sequence[Stage | None], *, sliced: bool) -> Self:
        """Return the ways from the first of some peers to the others.

        Args:
            stages: Stage of each peer along pp.
            sliced: Whether cp peers share the rows: then labels do not follow from tokens.
        """
        lines, line_of = [tuple(range(len(stages)))], {}
        for column in _COLUMNS:
            wanted = {column, LABELS} if column == TOKENS and not sliced else {column}
            takes = tuple(
                peer
                for peer, stage in enumerate(stages)
                if not peer or stage is None or any(map(stage.has, wanted))
            )
            if takes not in lines and len(takes) > 1:
                lines.append(takes)
            line_of[column] = lines.index(takes) if len(takes) > 1 else _NOBODY
        return cls(lines=tuple(lines), line_of=line_of, apart=len(stages))

    @classmethod
    def to(cls, stage: Stage | None) -> Self:
        """Return the way to one rank of a stage."""
        left_out = (
            column
            for column in _COLUMNS
            if stage is not None
            and not stage.has(column)
            and not (column == TOKENS and stage.has(LABELS))
        )
        return cls(lines=((0,),), line_of=dict.fromkeys(left_out, _NOBODY))

    def buffer_of(self, name: str, buffers: Sequence["_Buffer"], *, is_array: bool) -> "_Buffer":
        """Return the buffer for an array or a whole-sample column; the last one if no rank takes it."""
        return buffers[self.line_of.get(column_of(name, is_array=is_array), 0)]


class _Buffer:
    """Arrays that are sent together, and what each is of."""

    def __init__(self, microbatches: int) -> None:
        self._arrays: list[NDArray[Any]] = []
        self.microbatches: list[dict[str, Any]] = [{} for _ in range(microbatches)]

    def keep(self, array: NDArray[Any]) -> int:
        """Add an array; return its number."""
        self._arrays.append(np.ascontiguousarray(array))
        return len(self._arrays) - 1

    def keep_of(self, part: Microbatch | CpSlice | EncoderShare) -> dict[str, int]:
        return {name: self.keep(array) for name, array in _arrays_of(part)}

    def keep_ragged(self, column: Ragged) -> tuple[int, int]:
        return self.keep(column.values_V), self.keep(column.offsets)

    def to_bytes(self, **told: object) -> NDArray[np.uint8]:
        """Return it as bytes, ``[B]``; the head says ``told``, too."""
        head = told | {
            "version": _WIRE_VERSION,
            "microbatches": self.microbatches,
            "arrays": [[array.dtype.str, list(array.shape)] for array in self._arrays],
        }
        text = json.dumps(head).encode()
        starts = list(_starts(len(text), [array.nbytes for array in self._arrays]))
        # Zeroed, not empty: what lies between two arrays is sent too, and would be whatever this process had there.
        out_B = np.zeros(starts[-1], np.uint8)
        out_B[:_LENGTH_BYTES] = np.frombuffer(len(text).to_bytes(_LENGTH_BYTES, "little"), np.uint8)
        out_B[_LENGTH_BYTES : _LENGTH_BYTES + len(text)] = np.frombuffer(text, np.uint8)
        for array, start in zip(self._arrays, starts, strict=False):
            out_B[start : start + array.nbytes] = array.reshape(-1).view(np.uint8)
        return out_B


def to_parts(batch: Batch, routes: Routes) -> Parts:
    """Return a batch as what goes to each of some peers; what no other uses is not copied."""
    count = len(batch.microbatches)
    lines = [_Buffer(count) for _ in routes.lines]
    apart = [_Buffer(count) for _ in range(routes.apart)]
    has_shares = False
    for i, part in enumerate(batch.microbatches):
        _add(part, i, routes, lines)
        if part.encoding is None:
            continue
        has_shares = True
        shares = part.encoding.of_ranks
        lines[0].microbatches[i] |= {
            "ranks": part.encoding.num_ranks,
            "values_per_patch": part.encoding.values_per_patch,
        }
        if not apart:
            lines[0].microbatches[i]["shares"] = [_told(share, lines[0]) for share in shares]
        for buffer, share in zip(apart, shares, strict=bool(apart)):
            buffer.microbatches[i]["shares"] = [_told(share, buffer)]
    plain = {name: getattr(batch, name) for name in _plain_names()}
    nothing = np.empty(0, np.uint8)
    return Parts(
        shared=[lines[0].to_bytes(batch=plain), *(line.to_bytes() for line in lines[1:])],
        # The sender has its own.
        own=[nothing, *(each.to_bytes() for each in apart[1:])] if has_shares else (),
    )


def _add(part: Microbatch | CpSlice, i: int, routes: Routes, lines: Sequence[_Buffer]) -> None:
    """Add the arrays of a microbatch to the lines of the ranks that take them."""
    kind = next(name for name, cls in _KINDS.items() if isinstance(part, cls))
    shape = part.tokens_RC.shape if isinstance(part, CpSlice) else part.tokens_RT.shape
    types = {name: values.dtype.str for name, values in aligned_of(part).items()}
    lines[0].microbatches[i] |= {
        "kind": kind,
        "shape": shape,
        "names": list(part.columns_K),
        "own": types,
    }
    nobody = _Buffer(len(lines[0].microbatches))
    buffers = [*lines, nobody]
    for name, array in _arrays_of(part):
        buffer = routes.buffer_of(name, buffers, is_array=True)
        if buffer is not nobody:
            buffer.microbatches[i].setdefault("arrays", {})[name] = buffer.keep(array)
    for name, column in part.columns_K.items():
        buffer = routes.buffer_of(name, buffers, is_array=False)
        if buffer is not nobody:
            buffer.microbatches[i].setdefault("columns", {})[name] = buffer.keep_ragged(column)
    buffer = buffers[routes.line_of.get(OWN, 0)]
    if types and buffer is not nobody:
        kept = {name: buffer.keep(values) for name, values in aligned_of(part).items()}
        buffer.microbatches[i]["aligned"] = kept


def _told(share: EncoderShare, buffer: _Buffer) -> dict[str, Any] | None:
    # Most peers have no part in a given microbatch; each of them gets one word.
    if share.is_of_nothing:
        return None
    return {"arrays": buffer.keep_of(share), "images": buffer.keep_ragged(share.images_I)}


def to_bytes(batch: Batch, stage: Stage | None = None) -> NDArray[np.uint8]:
    """Return a batch as bytes, ``[B]``: all of it, or what ranks of one stage use."""
    (data_B,) = to_parts(batch, Routes.to(stage)).shared
    return data_B


def from_bytes(data_B: NDArray[np.uint8]) -> Batch:
    """Return the batch that ``to_bytes`` gave; its arrays lie in ``data_B``.

    Raises:
        IntegrityError: The bytes are of another release, or not whole.
    """
    return from_parts(Parts(shared=[data_B]))


def from_parts(parts: Parts) -> Batch:
    """Return the batch that one rank has of what came to it; its arrays lie in the buffers.

    Columns that did not come are absent. Images to encode are this rank's alone, where they came apart.

    Raises:
        IntegrityError: The bytes are of another release, or not whole.
    """
    buffers = [*parts.shared, *(own for own in parts.own if len(own))]
    try:
        # JSON and arrays of numbers: what another rank sends is never unpickled.
        found = [_opened(data_B) for data_B in buffers]
        count = len(found[0][0]["microbatches"])
        return Batch(
            microbatches=tuple(
                _microbatch([(head["microbatches"][i], arrays) for head, arrays in found])
                for i in range(count)
            ),
            **found[0][0]["batch"],
        )
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise IntegrityError(
            f"{sum(map(len, buffers))} bytes are no whole batch: {error}; start the job again from its last checkpoint"
        ) from error


def _opened(data_B: NDArray[np.uint8]) -> tuple[dict[str, Any], list[NDArray[Any]]]:
    """Return the head and the arrays of a buffer."""
    length = int.from_bytes(data_B[:_LENGTH_BYTES].tobytes(), "little")
    head = json.loads(data_B[_LENGTH_BYTES : _LENGTH_BYTES + length].tobytes())
    if head["version"] != _WIRE_VERSION:
        raise IntegrityError(
            f"a batch has wire version {head['version']}, this rank reads {_WIRE_VERSION}; "
            "install one release on all ranks"
        )
    return head, list(_arrays(data_B, length, head["arrays"]))


def _microbatch(
    told: Sequence[tuple[Mapping[str, Any], list[NDArray[Any]]]],
) -> Microbatch | CpSlice:
    """Return a microbatch of what each buffer says and holds of it, the one of all peers first."""
    made = told[0][0]
    columns = {name: absent_column(_not_sent(name)) for name in made["names"]}
    own: dict[str, Any] = {}
    kind, shape = _KINDS[made["kind"]], tuple(made["shape"])
    aligned = {
        name: cast("NDArray[Any]", Absent(_not_sent(OWN), shape, _of_numbers(type_)))
        for name, type_ in made["own"].items()
    }
    nothing = EncoderShare.of_nothing(made.get("ranks", 0), made.get("values_per_patch", 0))
    if "ranks" in made:
        own["encoding"] = nothing
    for head, arrays in told:
        own |= {name: arrays[at] for name, at in head.get("arrays", {}).items()}
        for name, (values, offsets) in head.get("columns", {}).items():
            columns[name] = Ragged(values_V=arrays[values], offsets=arrays[offsets])
        aligned |= {name: arrays[at] for name, at in head.get("aligned", {}).items()}
        if "shares" in head:
            first, *others = (_share(each, arrays, nothing) for each in head["shares"])
            own["encoding"] = replace(first, others=tuple(others))
    own["aligned_RC" if kind is CpSlice else "aligned_RT"] = aligned
    if kind is CpSlice:
        own["positions_RC"] = _positions(own, columns, shape)
        sizes = {"tokens_RC": shape, "labels_RC": shape}
    else:
        sizes = {"tokens_RT": shape, "next_D": own["sources_D"].shape}
    for name, size in sizes.items():
        absent = Absent(_not_sent(column_of(name, is_array=True)), size, np.dtype(np.int32))
        own.setdefault(name, absent)
    return kind(columns_K=columns, **own)


def _positions(
    own: Mapping[str, NDArray[Any]], columns_K: Mapping[str, Ragged], shape: tuple[int, int]
) -> NDArray[np.int32]:
    """Return the positions of a slice, ``[R, C]``: they follow from the bounds of the whole rows."""
    rows, bounds = shape[0], own["cu_seqlens"]
    whole = (rows, int(bounds[-1]) // max(rows, 1))
    absent = cast("NDArray[Any]", Absent(_not_sent(TOKENS), whole))
    part = Microbatch(
        tokens_RT=absent,
        cu_seqlens=bounds,
        sources_D=own["sources_D"],
        next_D=absent,
        keys_K4=own["keys_K4"],
        columns_K=columns_K,
    )
    return part.positions_RT[:, own["indices_C"]] if rows else np.empty(shape, np.int32)


def _not_sent(column: str) -> str:
    return f"no {column} was sent to this rank, as its stage along pp uses none"


def _share(
    told: Mapping[str, Any] | None, arrays: list[NDArray[Any]], nothing: EncoderShare
) -> EncoderShare:
    if told is None:
        return nothing
    values, offsets = told["images"]
    images = Ragged(values_V=arrays[values], offsets=arrays[offsets])
    own = {name: arrays[at] for name, at in told["arrays"].items()}
    return replace(nothing, images_I=images, **own)


def _arrays(
    data_B: NDArray[np.uint8], length: int, shapes: list[tuple[str, list[int]]]
) -> Iterator[NDArray[Any]]:
    """Yield the arrays behind a head of ``length`` bytes."""
    kinds = [_of_numbers(kind) for kind, _ in shapes]
    sizes = [
        kind.itemsize * int(np.prod(shape, dtype=np.int64))
        for kind, (_, shape) in zip(kinds, shapes, strict=True)
    ]
    starts = list(_starts(length, sizes))
    if starts[-1] != len(data_B):
        raise ValueError(f"their head speaks of {starts[-1]} bytes")
    for kind, (_, shape), start, size in zip(kinds, shapes, starts, sizes, strict=False):
        yield data_B[start : start + size].view(kind).reshape(shape)


def _of_numbers(type_: str) -> np.dtype[Any]:
    kind = np.dtype(type_)
    # Bytes read as objects would be addresses in this process.
    if kind.kind not in _NUMBERS:
        raise ValueError(f"an array is of type {kind}, which is no number")
    return kind


def _starts(length: int, sizes: list[int]) -> Iterator[int]:
    """Yield where each array starts, and where the last one ends."""
    at = _LENGTH_BYTES + length
    for size in sizes:
        at = -(-at // _ALIGNMENT) * _ALIGNMENT
        yield at
        at += size
    yield at


def _arrays_of(part: Microbatch | CpSlice | EncoderShare) -> Iterator[tuple[str, NDArray[Any]]]:
    """Yield its own arrays that travel, as far as it has them."""
    for each in fields(part):
        value = getattr(part, each.name)
        if isinstance(value, np.ndarray) and each.name not in _MADE:
            yield each.name, value


def _plain_names() -> list[str]:
    return [each.name for each in fields(Batch) if each.name != "microbatches"]

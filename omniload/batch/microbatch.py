"""What a rank trains on; and the same as bytes, which it broadcasts to peers that train on the same rows.

::

    length of the head, 8 bytes │ head, JSON │ array │ array │ ...      each array at a multiple of 64 bytes

Both ends of that are of one job.

Shape suffixes:
    R  rows of the microbatch      T  tokens in a row
    D  pieces of all rows, in order; padding at a row's end counts as one
    K  pieces that hold samples, without the padding
    C  tokens in a context-parallel slice of a row
    B  bytes
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from omniload.base.errors import IntegrityError
from omniload.base.ragged import Ragged
from omniload.batch.encoding import EncoderShare
from omniload.batch.starts import positions_between, starts_inside, with_starts

__all__ = [
    "IGNORE_LABEL",
    "Batch",
    "CpSlice",
    "Microbatch",
    "aligned_of",
    "from_bytes",
    "own_part",
    "rows_of",
    "to_bytes",
]

IGNORE_LABEL = -100
"""Label of a token that predicts nothing, the value torch's cross entropy ignores."""
_WIRE_VERSION = 6
_LENGTH_BYTES = 8
# A line of the processor's cache, and more than any type of numpy asks for: arrays are used where they lie.
_ALIGNMENT = 64
_NUMBERS = "biuf"
"""Kinds of numpy's types that an array may have: truth, whole numbers, floating point."""


# Without slots: `cached_property` keeps what it makes in the dictionary of the instance.
@dataclass(frozen=True, kw_only=True)
class Microbatch:
    """Packed rows with everything a varlen attention needs.

    Rows lie end to end: flattened, ``cu_seqlens`` bounds every piece, and a row's padding is one of its own, so the
    bounds always cover all ``R * T`` tokens. A piece is a document, unless its column ``document_starts`` says where
    others begin inside: labels and positions leave none of them.

    What follows from tokens and bounds is made when it is first read, and kept: labels, positions
    and source numbers would be three quarters of what travels to a rank.
    """

    tokens_RT: NDArray[np.int32]
    """Token ids; 0 in the padding."""
    cu_seqlens: NDArray[np.int32]
    """Boundaries of the pieces in the flattened rows, ``[D + 1]``, from 0 to ``R * T``."""
    sources_D: NDArray[np.int16]
    """Number of the source of each piece; -1 for the padding of a row."""
    next_D: NDArray[np.int32]
    """Label of the last token of each piece: the token behind a cut, else ``IGNORE_LABEL``."""
    trained_RT: NDArray[np.bool_] | None = None
    """False where a sample's ``loss_mask`` leaves the label out; ``None`` where no sample has one."""
    keys_K4: NDArray[np.int64]
    """Source, position, sub and first token of every piece: the address of its bytes."""
    columns_K: Mapping[str, Ragged] = field(default_factory=dict)
    """Whole-sample columns by name, one sequence a piece; empty for a piece without its sample's first token."""
    aligned_RT: Mapping[str, NDArray[Any]] = field(default_factory=dict)
    """Columns of yours by name, a value for each token; 0 in the padding."""
    encoding: EncoderShare | None = None
    """Images that this rank encodes, where a strategy deals them; they are not among ``columns_K`` then.

    On the way to ranks that share the rows it brings the shares of all of them; see ``own_part``."""

    @cached_property
    def document_starts(self) -> NDArray[np.int32]:
        """Tokens of the flattened rows that documents inside pieces begin with, rising."""
        return starts_inside(self.cu_seqlens, self.sources_D, self.columns_K)

    @cached_property
    def labels_RT(self) -> NDArray[np.int32]:
        """The next token of the same document, also across a cut.

        ``IGNORE_LABEL`` at its end, in the padding, and where the sample's ``loss_mask`` leaves that next token out.
        """
        tokens = self.tokens_RT.reshape(-1)
        labels = np.empty_like(tokens)
        # Of all rows in one go, over every bound: the last token of each document is put right below.
        labels[:-1] = tokens[1:]
        labels[self.cu_seqlens[1:] - 1] = self.next_D
        labels[self.document_starts - 1] = IGNORE_LABEL
        self._fill_padding(labels, IGNORE_LABEL)
        if self.trained_RT is not None:
            labels[~self.trained_RT.reshape(-1)] = IGNORE_LABEL
        return labels.reshape(self.tokens_RT.shape)

    @cached_property
    def positions_RT(self) -> NDArray[np.int32]:
        """Place of the token in its document, from 0; of a preference pair, in the pair."""
        positions = positions_between(with_starts(self.cu_seqlens, self.document_starts))
        self._fill_padding(positions, 0)
        return positions.reshape(self.tokens_RT.shape)

    @cached_property
    def source_ids_RT(self) -> NDArray[np.int16]:
        """Number of the source; -1 in the padding."""
        ids: NDArray[np.int16] = np.repeat(self.sources_D, np.diff(self.cu_seqlens))
        return ids.reshape(self.tokens_RT.shape)

    @property
    def max_seqlen(self) -> int:
        """Longest document."""
        # Padding counts: kernels size their work by the longest document among the bounds, whatever it is of.
        return int(np.diff(with_starts(self.cu_seqlens, self.document_starts)).max(initial=0))

    def _fill_padding(self, values: NDArray[np.int32], value: int) -> None:
        for at in np.flatnonzero(self.sources_D < 0).tolist():  # one of a row at most
            values[self.cu_seqlens[at] : self.cu_seqlens[at + 1]] = value

    @property
    def loss_mask_RT(self) -> NDArray[np.bool_]:
        """True where a label is predicted."""
        return np.not_equal(self.labels_RT, IGNORE_LABEL)


@dataclass(frozen=True, slots=True, kw_only=True)
class CpSlice:
    """One cp peer's part of a microbatch."""

    tokens_RC: NDArray[np.int32]
    """Token ids."""
    labels_RC: NDArray[np.int32]
    """Labels: taken before slicing, so the last token of a slice still has its own."""
    positions_RC: NDArray[np.int32]
    """Places of the tokens in their documents."""
    indices_C: NDArray[np.int64]
    """Columns of the row that the slice holds, in order."""
    cu_seqlens: NDArray[np.int32]
    """Bounds of the pieces of the whole rows: attention reaches beyond the slice."""
    sources_D: NDArray[np.int16]
    """Number of the source of each piece; -1 for the padding of a row."""
    keys_K4: NDArray[np.int64]
    """Keys of all pieces of the whole rows."""
    columns_K: Mapping[str, Ragged] = field(default_factory=dict)
    """Whole-sample columns of the rows, as in a ``Microbatch``: all peers have them."""
    aligned_RC: Mapping[str, NDArray[Any]] = field(default_factory=dict)
    """Columns of yours by name, a value for each token of the slice."""
    encoding: EncoderShare | None = None
    """Images that this rank encodes, as in a ``Microbatch``; embeddings that come belong in its slice."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """All microbatches of one rank in one step, and what the plan says of the whole step."""

    step: int
    """Number of the step, from 0."""
    microbatches: tuple[Microbatch | CpSlice, ...]
    """In the order they are to be run; slices of them where context parallelism shares the rows."""
    loss_tokens: int
    """Labels predicted in the whole step over all ranks: divide summed losses by it."""
    imbalance: float
    """Heaviest rank over the mean, by cost."""
    bound: float
    """Least possible ``imbalance`` for the rows of the step."""
    microbatch_imbalance: float = 1.0
    """Heaviest microbatch of all ranks over their mean, by cost."""
    microbatch_bound: float = 1.0
    """Least possible ``microbatch_imbalance`` for the rows of the step."""
    tokens_by_source: Mapping[str, int] = field(default_factory=dict)
    """Tokens of each source in the whole step over all ranks."""
    source_tags: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    """Tags of the sources that have any, by name: one table for all batches, whatever is in them."""


def rows_of(part: Microbatch | CpSlice, column: str) -> NDArray[Any]:
    """Return a column of tokens, whole or a slice of cp peers."""
    suffix = "RC" if isinstance(part, CpSlice) else "RT"
    rows: NDArray[Any] = getattr(part, f"{column}_{suffix}")
    return rows


def aligned_of(part: Microbatch | CpSlice) -> Mapping[str, NDArray[Any]]:
    """Return the columns of a user's own that have a value for each token, whole or a slice of cp peers."""
    return part.aligned_RC if isinstance(part, CpSlice) else part.aligned_RT


def own_part(batch: Batch, peer: int, ranks_W: Sequence[int]) -> Batch:
    """Return a batch with what one rank of those that take it encodes, and no other.

    Args:
        batch: What the data plane hands out at a place along dp and cp.
        peer: Number of the rank among those that take it.
        ranks_W: Numbers of all ranks in the job, in the order of places; none where they are numbered so.
    """
    shares = [microbatch.encoding for microbatch in batch.microbatches]
    if not ranks_W and all(share is None or not share.others for share in shares):
        return batch
    own = [None if share is None else share.of_peer(peer).numbered(ranks_W) for share in shares]
    parts = zip(batch.microbatches, own, strict=True)
    return replace(batch, microbatches=tuple(replace(part, encoding=each) for part, each in parts))


_KINDS: Mapping[str, type[Microbatch] | type[CpSlice]] = {"rows": Microbatch, "slice": CpSlice}


def to_bytes(batch: Batch) -> NDArray[np.uint8]:
    """Return a batch as bytes, ``[B]``."""
    arrays: list[NDArray[Any]] = []

    def kept(array: NDArray[Any]) -> int:
        arrays.append(np.ascontiguousarray(array))
        return len(arrays) - 1

    microbatches = []
    for microbatch in batch.microbatches:
        kind = next(name for name, cls in _KINDS.items() if isinstance(microbatch, cls))
        columns = {
            name: [kept(column.values_V), kept(column.offsets)]
            for name, column in microbatch.columns_K.items()
        }
        own = {name: kept(array) for name, array in _arrays_of(microbatch)}
        made: dict[str, Any] = {"kind": kind, "arrays": own, "columns": columns}
        made["aligned"] = {name: kept(values) for name, values in aligned_of(microbatch).items()}
        if microbatch.encoding is not None:
            # Of many peers most have nothing to do with one microbatch: a word each.
            made["shares"] = [
                {
                    "arrays": {name: kept(array) for name, array in _arrays_of(share)},
                    "images": [kept(share.images_I.values_V), kept(share.images_I.offsets)],
                }
                if not share.is_of_nothing
                else None
                for share in microbatch.encoding.of_ranks
            ]
            made["ranks"] = microbatch.encoding.num_ranks
            made["values_per_patch"] = microbatch.encoding.values_per_patch
        microbatches.append(made)
    head = {
        "version": _WIRE_VERSION,
        "batch": {name: getattr(batch, name) for name in _plain_names()},
        "microbatches": microbatches,
        "arrays": [[array.dtype.str, list(array.shape)] for array in arrays],
    }
    text = json.dumps(head).encode()
    starts = list(_starts(len(text), [array.nbytes for array in arrays]))
    # Zeroed, not empty: what lies between two arrays is sent too, and would be whatever this process had there.
    out_B = np.zeros(starts[-1], np.uint8)
    out_B[:_LENGTH_BYTES] = np.frombuffer(len(text).to_bytes(_LENGTH_BYTES, "little"), np.uint8)
    out_B[_LENGTH_BYTES : _LENGTH_BYTES + len(text)] = np.frombuffer(text, np.uint8)
    for array, start in zip(arrays, starts, strict=False):
        out_B[start : start + array.nbytes] = array.reshape(-1).view(np.uint8)
    return out_B


def from_bytes(data_B: NDArray[np.uint8]) -> Batch:
    """Return the batch that ``to_bytes`` gave; its arrays lie in ``data_B``.

    Raises:
        IntegrityError: The bytes are of another release, or not whole.
    """
    length = int.from_bytes(data_B[:_LENGTH_BYTES].tobytes(), "little")
    try:
        # JSON and arrays of numbers: what another rank sends is never unpickled.
        head = json.loads(data_B[_LENGTH_BYTES : _LENGTH_BYTES + length].tobytes())
        if head["version"] != _WIRE_VERSION:
            raise IntegrityError(
                f"a batch has wire version {head['version']}, this rank reads {_WIRE_VERSION}; "
                "install one release on all ranks"
            )
        arrays = list(_arrays(data_B, length, head["arrays"]))
        microbatches = tuple(_microbatch(made, arrays) for made in head["microbatches"])
        return Batch(microbatches=microbatches, **head["batch"])
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise IntegrityError(
            f"{len(data_B)} bytes are no whole batch: {error}; start the job again from its last checkpoint"
        ) from error


def _microbatch(made: Mapping[str, Any], arrays: list[NDArray[Any]]) -> Microbatch | CpSlice:
    columns = {
        name: Ragged(values_V=arrays[values], offsets=arrays[offsets])
        for name, (values, offsets) in made["columns"].items()
    }
    own: dict[str, Any] = {name: arrays[at] for name, at in made["arrays"].items()}
    own["aligned_RC" if made["kind"] == "slice" else "aligned_RT"] = {
        name: arrays[at] for name, at in made["aligned"].items()
    }
    if "shares" in made:
        nothing = EncoderShare.of_nothing(int(made["ranks"]), int(made["values_per_patch"]))
        first, *others = (_share(told, arrays, nothing) for told in made["shares"])
        own["encoding"] = replace(first, others=tuple(others))
    return _KINDS[made["kind"]](columns_K=columns, **own)


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
    kinds = [np.dtype(kind) for kind, _ in shapes]
    # Bytes read as objects would be addresses in this process.
    if wrong := [str(kind) for kind in kinds if kind.kind not in _NUMBERS]:
        raise ValueError(f"an array is of type {wrong[0]}, which is no number")
    sizes = [
        kind.itemsize * int(np.prod(shape, dtype=np.int64))
        for kind, (_, shape) in zip(kinds, shapes, strict=True)
    ]
    starts = list(_starts(length, sizes))
    if starts[-1] != len(data_B):
        raise ValueError(f"their head speaks of {starts[-1]} bytes")
    for kind, (_, shape), start, size in zip(kinds, shapes, starts, sizes, strict=False):
        yield data_B[start : start + size].view(kind).reshape(shape)


def _starts(length: int, sizes: list[int]) -> Iterator[int]:
    """Yield where each array starts, and where the last one ends."""
    at = _LENGTH_BYTES + length
    for size in sizes:
        at = -(-at // _ALIGNMENT) * _ALIGNMENT
        yield at
        at += size
    yield at


def _arrays_of(part: Microbatch | CpSlice | EncoderShare) -> Iterator[tuple[str, NDArray[Any]]]:
    """Yield its own arrays, as far as it has them."""
    for each in fields(part):
        value = getattr(part, each.name)
        if isinstance(value, np.ndarray):
            yield each.name, value


def _plain_names() -> list[str]:
    return [each.name for each in fields(Batch) if each.name != "microbatches"]

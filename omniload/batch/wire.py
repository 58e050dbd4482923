"""A batch as one run of bytes, and back: what a rank broadcasts to the peers that train on the same rows.

::

    length of the head, 8 bytes │ head, JSON │ array │ array │ ...      each array at a multiple of 64 bytes

Both ends are of one job. What is read back shares the memory of the bytes.

Shape suffixes:
    B  bytes
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from omniload.base.errors import IntegrityError
from omniload.base.ragged import Ragged
from omniload.batch.encoding import EncoderShare
from omniload.batch.microbatch import Batch, CpSlice, Microbatch

__all__ = ["from_bytes", "to_bytes"]

_VERSION = 2
_LENGTH_BYTES = 8
_ALIGNMENT = 64
_KINDS: Mapping[str, type[Microbatch] | type[CpSlice]] = {"rows": Microbatch, "slice": CpSlice}
_SHARE_ARRAYS = ("grids_I2", "keys_I4", "sends_W", "receives_W", "places_E")
_NUMBERS = "biuf"
"""Kinds of numpy's types that an array may have: truth, whole numbers, floating point."""


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
        if isinstance(microbatch, Microbatch) and (share := microbatch.encoding) is not None:
            made["encoding"] = {name: kept(getattr(share, name)) for name in _SHARE_ARRAYS}
            made["images"] = [kept(share.images_I.values_V), kept(share.images_I.offsets)]
        microbatches.append(made)
    head = {
        "version": _VERSION,
        "batch": {name: getattr(batch, name) for name in _plain_names()},
        "microbatches": microbatches,
        "arrays": [[array.dtype.str, list(array.shape)] for array in arrays],
    }
    text = json.dumps(head).encode()
    starts = list(_starts(len(text), [array.nbytes for array in arrays]))
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
        head = json.loads(data_B[_LENGTH_BYTES : _LENGTH_BYTES + length].tobytes())
        if head["version"] != _VERSION:
            raise IntegrityError(
                f"a batch has wire version {head['version']}, this rank reads {_VERSION}; "
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
    if "encoding" in made:
        values, offsets = made["images"]
        own["encoding"] = EncoderShare(
            images_I=Ragged(values_V=arrays[values], offsets=arrays[offsets]),
            **{name: arrays[at] for name, at in made["encoding"].items()},
        )
    return _KINDS[made["kind"]](columns_K=columns, **own)


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


def _arrays_of(microbatch: Microbatch | CpSlice) -> Iterator[tuple[str, NDArray[Any]]]:
    """Yield its own arrays, as far as it has them."""
    for field in fields(microbatch):
        value = getattr(microbatch, field.name)
        if isinstance(value, np.ndarray):
            yield field.name, value


def _plain_names() -> list[str]:
    return [field.name for field in fields(Batch) if field.name != "microbatches"]

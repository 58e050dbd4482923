"""One entry of a token cache: what the text of a unit became, as bytes.

::

    OMNITOKS | version | header's bytes | header (JSON) | flags | keys | lengths, values of each column | check
       8          4            4                                                                            16

Every part begins at a multiple of 8 bytes. The check covers all that stands before it, so that an entry
which is cut short or half written is none. Numbers are little-endian.

Shape suffixes:
    B  records of the unit        V  values of all records together
"""

import hashlib
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import numpy as np
import orjson
import xxhash
from numpy.typing import NDArray
from pydantic import Field, ValidationError

from omniload.base.config import StrictModel
from omniload.base.errors import IntegrityError
from omniload.base.ragged import Ragged, offsets_of
from omniload.mix.columns import column_kind
from omniload.source.formats.format import Records

__all__ = ["ENTRY_VERSION", "EncodedUnit", "Seal", "packed", "unpacked"]

ENTRY_VERSION = 1
"""Of the bytes; enters the name of a folder, so that releases of two versions can share a cache."""

_MAGIC = b"OMNITOKS"
_FIXED = struct.Struct("<8sII")
_CHECK_BYTES = 16
_TOKENS = "tokens"
_SHORT = np.dtype("<u2")
_FLAGS = ("bad_B", "kept_B", "given_B", "made_B", "spoilt_B")
_Size = Annotated[int, Field(ge=0, le=1 << 40)]


class _Column(StrictModel):
    name: str
    dtype: Literal["<u2", "<i4", "<i8", "<f4", "<f8", "|b1", "|u1"]
    values: _Size


class _Header(StrictModel):
    of: str
    """Name of the entry: one that was renamed is none."""
    records: _Size
    has_keys: bool
    reason: str
    spoilt: str
    columns: tuple[_Column, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodedUnit:
    """The records of a unit of text and the sample of each that was wanted, before any transform of tokens."""

    tokens: Ragged
    """Token ids (int32), ``[B]``; empty where no sample was made."""
    others: Mapping[str, Ragged] = field(default_factory=dict)
    """Further columns by name."""
    bad_B: NDArray[np.bool_]
    """The format could not decode the record."""
    kept_B: NDArray[np.bool_]
    """No condition of the source leaves it out."""
    given_B: NDArray[np.bool_]
    """Its text was not empty."""
    made_B: NDArray[np.bool_]
    """A sample was made of it, which may be empty."""
    spoilt_B: NDArray[np.bool_]
    """It was to be made a sample and could not be."""
    keys_B: NDArray[np.uint64] | None = None
    """As of ``Records``; there wherever the source has splits."""
    reason: str = ""
    """What is wrong with the first bad record."""
    spoilt: str = ""
    """What is wrong with the first record that could not be made a sample."""

    @property
    def records(self) -> Records:
        """The records as a format would give them, but for their texts."""
        return Records(
            column=self.tokens,
            bad_B=self.bad_B,
            reason=self.reason,
            keys_B=self.keys_B,
            kept_B=self.kept_B,
        )


class Seal:
    """What shows that an entry is whole; with a key, also that somebody who has the key wrote it.

    Args:
        key: The content of a file that those who share a cache have; empty for none.
    """

    def __init__(self, key: bytes = b"") -> None:
        # A key of BLAKE2b has 64 bytes at most; a file may hold more.
        self._key = hashlib.blake2b(key, digest_size=64).digest() if key else b""
        self.name = hashlib.blake2b(self._key, digest_size=6).hexdigest() if key else "plain"
        """Enters the name of a folder: entries of another key are not looked at."""

    @property
    def has_key(self) -> bool:
        """Whether the writer is known by it."""
        return bool(self._key)

    def check_of(self, data: bytes | memoryview) -> bytes:
        """Return 16 bytes: XXH3 at 10 GB/s and more, or keyed BLAKE2b at about 1 GB/s (one core)."""
        if not self._key:
            return xxhash.xxh3_128_digest(data)
        return hashlib.blake2b(data, key=self._key, digest_size=_CHECK_BYTES).digest()


def packed(name: str, unit: EncodedUnit, seal: Seal) -> bytes:
    """Return the bytes of an entry."""
    columns = {_TOKENS: unit.tokens, **unit.others}
    stored = {key: _narrowed(key, column.values_V) for key, column in columns.items()}
    header = _Header(
        of=name,
        records=len(unit.tokens),
        has_keys=unit.keys_B is not None,
        reason=unit.reason,
        spoilt=unit.spoilt,
        columns=tuple(
            _Column.model_validate({"name": key, "dtype": values.dtype.str, "values": len(values)})
            for key, values in stored.items()
        ),
    )
    text = orjson.dumps(header.model_dump())
    flags_B = np.zeros(len(unit.tokens), np.uint8)
    for bit, flag in enumerate(_FLAGS):
        # Five truths to a byte: they are of every record, whether it gives a sample or not.
        flags_B |= getattr(unit, flag).astype(np.uint8) << np.uint8(bit)
    parts: list[NDArray[Any]] = [flags_B]
    if unit.keys_B is not None:
        parts.append(unit.keys_B.astype("<u8"))
    for key, column in columns.items():
        # Lengths and not offsets: half the bytes, and nothing in them can lead backwards.
        parts += [column.lengths_N.astype("<u4"), stored[key]]
    out = bytearray(_FIXED.pack(_MAGIC, ENTRY_VERSION, len(text)) + text)
    for part in parts:
        # At a multiple of 8, so that arrays are read where they lie.
        out += bytes(-len(out) % 8)
        out += part.tobytes()
    return bytes(out) + seal.check_of(memoryview(out))


def unpacked(
    name: str,
    data: bytes | bytearray | memoryview,
    seal: Seal,
    records: int | None = None,
) -> EncodedUnit:
    """Return what an entry holds; numbers are looked at as well, for a plain check proves no author.

    Raises:
        IntegrityError: It is not whole, of another name or version, of other than so many ``records``, or no seal of
            ours.
    """
    view = memoryview(data)
    if len(view) < _FIXED.size + _CHECK_BYTES:
        raise IntegrityError(f"holds {len(view)} bytes, which is no entry")
    body, check = view[:-_CHECK_BYTES], bytes(view[-_CHECK_BYTES:])
    # Before anything in it is looked at.
    if seal.check_of(body) != check:
        raise IntegrityError("is cut short, damaged, or written with another key")
    try:
        unit = _parsed(name, body, records)
        _require_sound(unit)
    except (ValueError, ValidationError, orjson.JSONDecodeError) as error:
        raise IntegrityError(f"is no entry of this name: {error}") from error
    return unit


def _parsed(name: str, body: memoryview, records: int | None) -> EncodedUnit:
    magic, version, size = _FIXED.unpack_from(body)
    if magic != _MAGIC or version != ENTRY_VERSION:
        raise ValueError(f"begins with {magic!r}, version {version}")
    header = _Header.model_validate(orjson.loads(body[_FIXED.size : _FIXED.size + size]))
    if header.of != name:
        raise ValueError(f"is of {header.of:.80}")
    # Records of a block are looked up by their numbers: one that is missing would end the run.
    if records not in (None, header.records):
        raise ValueError(f"holds {header.records} records, and its unit {records}")
    arrays = _arrays(body, _FIXED.size + size, header)
    flags_B = next(arrays)
    keys_B = next(arrays) if header.has_keys else None
    columns = {}
    for column in header.columns:
        lengths_B, values_V = next(arrays), next(arrays)
        offsets = offsets_of(lengths_B)
        dtype = np.dtype(np.int32) if column.name == _TOKENS else column_kind(column.name).dtype
        columns[column.name] = Ragged(values_V=values_V.astype(dtype, copy=False), offsets=offsets)
    return EncodedUnit(
        tokens=columns.pop(_TOKENS),
        others=columns,
        keys_B=keys_B,
        reason=header.reason,
        spoilt=header.spoilt,
        **{flag: flags_B >> np.uint8(bit) & np.uint8(1) > 0 for bit, flag in enumerate(_FLAGS)},
    )


def _arrays(body: memoryview, at: int, header: _Header) -> Iterator[NDArray[Any]]:
    """Yield the arrays of an entry in their order.

    Raises:
        ValueError: One reaches behind the end.
    """
    wanted = [("|u1", header.records)]
    if header.has_keys:
        wanted.append(("<u8", header.records))
    for column in header.columns:
        if column.name != _TOKENS:
            _require_kind(column.name)
        wanted += [("<u4", header.records), (column.dtype, column.values)]
    if [at for at, column in enumerate(header.columns) if column.name == _TOKENS] != [0]:
        raise ValueError("has not one column of tokens, the first")
    for dtype, count in wanted:
        at += -at % 8
        # Without a copy; numpy refuses a count that reaches behind the end.
        yield np.frombuffer(body, dtype, count, at) if count else np.empty(0, dtype)
        at += count * np.dtype(dtype).itemsize


def _require_kind(name: str) -> None:
    """Refuse a column that no source gives.

    Raises:
        ValueError: Its name is of no kind.
    """
    try:
        column_kind(name)
    except KeyError as error:
        raise ValueError(f"has a column {name!r:.80}") from error


def _require_sound(unit: EncodedUnit) -> None:
    """Refuse numbers that no source gives.

    Raises:
        ValueError: Lengths do not fit values or tokens, or a token id is negative.
    """
    for name, column in {_TOKENS: unit.tokens, **unit.others}.items():
        if column.offsets[-1] != len(column.values_V):
            raise ValueError(f"{name} has {len(column.values_V)} values for {column.offsets[-1]}")
        aligned = name != _TOKENS and column_kind(name).aligned
        if aligned and not np.array_equal(column.offsets, unit.tokens.offsets):
            raise ValueError(f"{name} has not a value for each token")
    if unit.tokens.values_V.min(initial=0) < 0:
        raise ValueError("a token id is negative")


def _narrowed(name: str, values_V: NDArray[Any]) -> NDArray[Any]:
    """Return token ids in two bytes where all of them fit; other columns as they are, little-endian."""
    short = values_V.max(initial=0) <= np.iinfo(_SHORT).max and values_V.min(initial=0) >= 0
    # Most vocabularies end below 65,536: half the bytes to keep, and to read.
    if name == _TOKENS and short:
        return values_V.astype(_SHORT)
    return np.ascontiguousarray(values_V, values_V.dtype.newbyteorder("<"))

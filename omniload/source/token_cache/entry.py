"""One entry of a token cache: the samples of a unit of text, as bytes.

::

    OMNITOKS | version | header's bytes | header (JSON) | flags | keys | lengths, values of each column | check
       8          4            4                                                                            16

Every part begins at a multiple of 8 bytes. The check covers everything before it, so a truncated or incomplete entry is
invalid. Numbers are little-endian.

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
"""Version of the bytes; part of the name of a folder, so that releases of two versions can share a cache."""

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
    """Name of the entry; a renamed entry is invalid."""
    records: _Size
    has_keys: bool
    reason: str
    spoilt: str
    columns: tuple[_Column, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodedUnit:
    """The records of a unit of text, with the wanted samples, before any transform of tokens."""

    tokens: Ragged
    """Token ids (int32), ``[B]``; empty for a record without a sample."""
    others: Mapping[str, Ragged] = field(default_factory=dict)
    """Further columns by name."""
    bad_B: NDArray[np.bool_]
    """Whether the format could not decode the record."""
    kept_B: NDArray[np.bool_]
    """Whether no condition of the source leaves the record out."""
    given_B: NDArray[np.bool_]
    """Whether its text was not empty."""
    made_B: NDArray[np.bool_]
    """Whether a sample was made of it, which may be empty."""
    spoilt_B: NDArray[np.bool_]
    """Whether a sample was wanted, but could not be made."""
    keys_B: NDArray[np.uint64] | None = None
    """Keys as in ``Records``; present whenever the source has splits."""
    reason: str = ""
    """Fault of the first bad record."""
    spoilt: str = ""
    """Fault of the first record that could not be made into a sample."""

    @property
    def records(self) -> Records:
        """The records as a format would return them, but without their texts."""
        return Records(
            column=self.tokens,
            bad_B=self.bad_B,
            reason=self.reason,
            keys_B=self.keys_B,
            kept_B=self.kept_B,
        )


class Seal:
    """Verifies that an entry is complete and, with a key, that an owner of the key wrote it.

    Args:
        key: Content of a file that the users of a shared cache have; empty for none.
    """

    def __init__(self, key: bytes = b"") -> None:
        # A key of BLAKE2b has at most 64 bytes, but a file may have more.
        self._key = hashlib.blake2b(key, digest_size=64).digest() if key else b""
        self.name = hashlib.blake2b(self._key, digest_size=6).hexdigest() if key else "plain"
        """Part of the name of a folder, so that entries under another key are not read."""

    @property
    def has_key(self) -> bool:
        """Whether the seal authenticates the writer."""
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
        # Five booleans in a byte; every record has them, with or without a sample.
        flags_B |= getattr(unit, flag).astype(np.uint8) << np.uint8(bit)
    parts: list[NDArray[Any]] = [flags_B]
    if unit.keys_B is not None:
        parts.append(unit.keys_B.astype("<u8"))
    for key, column in columns.items():
        # Lengths instead of offsets: half the bytes, and no length can point backwards.
        parts += [column.lengths_N.astype("<u4"), stored[key]]
    out = bytearray(_FIXED.pack(_MAGIC, ENTRY_VERSION, len(text)) + text)
    for part in parts:
        # Aligned to 8 bytes, so that arrays can be read without a copy.
        out += bytes(-len(out) % 8)
        out += part.tobytes()
    return bytes(out) + seal.check_of(memoryview(out))


def unpacked(
    name: str,
    data: bytes | bytearray | memoryview,
    seal: Seal,
    records: int | None = None,
) -> EncodedUnit:
    """Return the content of an entry. Numbers are checked as well, because a plain check does not prove the author.

    Raises:
        IntegrityError: The entry is incomplete, of another name or version, has another number of ``records``, or a
            wrong seal.
    """
    view = memoryview(data)
    if len(view) < _FIXED.size + _CHECK_BYTES:
        raise IntegrityError(f"holds {len(view)} bytes, which is no entry")
    body, check = view[:-_CHECK_BYTES], bytes(view[-_CHECK_BYTES:])
    # Checked before any content is used.
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
    # Records of a block are looked up by number, and a missing one would end the run.
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
    """Yield the arrays of an entry, in order.

    Raises:
        ValueError: An array reaches beyond the end.
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
        # Without a copy; numpy refuses a count that reaches beyond the end.
        yield np.frombuffer(body, dtype, count, at) if count else np.empty(0, dtype)
        at += count * np.dtype(dtype).itemsize


def _require_kind(name: str) -> None:
    """Raise an error for a column that no source gives.

    Raises:
        ValueError: The name is of no known kind.
    """
    try:
        column_kind(name)
    except KeyError as error:
        raise ValueError(f"has a column {name!r:.80}") from error


def _require_sound(unit: EncodedUnit) -> None:
    """Raise an error for numbers that no source gives.

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
    """Return token ids in two bytes if all of them fit; other columns unchanged, in little-endian order."""
    short = values_V.max(initial=0) <= np.iinfo(_SHORT).max and values_V.min(initial=0) >= 0
    # Most vocabularies end below 65,536, which halves the bytes to store and to read.
    if name == _TOKENS and short:
        return values_V.astype(_SHORT)
    return np.ascontiguousarray(values_V, values_V.dtype.newbyteorder("<"))

"""MDS, the shards of Mosaic's streaming library: a table of offsets, and samples end to end.

A shard, all numbers little-endian::

    samples, N                    uint32
    first byte of each, and end   uint32[N + 1]
    the columns as JSON           (index.json says the same)
    N samples

``parsing.mds_shards`` reads the content of a sample, and the description of each shard in ``index.json``.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from typing_extensions import override

from omniload.base.errors import ConfigError, IntegrityError
from omniload.base.ragged import Ragged, gather_ranges
from omniload.mix.columns import column_kind, name_outside
from omniload.mix.schema.splits import key_of
from omniload.mix.sources import MdsSource
from omniload.source.columns import text_array
from omniload.source.files import ShardFile, beside, reading
from omniload.source.formats.content import digest_of_ranges, even_ranges
from omniload.source.formats.format import MAX_UNIT_BYTES, IndexedFormat, Records
from omniload.source.formats.spec import FormatSpec
from omniload.source.index import FileUnits, IndexCache, index_of
from omniload.source.parsing.arrays.beside import with_numbers
from omniload.source.parsing.arrow_columns import records_of
from omniload.source.parsing.conditions import kept_records, wanted_kind
from omniload.source.parsing.cutting import cuts, require_sizes
from omniload.source.parsing.json_lines.lines import BadLineError, number_in
from omniload.source.parsing.mds_arrays import DTYPE_OF_CODE, ids_in, numbers_in, numbers_of
from omniload.source.parsing.mds_shards import (
    MdsShard,
    column_in,
    encoding_in,
    require_column,
    shards_in,
)
from omniload.source.parsing.shard_lists import listed_once, read_json
from omniload.source.parsing.table_records import fault_of_numbers, with_others
from omniload.source.parsing.token_lists import RowsAt, row_at
from omniload.source.patterns import FileNames
from omniload.source.sample_tags import said_of_tag

__all__ = ["FORMAT", "MdsFormat"]

_INDEX = "index.json"
_TEXT = "str"
_INTEGERS = {"int": np.dtype("<i8")} | {
    f"{sign}int{8 * width}": np.dtype(f"<{sign or 'i'}{width}")
    for sign in ("", "u")
    for width in (1, 2, 4, 8)
}
_NUMBERS = _INTEGERS | {f"float{8 * width}": np.dtype(f"<f{width}") for width in (2, 4, 8)}
"""Encodings of numbers, and their types."""
_KINDS = {"text": {_TEXT}, "number": {*_NUMBERS, "str_int", "str_float", "str_decimal"}}
"""Encodings of values for each kind of condition; no encoding is boolean."""
_KEYS = {_TEXT, *_INTEGERS}
"""Encodings that a key of a document may have."""


class MdsFormat(IndexedFormat):
    """Reads a column of text or token ids; a unit is a range of samples, numbered within their shard."""

    def __init__(
        self,
        files: Sequence[ShardFile],
        described: Sequence[MdsShard],
        config: MdsSource,
        cache: IndexCache | None = None,
    ) -> None:
        self.holds_text = config.holds_text
        self._files, self._described, self._config = files, described, config
        # Stored here, because a property of the configuration is computed at each access, and there are many units.
        self._key = config.key_column
        self._own = config.columns_read
        self._names = {config.column, *config.where, *filter(None, [self._key])}
        self._names.update(self._own.values())
        self._of_path = {file.path: each for file, each in zip(files, described, strict=True)}
        for file, each in zip(files, described, strict=True):
            # Checked here, not when shards are indexed, because a kept index serves every column.
            require_column(file.path, each, config)
            _require_asked(file.path, each, config)
        self._units = index_of(
            files, self._index, kind=f"mds/{config.unit}", cache=cache, unpacks=True
        )

    @override
    def read_unit(self, unit: int) -> Records:
        shard, start, stop, _ = self._units[unit]
        file, described = self._files[shard], self._described[shard]
        where = RowsAt(where=file.path, first=start, word="sample")
        with reading(file, f"samples {start} to {stop}"):
            whole = _decompressed(file, described)
            offsets = _offsets(file, whole, start, stop)
            _require_rising(file, offsets, described)
            first, last = int(offsets[0]), int(offsets[-1])
            data = _range_of(file, whole, first, last)
        bytes_V, ends = np.frombuffer(data, np.uint8), offsets - first
        columns = {
            name: (column_in(bytes_V, ends, described, name, where), encoding)
            for name, encoding in zip(described.columns, described.encodings, strict=True)
            if name in self._names
        }
        return self._records(columns, where, stop - start)

    def _records(
        self, columns: Mapping[str, tuple[Ragged, str]], where: RowsAt, count: int
    ) -> Records:
        """Return ``count`` samples of some columns, each with its encoding, as records."""
        name, asked = self._config.column, self._config.where

        def value_at(column: str, i: int) -> str | int | float:
            values, encoding = columns[column]
            return _value_of(values[i].tobytes(), column, encoding)

        kept_B, faults = None, dict[int, str]()
        if asked:
            kept_B, faults = kept_records(
                asked, lambda i: {column: value_at(column, i) for column in asked}, count
            )
        values, encoding = columns[name]
        if self.holds_text:
            texts = pa.chunked_array([text_array(values)])
            records = records_of(texts, where, "text", kept_B, named=(name,))
        else:
            records = ids_in(values, encoding, self._config.dtype, (where, name), kept_B)
        for inside, column in self._own.items():
            add = _with_tag if column_kind(inside).is_tag else _with_numbers
            records = add(records, inside, *columns[column], where)
        if self._key is not None:
            keys_B = np.zeros(count, np.uint64)
            for i in range(count):
                try:
                    keys_B[i] = key_of(str(value_at(self._key, i)).encode())
                except BadLineError as error:
                    if kept_B is None or kept_B[i]:
                        faults.setdefault(i, str(error))
            records = replace(records, keys_B=keys_B)
        return records.with_faults(faults, partial(row_at, where))

    def _index(self, file: ShardFile) -> FileUnits:
        described = self._of_path[file.path]
        with reading(file, "its offsets"):
            whole = _decompressed(file, described)
            if whole is None and file.size_bytes != described.size_bytes:
                raise IntegrityError(
                    f"{file.path}: holds {file.size_bytes} bytes, but {described.size_bytes} by its index; replace "
                    "one of them"
                )
            offsets = _offsets(file, whole, 0, described.samples)
            _require_rising(file, offsets, described)
            if offsets[-1] != described.size_bytes:
                raise IntegrityError(
                    f"{file.path}: its samples end at byte {offsets[-1]} of {described.size_bytes}; replace it"
                )
            content = digest_of_ranges(file, even_ranges(file.size_bytes))
        # A compressed shard is decompressed completely, whatever part of it is read.
        unit_bytes = self._config.unit if whole is None else MAX_UNIT_BYTES
        found = cuts([offsets[1:] - offsets[0]], unit_bytes)
        require_sizes(file, found.stops_U - found.starts_U)
        records_U = found.records_U
        return FileUnits(
            rows=np.diff(records_U), starts=records_U[:-1], stops=records_U[1:], content=content
        )


def _decompressed(file: ShardFile, described: MdsShard) -> bytes | None:
    """Return the bytes of a compressed shard, at most as many as its index says; ``None`` for a plain file.

    Raises:
        ConfigError: The shard is larger than the limit of decoding in memory.
        IntegrityError: The shard has more or fewer bytes than the index says.
    """
    if not described.zipped or not file.path.endswith(described.zipped):
        return None
    # Checked before memory is taken, because the index may be damaged like any other file.
    if described.size_bytes > MAX_UNIT_BYTES:
        raise ConfigError(
            f"{file.path}: holds {described.size_bytes} bytes when decompressed, more than {MAX_UNIT_BYTES}, and a "
            "compressed shard is decoded whole; write smaller shards, or plain ones"
        )
    with pa.CompressedInputStream(file.open(), "zstd") as stream:
        data: bytes = stream.read(described.size_bytes + 1)
    if len(data) != described.size_bytes:
        raise IntegrityError(
            f"{file.path}: holds {'more' if len(data) > described.size_bytes else len(data)} bytes when decompressed, "
            f"{described.size_bytes} by its index; replace one of them"
        )
    return data


def _range_of(file: ShardFile, whole: bytes | None, start: int, stop: int) -> bytes:
    """Return a range of a shard, from the decompressed bytes if the shard is compressed."""
    if whole is not None:
        return whole[start:stop]
    return file.read_range(start, stop) if stop > start else b""


def _offsets(file: ShardFile, whole: bytes | None, start: int, stop: int) -> NDArray[np.int64]:
    """Return the first byte of samples ``start`` to ``stop``, and of the sample after them."""
    begin, end = 4 * (1 + start), 4 * (2 + stop)
    data = _range_of(file, whole, begin, end)
    if len(data) < end - begin:
        raise IntegrityError(f"{file.path}: ends before the offset of sample {stop}; replace it")
    return np.frombuffer(data, "<u4").astype(np.int64)


def _require_rising(file: ShardFile, offsets: NDArray[np.int64], described: MdsShard) -> None:
    least = 4 * (2 + described.samples)
    if offsets[0] < least or offsets[-1] > described.size_bytes or (np.diff(offsets) < 0).any():
        raise IntegrityError(
            f"{file.path}: its samples lie from byte {offsets[0]} to {offsets[-1]}, not one after the other between "
            f"{least} and {described.size_bytes}; replace it"
        )


def _require_asked(path: str, described: MdsShard, config: MdsSource) -> None:
    """Raise an error for a shard that lacks a column of keys or conditions, or has one of another kind.

    Raises:
        ConfigError: Names the columns of the shard.
    """
    if (key := config.key_column) is not None:
        encoding = encoding_in(path, described, key, by=" for key")
        if encoding not in _KEYS:
            raise ConfigError(
                f"{path}: column {key!r} is {encoding}, not texts or integers, as a key is"
            )
    for inside, column in config.columns_read.items():
        _require_numbers(path, described, column, inside)
    for column, condition in config.where.items():
        encoding = encoding_in(path, described, column, by=" for where")
        wanted = wanted_kind(condition)
        if encoding not in _KINDS.get(wanted, ()):
            raise ConfigError(
                f"{path}: column {column!r} is {encoding}, not a {wanted}, as where.{column} asks for"
            )


def _require_numbers(path: str, described: MdsShard, column: str, inside: str) -> None:
    """Raise an error for a user's column without numbers that fit its type.

    Raises:
        ConfigError: Names the content of the shard.
    """
    name, dtype = name_outside(inside), column_kind(inside).dtype
    encoding = encoding_in(path, described, column, by=f" for columns.{name}")
    if (tag := column_kind(inside)).is_tag:
        stored = _NUMBERS.get(encoding, np.dtype(np.bool_))
        if dtype == np.uint8:
            fits = encoding == _TEXT
        else:
            fits = stored.kind in "iu" or (stored.kind == "f" and dtype.kind == "f")
        if not fits:
            raise ConfigError(
                f"{path}: column {column!r} is {encoding}, not {said_of_tag(tag)}, as columns.{name} is"
            )
        return
    kind, _, rest = encoding.partition(":")
    named = rest.partition(":")[0]
    numbers = {
        each.name for each in DTYPE_OF_CODE.values() if each.kind != "f" or dtype.kind == "f"
    }
    if kind not in {"ndarray", "bytes"} or (named and named not in numbers):
        raise ConfigError(
            f"{path}: column {column!r} is {encoding}, not ndarray of numbers of {dtype}, or bytes of them, as "
            f"columns.{name} is"
        )


def _with_numbers(
    records: Records, inside: str, values: Ragged, encoding: str, where: RowsAt
) -> Records:
    """Add a user's column to records; a record whose numbers do not fit the column is bad."""
    kind, lengths_B = column_kind(inside), records.column.lengths_N
    column, unlike_B, is_array_B = numbers_in(values, encoding, kind.dtype)

    def fault_of(row: int) -> str:
        if not is_array_B[row]:
            return "is no array of numbers"
        # In the stored type, because a conversion to the wanted type would replace a number that does not fit.
        stored = numbers_of(values[row], encoding, kind.dtype)
        return fault_of_numbers(stored, inside, int(lengths_B[row]))

    unlike_B |= column.lengths_N != lengths_B
    return with_numbers(records, inside, column, unlike_B, fault_of, where)


def _with_tag(
    records: Records, inside: str, values: Ragged, encoding: str, where: RowsAt
) -> Records:
    """Add a user's column with one value per sample to records; a record without such a value is bad."""
    stored = _NUMBERS.get(encoding)
    if stored is None:
        return with_others(records, {inside: pa.chunked_array([text_array(values)])}, where)
    whole_B = values.lengths_N == stored.itemsize
    starts = np.where(whole_B, values.offsets[:-1], 0)
    cells_V, _ = gather_ranges(values.values_V, starts, starts + whole_B * stored.itemsize)
    numbers_B = np.zeros(len(values), stored)
    numbers_B[whole_B] = cells_V.view(stored)
    said = f"{name_outside(inside)} is no {encoding}, which has {stored.itemsize} bytes"
    records = records.with_faults(
        dict.fromkeys(np.flatnonzero(~whole_B & records.usable_B).tolist(), said),
        partial(row_at, where),
    )
    return with_others(records, {inside: pa.chunked_array([pa.array(numbers_B)])}, where)


def _value_of(cell: bytes, column: str, encoding: str) -> str | int | float:
    """Return the value of a sample in a column of texts or numbers.

    Raises:
        BadLineError: The bytes do not encode such a value.
    """
    dtype = _NUMBERS.get(encoding)
    if dtype is not None and len(cell) == dtype.itemsize:
        found: int | float = np.frombuffer(cell, dtype)[0].item()
        return found
    if dtype is not None:
        raise BadLineError(f"{column!r} has {len(cell)} bytes, and {encoding} has {dtype.itemsize}")
    try:
        text = cell.decode()
    except UnicodeDecodeError as error:
        raise BadLineError(f"{column!r} is not UTF-8: {error}") from error
    read = text if encoding == _TEXT else number_in(text)
    if read is None:
        raise BadLineError(f"{column!r} is {text!r:.40}, and no number, as {encoding} is")
    return read


def _shards(files: Sequence[ShardFile], _: object) -> tuple[ShardFile, ...]:
    """Replace each index by its shards, by their plain or compressed files; compressed ones if both are there."""
    found: list[tuple[str, ShardFile]] = []
    for file in files:
        folder, _, name = file.path.rpartition("/")
        if name != _INDEX:
            raise ConfigError(f"{file.path}: is no {_INDEX}; name the folder that holds one")
        for each in shards_in(file, read_json(file)):
            shard = replace(_present(file, each), beside=(file,))
            found.append((f"{folder}/{each.name}", shard))
    return listed_once(found)


def _present(index: ShardFile, described: MdsShard) -> ShardFile:
    if not described.zipped:
        return beside(index, described.name)
    try:
        return beside(index, described.zipped)
    except IntegrityError:
        return beside(index, described.name)


def _opened(files: Sequence[ShardFile], config: MdsSource, cache: IndexCache | None) -> MdsFormat:
    # Each index is read once, not once for each of its shards.
    indexes = {file.beside[0].path: file.beside[0] for file in files}
    described: dict[str, MdsShard] = {}
    for path, index in indexes.items():
        folder = path.rpartition("/")[0]
        for each in shards_in(index, read_json(index)):
            # Under both names, because a shard may be present compressed or plain.
            described |= {f"{folder}/{name}": each for name in (each.name, each.zipped) if name}
    return MdsFormat(files, [described[file.path] for file in files], config, cache)


FORMAT = FormatSpec(
    what="a shard of MDS",
    names=FileNames(suffixes=frozenset(), manifest=_INDEX),
    open=_opened,
    knows_columns=True,
    shards=_shards,
)

"""Parquet shards: one row group is one unit, one column is read.

Shape suffixes:
    B  rows of a row group
"""

from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray
from typing_extensions import override

from omniload.base.errors import ConfigError, IntegrityError
from omniload.base.ragged import Ragged
from omniload.mix.sources import ParquetSource
from omniload.source.columns import drained, text_bytes
from omniload.source.content import digest_of_ranges, parquet_ranges
from omniload.source.files import ShardFile, reading
from omniload.source.formats.format import Format, Records, UnitTable
from omniload.source.formats.spec import FormatSpec
from omniload.source.index import FileUnits, IndexCache, index_of
from omniload.source.patterns import FileNames

__all__ = ["FORMAT", "ParquetFormat"]

_FIRST_ROWS = 64
_INT32_MAX = np.iinfo(np.int32).max


class ParquetFormat(Format):
    """Reads a column of text or of lists of integers."""

    def __init__(
        self,
        files: Sequence[ShardFile],
        *,
        column: str,
        holds_text: bool,
        cache: IndexCache | None = None,
    ) -> None:
        self.holds_text = holds_text
        self._files, self._column = files, column
        kind = f"parquet/{'text' if holds_text else 'tokens'}/{column}"
        self._units = index_of(files, self._index, kind=kind, cache=cache)
        # Consecutive units mostly share a shard; its footer is parsed once.
        self._opened: tuple[int, pq.ParquetFile] | None = None

    @override
    def units(self) -> UnitTable:
        return self._units

    @override
    def read_unit(self, unit: int) -> Records:
        shard, group = int(self._units.shards_U[unit]), int(self._units.starts_U[unit])
        part = f"row group {group}"
        with reading(self._files[shard], part):
            column = self._shard(shard).read_row_group(
                group, columns=[self._column], use_threads=False
            )[self._column]
        where = f"{self._files[shard].path}: {part}"
        if len(column) != self._units.rows_U[unit]:
            raise IntegrityError(
                f"{where}: holds {len(column)} rows of the {self._units.rows_U[unit]} in its footer"
            )
        return (_texts if self.holds_text else _tokens)(column, where)

    @override
    def first_records(self) -> Records:
        filled = np.flatnonzero(self._units.rows_U)
        if not len(filled):
            return Records.of_texts([])
        unit = int(filled[0])
        file = self._files[self._units.shards_U[unit]]
        group = int(self._units.starts_U[unit])
        part = f"row group {group}, its first rows"
        with reading(file, part), _open(file) as shard:
            batches = shard.iter_batches(
                _FIRST_ROWS, row_groups=[group], columns=[self._column], use_threads=False
            )
            column = pa.chunked_array([next(batches).column(0)])
        return (_texts if self.holds_text else _tokens)(column, f"{file.path}: {part}")

    def _shard(self, shard: int) -> pq.ParquetFile:
        if self._opened is None or self._opened[0] != shard:
            self._opened = None
            self._opened = shard, _open(self._files[shard])
        return self._opened[1]

    def _index(self, file: ShardFile) -> FileUnits:
        with reading(file, "footer"), _open(file) as shard:
            metadata, schema = shard.metadata, shard.schema_arrow
            rows = [metadata.row_group(i).num_rows for i in range(metadata.num_row_groups)]
            content = digest_of_ranges(file, parquet_ranges(file, metadata, self._column))
        if self._column not in schema.names:
            raise ConfigError(
                f"{file.path}: has no column {self._column!r}; it has {', '.join(schema.names)}"
            )
        found = schema.field(self._column).type
        if not (_is_text(found) if self.holds_text else _is_tokens(found)):
            wanted = "text (string)" if self.holds_text else "token ids (a list of integers)"
            raise ConfigError(
                f"{file.path}: column {self._column!r} is {found}, not {wanted}; "
                f"name another column or use the key {'tokens' if self.holds_text else 'text'}"
            )
        groups = np.arange(len(rows))
        return FileUnits(
            rows=np.array(rows, np.int64), starts=groups, stops=groups + 1, content=content
        )


def _open(file: ShardFile) -> pq.ParquetFile:
    # Pages written with a checksum are checked against it; without one the flag costs nothing.
    return pq.ParquetFile(file.open(), page_checksum_verification=True)


def _is_text(found: pa.DataType) -> bool:
    if pa.types.is_dictionary(found):
        return _is_text(found.value_type)
    return found in {pa.string(), pa.large_string(), pa.string_view()}


def _is_list(found: pa.DataType) -> bool:
    kinds = (pa.ListType, pa.LargeListType, pa.FixedSizeListType)
    return isinstance(found, kinds)


def _is_tokens(found: pa.DataType) -> bool:
    return _is_list(found) and bool(pa.types.is_integer(found.value_type))


def _null_reason(column: pa.ChunkedArray, bad_B: NDArray[np.bool_], where: str) -> str:
    return f"{where}: row {bad_B.argmax()}: is null" if column.null_count else ""


def _nulls(column: pa.ChunkedArray) -> NDArray[np.bool_]:
    if not column.null_count:
        return np.zeros(len(column), np.bool_)
    return np.asarray(column.is_null().to_numpy(), np.bool_)


def _texts(column: pa.ChunkedArray, where: str) -> Records:
    bad = _nulls(column)
    chunks = [chunk.cast(pa.large_string()) for chunk in column.chunks]
    try:
        for chunk in chunks:
            chunk.validate(full=True)
    except pa.ArrowInvalid:
        return _checked(column, where)
    return Records(
        column=drained([text_bytes(chunk) for chunk in chunks], np.dtype(np.uint8)),
        bad_B=bad,
        reason=_null_reason(column, bad, where),
    )


def _checked(column: pa.ChunkedArray, where: str) -> Records:
    """Decode text row by row, to find the rows that are not UTF-8."""
    texts: list[str | None] = []
    reason = ""
    for row, value in enumerate(column.cast(pa.large_binary()).to_pylist()):
        try:
            texts.append(None if value is None else value.decode())
            fault = "" if value is not None else "is null"
        except UnicodeDecodeError as error:
            texts.append(None)
            fault = f"is not UTF-8: {error}"
        reason = reason or (fault and f"{where}: row {row}: {fault}")
    return Records.of_texts(texts, reason)


def _tokens(column: pa.ChunkedArray, where: str) -> Records:
    bad = _nulls(column)
    return Records(
        column=drained([_ragged(chunk, where) for chunk in column.chunks], np.dtype(np.int32)),
        bad_B=bad,
        reason=_null_reason(column, bad, where),
    )


def _ragged(lists: pa.Array, where: str) -> Ragged:
    """Show a list array as token ids; int32 is not copied."""
    values = lists.flatten()
    if pa.types.is_fixed_size_list(lists.type) or lists.null_count:
        lengths = lists.value_lengths().fill_null(0).to_numpy(zero_copy_only=False)
        offsets = np.concatenate((np.zeros(1, np.int64), np.cumsum(lengths, dtype=np.int64)))
    else:
        stored = lists.offsets.to_numpy()
        offsets = stored.astype(np.int64) - int(stored[0])
    if values.null_count:
        raise IntegrityError(f"{where}: {values.null_count} token ids are null; write integers")
    ids = values.to_numpy()
    if len(ids) and (int(ids.min()) < 0 or int(ids.max()) > _INT32_MAX):
        worst = int(ids.min()) if int(ids.min()) < 0 else int(ids.max())
        raise IntegrityError(
            f"{where}: holds token id {worst}; a token id is from 0 to {_INT32_MAX}, write the shard anew"
        )
    return Ragged(values_V=ids.astype(np.int32, copy=False), offsets=offsets)


def _opened(config: ParquetSource, files: Sequence[ShardFile], cache: IndexCache | None) -> Format:
    return ParquetFormat(files, column=config.column, holds_text=config.holds_text, cache=cache)


FORMAT = FormatSpec(
    what="a Parquet file",
    names=FileNames(suffixes=frozenset({".parquet", ".parq", ".pq"})),
    open=_opened,
    magic=(((0, b"PAR1"),),),
)

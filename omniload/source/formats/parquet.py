"""Parquet shards: one row group is one unit, one column is read."""

import itertools
from collections.abc import Mapping, Sequence

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from typing_extensions import override

from omniload.base.errors import ConfigError, IntegrityError
from omniload.base.units import format_bytes
from omniload.mix.columns import NO_COLUMNS, TableColumn
from omniload.mix.schema.conditions import NO_CONDITIONS, Condition
from omniload.mix.sources import ParquetSource
from omniload.source.content import digest_of_ranges, parquet_ranges
from omniload.source.files import ShardFile, reading
from omniload.source.formats.format import MAX_UNIT_BYTES, Format, Records, UnitTable
from omniload.source.formats.spec import FormatSpec
from omniload.source.index import FileUnits, IndexCache, index_of
from omniload.source.parsing.arrow_columns import (
    Holds,
    as_objects,
    index_kind,
    kept_of,
    records_of,
    require_column,
    require_key,
    require_others,
    with_keys,
    with_others,
)
from omniload.source.parsing.conditions import require_where
from omniload.source.parsing.image_cells import require_images, with_images
from omniload.source.patterns import FileNames

__all__ = ["FORMAT", "ParquetFormat"]

_FIRST_ROWS = 64
_IMAGES_AT_ONCE = 16
"""Rows whose images are decoded before what they take is looked at."""


class ParquetFormat(Format):
    """Reads a column of text or of lists of integers."""

    def __init__(  # noqa: PLR0913 -- what the mix file says of the source
        self,
        files: Sequence[ShardFile],
        *,
        column: str,
        holds: Holds,
        cache: IndexCache | None = None,
        others: Mapping[TableColumn, str] = NO_COLUMNS,
        images: tuple[str, ...] = (),
        key: str | None = None,
        beside: tuple[str, ...] = (),
        where: Mapping[str, Condition] = NO_CONDITIONS,
    ) -> None:
        self.holds_text, self._holds = holds != "tokens", holds
        self._files, self._column, self._others, self._key = files, column, others, key
        self._images = images
        """The column of images, where it has one."""
        self._beside, self._where = beside, where
        """Columns that are read with the one of the text, as one object."""
        kind = index_kind(
            "parquet",
            holds=holds,
            column=column,
            others=others,
            images=images,
            key=key,
            beside=beside,
            where=where,
        )
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
            opened = self._shard(shard)
            table = opened.read_row_group(group, columns=self._columns(), use_threads=False)
            images = self._images_of(opened, group, self._files[shard].path)
            column = self._texts(table)
        where = f"{self._files[shard].path}: {part}"
        for rows in (len(column), *([] if images is None else [len(images)])):
            if rows != self._units.rows_U[unit]:
                raise IntegrityError(
                    f"{where}: holds {rows} rows of the {self._units.rows_U[unit]} in its footer"
                )
        kept_B = kept_of(self._where, table, len(column))
        records = records_of(column, where, self._holds, kept_B)
        others = {name: table[other] for name, other in self._others.items()}
        keys = None if self._key is None else table[self._key]
        records = with_keys(with_others(records, others, where), keys, where)
        return records if images is None else with_images(records, images)

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
                _FIRST_ROWS,
                row_groups=[group],
                columns=list(dict.fromkeys((self._column, *self._beside, *self._where))),
                use_threads=False,
            )
            table = pa.Table.from_batches([next(batches)])
        kept_B = kept_of(self._where, table, len(table))
        return records_of(self._texts(table), f"{file.path}: {part}", self._holds, kept_B)

    def _images_of(self, shard: pq.ParquetFile, group: int, path: str) -> pa.ChunkedArray | None:
        """Read the column of images a few rows at a time, within a limit.

        A footer counts what is written: one image that a dictionary holds for all rows is many when decoded.
        """
        if not self._images:
            return None
        parts, size_bytes = [], 0
        for batch in shard.iter_batches(
            _IMAGES_AT_ONCE, row_groups=[group], columns=list(self._images), use_threads=False
        ):
            parts.append(batch.column(0))
            size_bytes += parts[-1].nbytes
            _require_room(size_bytes, path, group)
        return pa.chunked_array(parts, type=shard.schema_arrow.field(self._images[0]).type)

    def _texts(self, table: pa.Table) -> pa.ChunkedArray:
        if not self._beside:
            return table[self._column]
        return as_objects({name: table[name] for name in (self._column, *self._beside)})

    def _columns(self) -> list[str]:
        """Return what is read of a row group at once: all but images."""
        every = (self._column, *self._beside, *self._others.values(), self._key, *self._where)
        return list(dict.fromkeys(name for name in every if name is not None))

    def _shard(self, shard: int) -> pq.ParquetFile:
        if self._opened is None or self._opened[0] != shard:
            # Let go of first: two footers at once are not needed, and may be large.
            self._opened = None
            self._opened = shard, _open(self._files[shard])
        return self._opened[1]

    def _index(self, file: ShardFile) -> FileUnits:
        with reading(file, "footer"), _open(file) as shard:
            metadata, schema = shard.metadata, shard.schema_arrow
            rows = [metadata.row_group(i).num_rows for i in range(metadata.num_row_groups)]
            read = [*self._columns(), *self._images]
            content = digest_of_ranges(file, parquet_ranges(file, metadata, read))
            self._require_columns(schema, file.path)
            for column, group in itertools.product(self._images, range(len(rows))):
                _require_room(_size_of(metadata.row_group(group), column), file.path, group)
        groups = np.arange(len(rows))
        return FileUnits(
            rows=np.array(rows, np.int64), starts=groups, stops=groups + 1, content=content
        )

    def _require_columns(self, schema: pa.Schema, path: str) -> None:
        """Refuse a shard without what is asked of it; names that are not UTF-8 are read here first."""
        for column in (self._column, *self._beside):
            require_column(schema, column, path, self._holds)
        require_others(schema, self._others, path)
        require_key(schema, self._key, path)
        require_where(schema, self._where, path)
        for column in self._images:
            require_images(schema, column, path)


def _size_of(group: pq.RowGroupMetaData, column: str) -> int:
    """Return the bytes of a column in a row group, decompressed, as its footer counts them."""
    chunks = (group.column(i) for i in range(group.num_columns))
    return sum(
        chunk.total_uncompressed_size
        for chunk in chunks
        if f"{chunk.path_in_schema}.".startswith(f"{column}.")
    )


def _require_room(size_bytes: int, path: str, group: int) -> None:
    """Refuse a row group whose images are more than are decoded in memory at once.

    Raises:
        ConfigError: With what to do.
    """
    if size_bytes > MAX_UNIT_BYTES:
        raise ConfigError(
            f"{path}: row group {group} holds {format_bytes(size_bytes)} of images or more, and a unit at most "
            f"{format_bytes(MAX_UNIT_BYTES)}; write it with fewer rows to a group (row_group_size)"
        )


def _open(file: ShardFile) -> pq.ParquetFile:
    # Pages written with a checksum are checked against it; without one the flag costs nothing. A reader that
    # buffers before it reads keeps the bytes of its last row group for as long as it is open: in each source.
    return pq.ParquetFile(file.open(), page_checksum_verification=True, pre_buffer=False)


def _opened(config: ParquetSource, files: Sequence[ShardFile], cache: IndexCache | None) -> Format:
    return ParquetFormat(
        files,
        column=config.column,
        holds=config.holds,
        cache=cache,
        others=config.columns,
        images=config.image_members,
        key=config.key_column,
        beside=config.pair_columns,
        where=config.where,
    )


FORMAT = FormatSpec(
    what="a Parquet file",
    names=FileNames(suffixes=frozenset({".parquet", ".parq", ".pq"})),
    open=_opened,
    magic=(((0, b"PAR1"),),),
)

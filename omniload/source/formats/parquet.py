"""Parquet shards: each row group is a unit, and one column is read."""

import itertools
from collections.abc import Sequence
from functools import cached_property

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray
from typing_extensions import override

from omniload.base.errors import ConfigError, IntegrityError
from omniload.base.ragged import Ragged
from omniload.base.units import format_bytes
from omniload.mix.sources import ParquetSource
from omniload.source.columns import PLAIN_TEXTS, Layer, Pieces, drained, is_utf8, lying, text_bytes
from omniload.source.files import ShardFile, reading
from omniload.source.formats.content import digest_of_ranges, parquet_ranges
from omniload.source.formats.format import (
    MAX_UNIT_BYTES,
    Format,
    Records,
    UnitTable,
)
from omniload.source.formats.spec import FormatSpec
from omniload.source.index import FileUnits, IndexCache, index_of
from omniload.source.parsing.arrow_columns import index_kind, kept_of, require_table
from omniload.source.parsing.nested_columns import column_of, types_of
from omniload.source.parsing.table_records import TableColumns
from omniload.source.parsing.token_lists import nulls_of
from omniload.source.patterns import FileNames
from omniload.source.survey.spread import evenly

__all__ = ["FORMAT", "ParquetFormat"]

_FIRST_ROWS = 64
_FOOTERS = 8
"""Most footers that are read for the sizes of row groups."""
_GROUPS = 16
"""Most row groups of a shard whose sizes are read from its footer, which has figures for every column of each."""
_TEXT_AT_ONCE, _MOST_AT_ONCE = 1 << 20, 16 << 20
"""Bytes of texts that are decoded at once: a target that fits in a core's cache, and a maximum for whole pages."""
_PAGE_ROWS = 1_024
"""Rows of a page: Arrow and most other writers end pages at multiples of this number.

Each part of a page that is decoded takes room for the rest of the page, and a part that spans two pages is moved when
the second page begins.
"""
_INDEX_BYTES, _HEADS_BYTES = 4, 1 << 16
"""Most bytes of a row that is a number into a dictionary, and approximate bytes of pages apart from their rows."""
_LEAST_SHARED = 4
"""Rows for each text of a dictionary from which reading numbers into the dictionary is faster."""
_MOST_TIMES, _ROOM_BYTES = 16, 64 << 20
"""Limits of the first room for the texts of a row group: a multiple of the file's size, or this many bytes if more."""
_LEAST_LOOKED = 1 << 16
"""Bytes of a row group below which a look at its conditions alone would take longer than the decoding of its texts."""
_NO_TABLE = pa.table({})
_IMAGES_AT_ONCE = 16
"""Rows whose images are decoded before their size is checked."""


class ParquetFormat(Format):
    """Reads a column of text or of lists of integers, one row group at a time."""

    def __init__(
        self, files: Sequence[ShardFile], config: ParquetSource, cache: IndexCache | None = None
    ) -> None:
        self.holds_text = config.holds != "tokens"
        self._files, self._config, self._columns = files, config, TableColumns(config)
        kind = index_kind("parquet", config)
        self._units = index_of(files, self._index, kind=kind, cache=cache)
        # Consecutive units mostly share a shard, whose footer is parsed only once.
        self._opened: tuple[int, pq.ParquetFile] | None = None
        self._indexed: pq.ParquetFile | None = None
        """The same shard, opened to read its dictionaries and the numbers into them."""
        self._shares_texts = True
        """Whether rows had texts in common at the last check, which makes dictionaries worth their cost."""
        self._leaf: int | None = None
        """Number of the text column of the opened shard; ``None`` if its texts cannot be copied as they are stored."""
        self._kinds: dict[str, pa.DataType] = {}
        """Types of the columns of the opened shard that are read, if there are conditions."""

    @override
    def units(self) -> UnitTable:
        return self._units

    @override
    def read_unit(self, unit: int) -> Records:
        shard, group, _, rows_in_footer = self._units[unit]
        part = f"row group {group}"
        with reading(self._files[shard], part):
            opened = self._shard(shard)
            laid, images, table = None, None, self._left_out(opened, group)
            if table is None:
                laid = self._indexed_texts(opened, shard, group)
                if laid is None:
                    laid = self._laid_texts(opened, group, self._files[shard].size_bytes)
                names = self._columns.all if laid is None else self._columns.others
                table = _read(opened, group, names)
                images = self._images_of(opened, group, self._files[shard].path)
            elif self._config.images is not None:
                images = table[self._config.images]
        where = f"{self._files[shard].path}: {part}"
        texts = table if laid is None else laid[0]
        for rows in (len(texts), *([] if images is None else [len(images)])):
            if rows != rows_in_footer:
                raise IntegrityError(
                    f"{where}: holds {rows} rows of the {rows_in_footer} in its footer"
                )
        return self._columns.records(table, where, images=images, laid=laid)

    @override
    def sizes_U(self) -> NDArray[np.int64]:
        units = self._units
        filled = np.unique(units.shards_U[units.rows_U > 0])
        sizes_U = np.full(len(units), -1)
        # Spread evenly: if each shard has one or two units, the first shard says little. A footer costs a store one
        # read.
        for shard in filled[evenly(len(filled), _FOOTERS)].tolist() if len(filled) else ():
            file, of_shard = self._files[shard], np.flatnonzero(units.shards_U == shard)
            of_shard = of_shard[evenly(len(of_shard), _GROUPS)]
            with reading(file, "footer"), _open(file) as opened:
                metadata = opened.metadata
                sizes_U[of_shard] = [
                    sum(
                        _size_of(metadata.row_group(group), column)
                        for column in self._columns.texts
                    )
                    for group in units.starts_U[of_shard].tolist()
                ]
        return sizes_U

    @override
    def first_records(self) -> Records:
        if self._first is None:
            return Records.of_texts([])
        return self._columns.records(*self._first, images=None)

    @override
    def doubt(self) -> str:
        if not self._columns.doubted or self._first is None:
            return ""
        table, _ = self._first
        return self._columns.doubt(dict(zip(table.column_names, table.columns, strict=True)))

    @cached_property
    def _first(self) -> tuple[pa.Table, str] | None:
        """The first rows of the source, in the columns that are read or doubted, and their place."""
        unit = self._units.first_filled()
        if unit is None:
            return None
        shard, group, _, _ = self._units[unit]
        file = self._files[shard]
        part = f"row group {group}, its first rows"
        # The shard is opened only for this look, because a check looks at a thousand sources and continues to read
        # none.
        with reading(file, part), _open(file) as opened:
            # A row group may have a gigabyte, but only a few of its rows are needed.
            batches = opened.iter_batches(
                _FIRST_ROWS,
                row_groups=[group],
                columns=[*self._columns.all, *self._columns.doubted],
                use_threads=False,
            )
            return pa.Table.from_batches([next(batches)]), f"{file.path}: {part}"

    def _left_out(self, shard: pq.ParquetFile, group: int) -> pa.Table | None:
        """Return a row group with nulls for all but the columns of conditions, if no row meets these, else ``None``."""
        where = self._config.where
        if not where or shard.metadata.row_group(group).total_byte_size < _LEAST_LOOKED:
            return None
        asked = _read(shard, group, list(where))
        kept_B = kept_of(where, asked, len(asked))
        if kept_B is None or kept_B.any():
            return None
        nulls = {name: pa.nulls(len(asked), kind) for name, kind in self._kinds.items()}
        return pa.table(nulls | {name: column_of(asked, name) for name in where})

    def _images_of(self, shard: pq.ParquetFile, group: int, path: str) -> pa.ChunkedArray | None:
        """Read the column of images a few rows at a time, within a limit.

        A footer gives the size as written, but an image that a dictionary stores once for all rows becomes many when
        decoded.
        """
        column = self._config.images
        if column is None:
            return None
        parts, size_bytes, schema = list[pa.Array](), 0, shard.schema_arrow
        for batch in shard.iter_batches(
            _IMAGES_AT_ONCE, row_groups=[group], columns=[column], use_threads=False
        ):
            found = column_of(pa.Table.from_batches([batch]), column)
            parts += found.chunks
            size_bytes += found.nbytes
            _require_room(size_bytes, path, group)
        return pa.chunked_array(parts, type=types_of(schema, column)[0])

    def _indexed_texts(
        self, shard: pq.ParquetFile, number: int, group: int
    ) -> tuple[Ragged, NDArray[np.bool_]] | None:
        """Return the texts of a row group that is written with a dictionary; see ``_laid_texts``.

        The dictionary is checked once, and each text is copied once to its final place. If nearly every row has a
        different text, this takes a fifth longer, and later row groups of the source are read without the dictionary.
        """
        chunk = self._chunk_of(shard, group) if self._shares_texts else None
        if chunk is None or not _is_indexed(chunk):
            return None
        column = self._columns.texts[0]
        if self._indexed is None:
            self._indexed = _open(self._files[number], metadata=shard.metadata, indexed=[column])
        table = self._indexed.read_row_group(group, columns=[column], use_threads=False)
        chunks = table[column].chunks
        texts = sum(len(chunk.dictionary) for chunk in chunks)
        self._shares_texts = len(table) >= _LEAST_SHARED * texts
        parts, nulls = [], []
        for chunk in chunks:
            held, null_B = text_bytes(chunk.dictionary), nulls_of(chunk)
            # Not to_numpy(), which imports pandas, if it is installed, in a reader's thread.
            places_B = np.from_dlpack(chunk.indices.fill_null(0)).astype(np.int64)
            # Arrow does not check this. The decoding of the whole row group then reports the fault.
            if not (is_utf8(held.values_V, held.offsets) and _are_within(places_B, len(held))):
                return None
            # A further, empty entry of the dictionary stands for null.
            places_B[null_B] = len(held)
            ends = np.append(held.offsets, held.offsets[-1:])
            parts.append(Pieces([Ragged(values_V=held.values_V, offsets=ends)]).take(places_B))
            nulls.append(null_B)
        return (drained(parts, np.dtype(np.uint8)), np.concatenate(nulls)) if parts else None

    def _laid_texts(
        self, shard: pq.ParquetFile, group: int, file_bytes: int
    ) -> tuple[Ragged, NDArray[np.bool_]] | None:
        """Return the texts of a row group end to end, and which are null, ``[B]``.

        A few texts are decoded at a time and copied while they are in a core's cache. Arrow would otherwise move its
        output to new pages whenever it outgrows its room. The result is ``None`` if the texts cannot be copied as they
        are stored, or if a text is not UTF-8; the row group is then read as a whole.
        """
        chunk = self._chunk_of(shard, group)
        if chunk is None:
            return None
        # This is the size of lengths and values as written; with a dictionary, texts take more than this size.
        size_bytes, rows = chunk.total_uncompressed_size, chunk.num_values
        # A damaged footer may claim more than any file has.
        most_bytes = max(_MOST_TIMES * file_bytes, _ROOM_BYTES)
        column, at_once = self._columns.texts[0], _rows_at_once(rows, size_bytes)
        layer, nulls = None, []
        for batch in shard.iter_batches(
            at_once, row_groups=[group], columns=[column], use_threads=False
        ):
            texts = batch.column(0)
            values_V, ends = lying(texts, PLAIN_TEXTS[texts.type])
            if layer is None:
                # The size if all texts are like the first ones, if that is more, and a margin.
                likely_bytes = len(values_V) * rows // max(1, len(texts)) * 17 // 16
                likely_bytes = min(max(size_bytes, likely_bytes), most_bytes)
                layer = Layer(likely_bytes, np.dtype(np.uint8), min(rows, most_bytes // 8))
            if not layer.lay_texts(values_V, ends):
                return None
            nulls.append(nulls_of(texts))
        if layer is None:
            return None
        return layer.finish(), np.concatenate(nulls)

    def _chunk_of(self, shard: pq.ParquetFile, group: int) -> pq.ColumnChunkMetaData | None:
        """Return the footer's entry for the texts of a row group; ``None`` if they cannot be copied as they are stored.

        Also ``None`` if a damaged footer has another column in this place; the read of the whole row group reports the
        damage.
        """
        metadata, leaf = shard.metadata.row_group(group), self._leaf
        if leaf is None or leaf >= metadata.num_columns:
            return None
        chunk = metadata.column(leaf)
        return chunk if chunk.path_in_schema == self._columns.texts[0] else None

    def _shard(self, shard: int) -> pq.ParquetFile:
        if self._opened is None or self._opened[0] != shard:
            # Released first, because a footer may be large, and two at once are not needed.
            self._opened = self._indexed = None
            self._opened = shard, _open(self._files[shard])
            # Computed here, because each access to the Arrow schema converts it from Parquet's schema.
            self._leaf = _leaf_of(self._opened[1], self._columns.texts)
            if self._config.where:
                schema = self._opened[1].schema_arrow
                read = (*self._columns.all, *self._config.image_members)
                self._kinds = {name: types_of(schema, name)[0] for name in read}
        return self._opened[1]

    def _index(self, file: ShardFile) -> FileUnits:
        with reading(file, "footer"), _open(file) as shard:
            metadata, schema = shard.metadata, shard.schema_arrow
            rows = [metadata.row_group(i).num_rows for i in range(metadata.num_row_groups)]
            read = [*self._columns.all, *self._config.image_members]
            content = digest_of_ranges(file, parquet_ranges(file, metadata, read))
            require_table(schema, self._config, file.path)
            for column, group in itertools.product(self._config.image_members, range(len(rows))):
                _require_room(_size_of(metadata.row_group(group), column), file.path, group)
        groups = np.arange(len(rows))
        return FileUnits(
            rows=np.array(rows, np.int64), starts=groups, stops=groups + 1, content=content
        )


def _read(shard: pq.ParquetFile, group: int, columns: Sequence[str]) -> pa.Table:
    """Return columns of a row group."""
    if not columns:
        return _NO_TABLE
    # In one thread, because there are many loaders, and each has a core of its own.
    return shard.read_row_group(group, columns=list(columns), use_threads=False)


def _size_of(group: pq.RowGroupMetaData, column: str) -> int:
    """Return the decompressed bytes of a column in a row group, according to the footer."""
    chunks = (group.column(i) for i in range(group.num_columns))
    return sum(
        chunk.total_uncompressed_size
        for chunk in chunks
        if f"{chunk.path_in_schema}.".startswith(f"{column}.")
    )


def _rows_at_once(rows: int, size_bytes: int) -> int:
    """Return how many rows of a row group are decoded at once: whole pages, unless the pages are large."""
    at_once = max(1, rows * _TEXT_AT_ONCE // max(1, size_bytes))
    whole = -(-at_once // _PAGE_ROWS) * _PAGE_ROWS
    most = max(1, rows * _MOST_AT_ONCE // max(1, size_bytes))
    # At least one, even for an empty row group, because Arrow needs a positive number.
    return max(1, min(rows, whole if min(rows, whole) <= most else at_once))


def _leaf_of(shard: pq.ParquetFile, names: Sequence[str]) -> int | None:
    """Return the number of the text column, if it is the only one and its texts can be copied as stored."""
    name, *others = names
    schema = shard.schema_arrow
    # A nested column comes with the columns around it.
    if others or name not in schema.names or schema.field(name).type not in PLAIN_TEXTS:
        return None
    leaves = [i for i in range(len(shard.schema)) if shard.schema.column(i).path == name]
    # For a column ``a.b`` next to objects ``a`` with a field ``b``, Arrow reads both under this name.
    return leaves[0] if len(leaves) == 1 else None


def _is_indexed(chunk: pq.ColumnChunkMetaData) -> bool:
    """Return whether the rows of a column are numbers into a dictionary, judged by the size of its pages.

    False also if rows that do not fit the dictionary are delta-encoded, as by parquet-rs and parquet-java in pages of
    version 2, because Arrow reads no numbers from such pages.
    """
    if not chunk.has_dictionary_page:
        return False
    if any(encoding.startswith("DELTA") for encoding in chunk.encodings):
        return False
    of_dictionary = chunk.data_page_offset - chunk.dictionary_page_offset
    of_rows = chunk.total_compressed_size - of_dictionary
    # If the dictionary overflows, the pages contain texts, and are larger than this.
    return bool(of_rows <= _INDEX_BYTES * chunk.num_values + _HEADS_BYTES)


def _are_within(places_B: NDArray[np.int64], count: int) -> bool:
    return not len(places_B) or bool(places_B.min() >= 0 and places_B.max() < count)


def _require_room(size_bytes: int, path: str, group: int) -> None:
    """Raise an error for a row group whose images exceed the limit of decoding in memory.

    Raises:
        ConfigError: Says what to do.
    """
    if size_bytes > MAX_UNIT_BYTES:
        raise ConfigError(
            f"{path}: row group {group} holds {format_bytes(size_bytes)} of images or more, and a unit at most "
            f"{format_bytes(MAX_UNIT_BYTES)}; write it with fewer rows to a group (row_group_size)"
        )


def _open(
    file: ShardFile, *, metadata: pq.FileMetaData | None = None, indexed: Sequence[str] = ()
) -> pq.ParquetFile:
    """Open a shard, with its metadata if known; columns ``indexed`` come as dictionaries and numbers into them."""
    # Pages that were written with a checksum are checked against it; for others the flag costs nothing. With
    # pre-buffering, each source would keep the bytes of its last row group while the reader is open.
    return pq.ParquetFile(
        file.open(),
        metadata=metadata,
        read_dictionary=list(indexed),
        page_checksum_verification=True,
        pre_buffer=False,
    )


FORMAT = FormatSpec(
    what="a Parquet file",
    names=FileNames(suffixes=frozenset({".parquet", ".parq", ".pq"})),
    open=ParquetFormat,
    knows_columns=True,
    magic=(((0, b"PAR1"),),),
)

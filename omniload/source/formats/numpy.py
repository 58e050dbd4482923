"""Token ids in ``.npy`` files and in flat files, as nanoGPT and OLMo keep them.

A file is one run of ids. Documents end with a special token, or records are rows of a fixed length: the rows of a
matrix, the rows that ``row_tokens`` cuts, or else the whole file. Units are ranges of bytes. For rows with an
end-of-document token, the documents inside a row are known. Columns are in separate files, of which a unit takes the
values of its own tokens.

Shape suffixes:
    V  ids of a unit
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray
from typing_extensions import override

from omniload.base.errors import ConfigError, IntegrityError
from omniload.base.ragged import Ragged
from omniload.mix.columns import DOCUMENT_STARTS, LOSS_MASK, column_kind, starts_in
from omniload.mix.schema.sources.numpy import NumpySource
from omniload.source.files import ShardFile, reading
from omniload.source.formats.content import digest_of_ranges, even_ranges
from omniload.source.formats.format import (
    FIRST_BYTES,
    IndexedFormat,
    Records,
    require_as_indexed,
)
from omniload.source.formats.spec import FormatSpec
from omniload.source.index import FileUnits, IndexCache, index_of
from omniload.source.parsing.arrays.beside import (
    ColumnFile,
    column_files,
    shards_with_columns,
    with_column,
)
from omniload.source.parsing.arrays.npy import LARGEST_HEADER, MAGIC, npy_array
from omniload.source.parsing.cutting import byte_ranges, cuts
from omniload.source.parsing.litdata import refuse_chunks
from omniload.source.parsing.token_lists import RowsAt, id_records
from omniload.source.patterns import FileNames

__all__ = ["FORMAT", "NumpyFormat"]

_SCAN_BYTES, _ROWS_AT_ONCE = 8 << 20, 1 << 20
_FEWEST_IDS = 64
"""Fewest ids from which the width of ids can be doubted."""
_LARGEST_VOCABULARY = 1 << 24
"""No vocabulary has this many tokens; a larger id is two narrower ids."""
_WIDER = {1: "uint16", 2: "uint32", 4: "int64"}
"""Wider type of which ids of a given size may be halves; no type has more than eight bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Layout:
    """The layout of the ids in a file."""

    start: int
    """First byte of the ids."""
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    row: int
    """Ids of a row; 0 if a token ends documents."""
    columns: list[ColumnFile]
    """Columns that are in separate files."""

    def ids_before(self, at: int) -> int:
        """Return the number of ids before a byte of the file."""
        return (at - self.start) // self.dtype.itemsize


class NumpyFormat(IndexedFormat):
    """Reads documents or rows of token ids."""

    holds_text = False

    def __init__(
        self, files: Sequence[ShardFile], config: NumpySource, cache: IndexCache | None = None
    ) -> None:
        refuse_chunks(files)
        self._files, self._config = files, config
        cut = (config.dtype, config.header, config.end_of_document, config.row_tokens, config.unit)
        kind = f"numpy/{'/'.join(map(str, cut))}"
        # Stored here, because a property of the configuration is computed at each access, and there are many units.
        self._columns = config.columns_read
        if self._columns:
            kind += f"/{list(self._columns.items())}"
        self._units = index_of(files, self._index, kind=kind, cache=cache)
        self._layout: tuple[int, _Layout] | None = None

    @override
    def read_unit(self, unit: int) -> Records:
        place = self._units[unit]
        file = self._files[place.shard]
        with reading(file, f"bytes {place.start} to {place.stop}"):
            layout = self._layout_of(place.shard)
            data = file.read_range(place.start, place.stop)
        ids = np.frombuffer(data, layout.dtype)
        offsets = self._offsets(ids, layout)
        require_as_indexed(file.path, place, len(offsets) - 1)
        return self._records(
            ids, offsets, place.shard, layout.ids_before(place.start), self._units.rows_before(unit)
        )

    @override
    def first_records(self) -> Records:
        # Chosen by its records, because an empty array still has a header.
        unit = self._units.first_filled()
        if unit is None:
            return Records(column=Ragged.of([]), bad_B=np.zeros(0, np.bool_))
        shard = self._units[unit].shard
        ids, layout = self._first_ids(shard)
        offsets = self._offsets(ids, layout)
        if layout.start + ids.nbytes < self._files[shard].size_bytes:
            offsets = offsets[:-1]  # the last record may be cut off
        return self._records(ids[: offsets[-1]], offsets, shard, 0, 0)

    @override
    def doubt(self) -> str:
        """Say if the ids appear to have another width, or if no document of a shard has an end."""
        unit = self._units.first_filled()
        if unit is None:
            return ""
        shard = self._units[unit].shard
        ids, layout = self._first_ids(shard)
        # The type in the header of .npy is reliable.
        if self._config.dtype is not None and (said := _width_doubted(ids)):
            return f"{self._files[shard].path}: {said}"
        return "" if layout.row else self._without_an_end()

    def _without_an_end(self) -> str:
        """Name the shards in which all ids are one document without an end."""
        rows_S = np.bincount(self._units.shards_U, self._units.rows_U, len(self._files))
        alone = np.flatnonzero(rows_S == 1)
        if not len(alone):
            return ""
        # Only one shard is checked, because a source may have thousands in a store, all written by the same tool.
        file, layout = self._files[alone[0]], self._layout_of(int(alone[0]))
        size = layout.dtype.itemsize
        with reading(file, "its last id"):
            last = int(
                np.frombuffer(
                    file.read_range(file.size_bytes - size, file.size_bytes), layout.dtype
                )[0]
            )
        if last == self._config.end_of_document:
            return ""
        more = (
            f", and {len(alone) - 1:,} more shards are one document each" if len(alone) > 1 else ""
        )
        return (
            f"{file.path}: end_of_document {self._config.end_of_document} does not occur among its "
            f"{(file.size_bytes - layout.start) // size:,} ids, so they are one document{more}: name the token that "
            "ends documents there, or cut rows of one length by row_tokens"
        )

    def _first_ids(self, shard: int) -> tuple[NDArray[Any], _Layout]:
        """Return the first ids of a shard, in the type in which they are stored."""
        file = self._files[shard]
        with reading(file, "its first ids"):
            layout = self._layout_of(shard)
            size = min(file.size_bytes - layout.start, FIRST_BYTES) // layout.dtype.itemsize
            data = file.read_range(layout.start, layout.start + size * layout.dtype.itemsize)
        return np.frombuffer(data, layout.dtype), layout

    def _layout_of(self, shard: int) -> _Layout:
        if self._layout is None or self._layout[0] != shard:
            self._layout = shard, _layout(self._files[shard], self._config, self._columns)
        return self._layout[1]

    def _offsets(self, ids_V: NDArray[Any], layout: _Layout) -> NDArray[np.int64]:
        """Return the starts of records among the ids of a unit, and the end of the last record."""
        if layout.row:
            stops = np.arange(layout.row, len(ids_V), layout.row)
        else:
            stops = np.flatnonzero(ids_V == self._config.end_of_document) + 1
            # The end of the unit is added below, whether or not a document ends there.
            stops = stops[stops < len(ids_V)]
        return np.concatenate(([0], stops, [len(ids_V)] if len(ids_V) else [])).astype(np.int64)

    def _records(
        self,
        ids_V: NDArray[Any],
        offsets: NDArray[np.int64],
        shard: int,
        ids_before: int,
        before: int,
    ) -> Records:
        """Return ids of a shard as records; ``ids_before`` ids and ``before`` records of the shard come before them."""
        config = self._config
        remedy = " (or correct dtype and header)" if config.dtype is not None else ""
        at = RowsAt(where=self._files[shard].path, first=before, word="record")
        records = id_records(ids_V, offsets, at, remedy=remedy)
        for column in self._layout_of(shard).columns if self._columns else ():
            is_tag = column_kind(column.inside).is_tag
            first, count = (before, len(offsets) - 1) if is_tag else (ids_before, len(ids_V))
            records = with_column(records, column, column.values(first, first + count), at)
        if not config.rows_hold_documents:
            return records
        starts = np.flatnonzero(ids_V == config.end_of_document) + 1
        others = {**records.others, DOCUMENT_STARTS: starts_in(starts, offsets)}
        if LOSS_MASK in others:
            # Nothing before the first token of a document predicts that token.
            values_V = others[LOSS_MASK].values_V.copy()
            values_V[starts[starts < len(values_V)]] = False
            others[LOSS_MASK] = replace(others[LOSS_MASK], values_V=values_V)
        return replace(records, others=others)

    def _index(self, file: ShardFile) -> FileUnits:
        digest = xxhash.xxh3_128()
        with reading(file, "ids"):
            layout = _layout(file, self._config, self._columns)
            # Checked before a long file is searched for the ends of documents.
            for column in layout.columns:
                if not column_kind(column.inside).is_tag:
                    column.require_tokens(layout.shape, file)
            if layout.row:
                found = cuts(_row_ends(file, layout), self._config.unit)
                # Rows are cut without a look at them, and so a sample is digested.
                digest.update(digest_of_ranges(file, even_ranges(file.size_bytes)).encode())
            else:
                ends = _document_ends(file, layout, self._config.end_of_document, digest)
                found = cuts(ends, self._config.unit)
            for column in layout.columns:
                if column_kind(column.inside).is_tag:
                    column.require_count(int(found.records_U[-1]), file)
                if size := column.file.size_bytes:
                    digest.update(digest_of_ranges(column.file, even_ranges(size)).encode())
        return byte_ranges(file, layout.start, found, content=digest.hexdigest())


def _width_doubted(ids_V: NDArray[Any]) -> str:
    """Say if ids appear to be stored in another width than they are read in; empty if they do not."""
    dtype = ids_V.dtype
    if len(ids_V) < _FEWEST_IDS:
        return ""
    # In little-endian order, the upper half of a wider id follows the lower half.
    wider = _WIDER.get(dtype.itemsize)
    if wider and not ids_V[1::2].any() and ids_V[::2].any():
        return (
            f"every second one of its first ids is 0, which happens if wider ids are read as {dtype}: say dtype: "
            f"{wider}, unless the zeros are meant"
        )
    if (largest := int(ids_V.max())) >= _LARGEST_VOCABULARY:
        return (
            f"its first ids go up to {largest:,}, which happens if ids of half the width are read as {dtype}: say "
            "dtype: uint16, unless they are meant"
        )
    return ""


def _row_ends(file: ShardFile, layout: _Layout) -> Iterator[NDArray[np.int64]]:
    """Yield the byte after each row, from the first id, some at a time."""
    size = file.size_bytes - layout.start
    row = layout.row * layout.dtype.itemsize
    rows = -(-size // row)
    for first in range(0, rows, _ROWS_AT_ONCE):
        numbers = np.arange(first + 1, min(first + _ROWS_AT_ONCE, rows) + 1)
        yield np.minimum(numbers * row, size)


def _document_ends(
    file: ShardFile, layout: _Layout, end: int | None, digest: xxhash.xxh3_128
) -> Iterator[NDArray[np.int64]]:
    """Yield the byte after each document, from the first id, some at a time; every byte is fed to ``digest``."""
    size, last = layout.dtype.itemsize, 0
    for at, data in _chunks(file, layout.start):
        digest.update(data)
        ids = np.frombuffer(data, layout.dtype)
        ends = at - layout.start + (np.flatnonzero(ids == end) + 1) * size
        last = int(ends[-1]) if len(ends) else last
        yield ends
    # The last may have no end of its own.
    if last < (total := file.size_bytes - layout.start):
        yield np.array([total], np.int64)


def _chunks(file: ShardFile, at: int) -> Iterator[tuple[int, bytes]]:
    # A multiple of every width of an id, so that no id is cut.
    for start in range(at, file.size_bytes, _SCAN_BYTES):
        yield start, file.read_range(start, min(start + _SCAN_BYTES, file.size_bytes))


def _layout(file: ShardFile, config: NumpySource, columns: Mapping[str, str]) -> _Layout:
    """Read the layout of a file and of its columns' files, and compare it with the file's size.

    Raises:
        ConfigError: Neither the file nor the mix file gives the type of the ids, or the file has no ids.
        IntegrityError: The size of the file does not match its header.
    """
    head = file.read_range(0, min(LARGEST_HEADER, file.size_bytes)) if file.size_bytes else b""
    is_npy = head.startswith(MAGIC)
    # Flat files may have this suffix as well; with a stated dtype, the file counts as flat.
    if not is_npy and file.path.lower().endswith(".npy") and config.dtype is None:
        raise IntegrityError(
            f"{file.path}: begins with {head[:6]!r}, not {MAGIC!r}; replace it, or state dtype if it is flat"
        )
    if is_npy:
        start, dtype, shape = _npy_header(file, head)
    elif config.dtype is None:
        raise ConfigError(
            f"{file.path}: is a flat file; state dtype, such as uint16, and header if it has one"
        )
    else:
        start, dtype = config.header, np.dtype(config.dtype)
        shape = (max(0, file.size_bytes - start) // dtype.itemsize,)
    # Python integers, because a damaged shape would overflow numpy's.
    stop = start + prod(shape) * dtype.itemsize
    if stop != file.size_bytes:
        raise IntegrityError(
            f"{file.path}: {' x '.join(map(str, shape))} ids of {dtype} from byte {start} on end at byte {stop}, but "
            f"the file has {file.size_bytes}: it is cut short or corrupt, replace it, or correct dtype and header"
        )
    row = shape[1] if len(shape) == 2 else config.row_tokens or 0
    if len(shape) == 2 and (config.row_tokens or config.end_of_document is not None):
        raise ConfigError(
            f"{file.path}: is a matrix of {shape[0]} x {shape[1]}, whose rows are the records; remove "
            f"{'row_tokens' if config.row_tokens else 'end_of_document'}"
        )
    if not row and config.end_of_document is None:
        raise ConfigError(
            f"{file.path}: is one run of {shape[0]} ids; set end_of_document to the token that ends "
            "documents, or row_tokens"
        )
    largest, end = np.iinfo(dtype).max, config.end_of_document
    # Otherwise nothing in the file could equal the token, and the whole file would be one document.
    if end is not None and end > largest:
        raise ConfigError(
            f"{file.path}: holds ids of {dtype}, up to {largest}, and end_of_document is {end}; name the token that "
            "ends documents there"
        )
    beside = column_files(file, columns) if columns else []
    return _Layout(start=start, dtype=dtype, shape=shape, row=row, columns=beside)


def _npy_header(file: ShardFile, head: bytes) -> tuple[int, np.dtype[Any], tuple[int, ...]]:
    """Return the start of the array, its type and its shape."""
    found = npy_array(file.path, head)
    dtype, shape = found.dtype, found.shape
    in_columns = found.is_fortran and len(shape) == 2
    order = " in Fortran order" * found.is_fortran
    if dtype.kind not in "iu" or len(shape) not in {1, 2} or in_columns:
        raise ConfigError(
            f"{file.path}: is an array of {dtype} with {len(shape)} dimensions{order}; "
            "token ids are integers in one run, or in rows in C order"
        )
    if len(shape) == 2 and shape[1] == 0 < shape[0]:
        raise IntegrityError(
            f"{file.path}: says that its shape is {shape}; the file is corrupt, replace it"
        )
    return found.start, dtype, shape


def _shards(files: Sequence[ShardFile], config: NumpySource) -> tuple[ShardFile, ...]:
    """Attach the files of columns to the files of tokens."""
    return shards_with_columns(files, config.columns_read, config.passed_over)


FORMAT = FormatSpec(
    what="a file of numpy's",
    names=FileNames(suffixes=frozenset({".npy", ".bin"})),
    open=NumpyFormat,
    magic=(((0, MAGIC),),),
    shards=_shards,
)

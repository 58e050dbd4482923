"""Arrow IPC streams and files, and the folders that Hugging Face ``save_to_disk`` writes.

A batch is a unit. It is read by its range, together with the schema and the dictionaries that come
before it: a unit is decoded as a stream of one batch.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import pyarrow as pa
import xxhash
from typing_extensions import override

from omniload.base.errors import ConfigError, IntegrityError
from omniload.base.units import format_bytes
from omniload.mix.columns import NO_COLUMNS, TableColumn
from omniload.mix.schema.conditions import NO_CONDITIONS, Condition
from omniload.mix.sources import ArrowSource
from omniload.source.content import digest_of_ranges, even_ranges
from omniload.source.files import ShardFile, beside, read_json, reading
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
from omniload.source.parsing.arrow_messages import END_OF_STREAM, FILE_MAGIC, messages_of
from omniload.source.parsing.conditions import require_where
from omniload.source.parsing.image_cells import require_images, with_images
from omniload.source.patterns import FileNames

__all__ = ["FORMAT", "ArrowFormat"]

_FIRST_ROWS = 64
_STATE = "state.json"
_FILE_HEAD = 8
_INDICES = ("_indices_files", "_indices_data_files")


class ArrowFormat(Format):
    """Reads a column of text or of lists of integers, one batch at a time."""

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
            "arrow",
            holds=holds,
            column=column,
            others=others,
            images=images,
            key=key,
            beside=beside,
            where=where,
        )
        self._units = index_of(files, self._index, kind=kind, cache=cache)
        # Consecutive units mostly follow the same schema, which is read once.
        self._before: tuple[int, list[tuple[int, int]], bytes] = -1, [], b""

    @override
    def units(self) -> UnitTable:
        return self._units

    @override
    def read_unit(self, unit: int) -> Records:
        file, where = self._place(unit)
        keyed = () if self._key is None else (self._key,)
        names = (self._column, *self._others.values(), *self._images, *keyed)
        column, *others = self._columns_of(unit, (*names, *self._beside, *self._where))
        asked, others = self._asked_of(others)
        if self._beside:
            beside, others = others[-len(self._beside) :], others[: -len(self._beside)]
            column = self._object_of([column, *beside])
        place = f"{file.path}: {where}"
        # It was asked for behind the others, and those behind it are taken off.
        keys = others.pop() if keyed else None
        kept_B = kept_of(self._where, asked, len(column))
        records = records_of(column, place, self._holds, kept_B)
        records = with_others(records, dict(zip(self._others, others, strict=False)), place)
        records = with_keys(records, keys, place)
        return with_images(records, others[-1]) if self._images else records

    @override
    def first_records(self) -> Records:
        filled = np.flatnonzero(self._units.rows_U)
        if not len(filled):
            return Records.of_texts([])
        unit = int(filled[0])
        file, where = self._place(unit)
        columns = self._columns_of(unit, (self._column, *self._beside, *self._where))
        asked, columns = self._asked_of([column.slice(0, _FIRST_ROWS) for column in columns])
        column = self._object_of(columns) if self._beside else columns[0]
        kept_B = kept_of(self._where, asked, len(column))
        return records_of(column, f"{file.path}: {where}", self._holds, kept_B)

    def _asked_of(
        self, columns: list[pa.ChunkedArray]
    ) -> tuple[dict[str, pa.ChunkedArray], list[pa.ChunkedArray]]:
        """Part the columns of conditions, which come last, from those before them."""
        first = len(columns) - len(self._where)
        return dict(zip(self._where, columns[first:], strict=True)), columns[:first]

    def _object_of(self, columns: Sequence[pa.ChunkedArray]) -> pa.ChunkedArray:
        return as_objects(dict(zip((self._column, *self._beside), columns, strict=True)))

    def _place(self, unit: int) -> tuple[ShardFile, str]:
        shard = int(self._units.shards_U[unit])
        first = int(np.searchsorted(self._units.shards_U, shard))
        return self._files[shard], f"batch {unit - first}"

    def _columns_of(self, unit: int, names: Sequence[str]) -> list[pa.ChunkedArray]:
        units = self._units
        file, where = self._place(unit)
        start, stop = int(units.starts_U[unit]), int(units.stops_U[unit])
        with reading(file, where):
            data = self._stream_head(unit) + file.read_range(start, stop) + END_OF_STREAM
            columns = _read_columns(pa.py_buffer(data), names)
            for column in columns:
                _require_sound(column)
        rows = len(columns[0])
        if rows != units.rows_U[unit]:
            raise IntegrityError(
                f"{file.path}: {where}: holds {rows} rows of the {units.rows_U[unit]} in its head; replace it"
            )
        return columns

    def _stream_head(self, unit: int) -> bytes:
        """Return what comes before a batch in its stream and is no batch: the schema, and dictionaries."""
        units = self._units
        shard = int(units.shards_U[unit])
        first = int(np.searchsorted(units.shards_U, shard))
        # By numpy: this is asked for every batch, and looks at all before it.
        starts = units.starts_U[first : unit + 1]
        stops = np.concatenate(([0], units.stops_U[first:unit]))
        at = np.flatnonzero(stops < starts)
        gaps = list(zip(stops[at].tolist(), starts[at].tolist(), strict=True))
        if self._before[:2] != (shard, gaps):
            head = b"".join(self._files[shard].read_ranges(gaps))
            # A file is a stream, behind its magic.
            head = head[_FILE_HEAD:] if head.startswith(FILE_MAGIC) else head
            self._before = shard, gaps, head
        return self._before[2]

    def _index(self, file: ShardFile) -> FileUnits:
        digest = xxhash.xxh3_128()
        rows, starts, stops = [], [], []
        schema_stop = 0
        with reading(file, "messages"):
            if not file.size_bytes:
                raise IntegrityError(f"{file.path}: is empty, without a schema; replace it")
            for message in messages_of(file):
                digest.update(message.metadata)
                # The first message is the schema.
                schema_stop = schema_stop or message.stop
                if message.kind == "batch":
                    rows.append(message.rows)
                    starts.append(message.start)
                    stops.append(message.stop)
            head = file.read_range(0, schema_stop)
            head = head[_FILE_HEAD:] if head.startswith(FILE_MAGIC) else head
            schema = pa.ipc.open_stream(head + END_OF_STREAM).schema
            sampled = digest_of_ranges(file, even_ranges(file.size_bytes))
            self._require_columns(schema, file.path)
        largest = max((stop - start for start, stop in zip(starts, stops, strict=True)), default=0)
        if largest > MAX_UNIT_BYTES:
            raise ConfigError(
                f"{file.path}: a batch holds {format_bytes(largest)}, more than {format_bytes(MAX_UNIT_BYTES)}; "
                "write it in smaller batches"
            )
        return FileUnits(
            rows=np.array(rows, np.int64),
            starts=np.array(starts, np.int64),
            stops=np.array(stops, np.int64),
            content=f"{digest.hexdigest()}{sampled}",
        )

    def _require_columns(self, schema: pa.Schema, path: str) -> None:
        """Refuse a shard without what is asked of it; names that are not UTF-8 are read here first."""
        for column in (self._column, *self._beside):
            require_column(schema, column, path, self._holds)
        require_others(schema, self._others, path)
        for column in self._images:
            require_images(schema, column, path)
        require_key(schema, self._key, path)
        require_where(schema, self._where, path)


def _read_columns(data: pa.Buffer, columns: Sequence[str]) -> list[pa.ChunkedArray]:
    schema = pa.ipc.open_stream(data).schema
    # Columns are chosen by number, and so the schema is read before: others are not decoded.
    options = pa.ipc.IpcReadOptions(
        included_fields=[schema.get_field_index(column) for column in dict.fromkeys(columns)],
        use_threads=False,
    )
    with pa.ipc.open_stream(data, options=options) as reader:
        table = reader.read_all()
        return [table.column(column) for column in columns]


def _require_sound(column: pa.ChunkedArray) -> None:
    """Refuse offsets and indices that lead out of the batch: whatever reads them would follow.

    Text that is not UTF-8 is no fault here; that is told row by row.

    Raises:
        pa.ArrowInvalid: Says what is wrong.
    """
    raw = {pa.string(): pa.binary(), pa.large_string(): pa.large_binary()}
    for chunk in column.chunks:
        kind = raw.get(chunk.type)
        (chunk if kind is None else chunk.view(kind)).validate(full=True)


def _shards(files: Sequence[ShardFile]) -> tuple[ShardFile, ...]:
    """Put the shards that a ``state.json`` lists in its place."""
    found: list[ShardFile] = []
    for file in files:
        found.extend(_listed(file) if file.path.rpartition("/")[2] == _STATE else [file])
    return tuple(found)


def _listed(state: ShardFile) -> list[ShardFile]:
    value = read_json(state)
    if held := next((key for key in _INDICES if value.get(key)), None):
        raise ConfigError(
            f"{state.path}: {held} is {_short(value[held])}: rows are chosen by an index beside the data; "
            "save the data set again after flatten_indices()"
        )
    listed = value.get("_data_files")
    if not isinstance(listed, list):
        listed = []
    names = [
        each["filename"]
        for each in listed
        if isinstance(each, dict) and isinstance(each.get("filename"), str)
    ]
    if not names or len(names) != len(listed):
        raise IntegrityError(
            f"{state.path}: _data_files is {_short(value.get('_data_files'))}, not a list of file names; "
            "save the data set again"
        )
    return [replace(beside(state, name), beside=(state,)) for name in names]


def _short(value: object) -> str:
    return f"{value!r:.80}"


def _opened(config: ArrowSource, files: Sequence[ShardFile], cache: IndexCache | None) -> Format:
    return ArrowFormat(
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
    what="an Arrow IPC file or stream",
    names=FileNames(suffixes=frozenset({".arrow", ".arrows", ".feather", ".ipc"}), manifest=_STATE),
    open=_opened,
    magic=(((0, FILE_MAGIC),), ((0, b"\xff\xff\xff\xff"), (6, b"\0\0"))),
    shards=_shards,
)

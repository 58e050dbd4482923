"""Arrow IPC streams and files, and the folders that Hugging Face ``save_to_disk`` writes.

A batch is a unit. It is read by its range, together with the schema and the dictionaries before it, and is decoded as a
stream of one batch.

Messages are found without reading their bodies. A message is a length, a flatbuffer that gives the size of the body,
and the body. A file is a stream between two magics, with a footer that repeats the places of the batches. The same walk
therefore serves both (https://arrow.apache.org/docs/format/Columnar.html, "Serialization and Interprocess
Communication"). Every number is checked against the file before it is used.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa
import xxhash
from typing_extensions import override

from omniload.base.errors import ConfigError, IntegrityError
from omniload.base.units import format_bytes
from omniload.mix.sources import ArrowSource
from omniload.source.files import ShardFile, beside, reading
from omniload.source.formats.content import digest_of_ranges, even_ranges
from omniload.source.formats.format import (
    FIRST_RECORDS,
    MAX_UNIT_BYTES,
    IndexedFormat,
    Records,
)
from omniload.source.formats.spec import FormatSpec
from omniload.source.index import FileUnits, IndexCache, index_of
from omniload.source.parsing.arrow_columns import index_kind, require_table
from omniload.source.parsing.nested_columns import column_of, outer_of
from omniload.source.parsing.shard_lists import read_json
from omniload.source.parsing.table_records import TableColumns
from omniload.source.patterns import FileNames

__all__ = ["FORMAT", "ArrowFormat", "messages_of"]

_STATE = "state.json"
_INDICES = ("_indices_files", "_indices_data_files")
# The magic and two zeros; at the end, the length of the footer in four bytes, and the magic.
_FILE_HEAD = 8
_FILE_MAGIC = b"ARROW1"
_CONTINUATION = b"\xff\xff\xff\xff"
_END_OF_STREAM = _CONTINUATION + bytes(4)

_FILE_TAIL = 10
_AT_ONCE = 4 << 10
"""Bytes that contain the head of most messages."""
_LARGEST_METADATA = 64 << 20
# Numbers of ``MessageHeader`` in Arrow's ``Message.fbs``.
_RECORD_BATCH = 3
_HEADERS = {1: "schema", 2: "dictionary", _RECORD_BATCH: "batch"}


class ArrowFormat(IndexedFormat):
    """Reads a column of text or of lists of integers, one batch at a time."""

    def __init__(
        self, files: Sequence[ShardFile], config: ArrowSource, cache: IndexCache | None = None
    ) -> None:
        self.holds_text = config.holds != "tokens"
        self._files, self._config, self._columns = files, config, TableColumns(config)
        kind = index_kind("arrow", config)
        self._units = index_of(files, self._index, kind=kind, cache=cache)
        # Consecutive units mostly have the same schema, which is read only once.
        self._before: tuple[int, list[tuple[int, int]], bytes] = -1, [], b""

    @override
    def read_unit(self, unit: int) -> Records:
        images = self._config.images
        table, place = self._columns_of(unit, (*self._columns.all, *self._config.image_members))
        return self._columns.records(
            table, place, images=column_of(table, images) if images else None
        )

    @override
    def _first_of(self, unit: int) -> Records:
        table, place = self._columns_of(unit, self._columns.all)
        first = {name: column.slice(0, FIRST_RECORDS) for name, column in table.items()}
        return self._columns.records(first, place, images=None)

    @override
    def doubt(self) -> str:
        doubted, unit = self._columns.doubted, self._units.first_filled()
        if not doubted or unit is None:
            return ""
        table, _ = self._columns_of(unit, (self._config.column, *doubted))
        return self._columns.doubt(
            {name: column.slice(0, FIRST_RECORDS) for name, column in table.items()}
        )

    def _columns_of(
        self, unit: int, names: Sequence[str]
    ) -> tuple[dict[str, pa.ChunkedArray], str]:
        """Return the columns of a batch whose names are among ``names``, and the place of the batch."""
        place = self._units[unit]
        file, where = self._files[place.shard], f"batch {unit - self._units.first_of(place.shard)}"
        with reading(file, where):
            batch = file.read_range(place.start, place.stop)
            data = self._stream_head(unit) + batch + _END_OF_STREAM
            columns = _read_columns(pa.py_buffer(data), names)
            for column in columns.values():
                _require_sound(column)
        rows = len(next(iter(columns.values())))
        if rows != place.rows:
            raise IntegrityError(
                f"{file.path}: {where}: holds {rows} rows of the {place.rows} in its head; replace it"
            )
        return columns, f"{file.path}: {where}"

    def _stream_head(self, unit: int) -> bytes:
        """Return the schema and the dictionaries that come before a batch in its stream."""
        units = self._units
        shard = units[unit].shard
        first = units.first_of(shard)
        # With numpy, because each batch asks for this, and every batch before it is visited.
        starts = units.starts_U[first : unit + 1]
        stops = np.concatenate(([0], units.stops_U[first:unit]))
        at = np.flatnonzero(stops < starts)
        gaps = list(zip(stops[at].tolist(), starts[at].tolist(), strict=True))
        if self._before[:2] != (shard, gaps):
            head = b"".join(self._files[shard].read_ranges(gaps))
            # A file is a stream after a magic.
            head = head[_FILE_HEAD:] if head.startswith(_FILE_MAGIC) else head
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
                # The digest covers every head, and a sample of the bodies.
                digest.update(message.metadata)
                # The first message is the schema.
                schema_stop = schema_stop or message.stop
                if message.kind == "batch":
                    rows.append(message.rows)
                    starts.append(message.start)
                    stops.append(message.stop)
            head = file.read_range(0, schema_stop)
            head = head[_FILE_HEAD:] if head.startswith(_FILE_MAGIC) else head
            # A stream that has only a schema.
            schema = pa.ipc.open_stream(head + _END_OF_STREAM).schema
            sampled = digest_of_ranges(file, even_ranges(file.size_bytes))
            require_table(schema, self._config, file.path)
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


def _read_columns(data: pa.Buffer, columns: Sequence[str]) -> dict[str, pa.ChunkedArray]:
    schema = pa.ipc.open_stream(data).schema
    # Columns are chosen by number, so the schema is read first; other columns are not decoded.
    outer = dict.fromkeys(outer_of(schema.names, column) for column in columns)
    columns = [column for column in outer if column in schema.names]
    options = pa.ipc.IpcReadOptions(
        included_fields=[schema.get_field_index(column) for column in columns], use_threads=False
    )
    with pa.ipc.open_stream(data, options=options) as reader:
        table = reader.read_all()
        return {column: table.column(column) for column in columns}


def _require_sound(column: pa.ChunkedArray) -> None:
    """Raise an error for offsets and indices that lead out of the batch, because a reader would follow them.

    Text that is not UTF-8 is not a fault here, because it is reported row by row.

    Raises:
        pa.ArrowInvalid: Says what is wrong.
    """
    for chunk in column.chunks:
        _require_sound_array(chunk)


def _require_sound_array(array: pa.Array) -> None:
    if pa.types.is_struct(array.type):
        array.validate()
        for i in range(array.type.num_fields):
            _require_sound_array(array.field(i))
        return
    raw = {pa.string(): pa.binary(), pa.large_string(): pa.large_binary()}
    kind = raw.get(array.type)
    (array if kind is None else array.view(kind)).validate(full=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Message:
    """One message, and its place in the file."""

    kind: str
    """``schema``, ``dictionary`` or ``batch``."""
    start: int
    """First byte of the message."""
    stop: int
    """First byte after its body."""
    rows: int
    """Rows of a batch; 0 for other messages."""
    metadata: bytes
    """Flatbuffer of the message."""


def messages_of(file: ShardFile) -> Iterator[_Message]:
    """Yield the messages of a shard.

    Raises:
        IntegrityError: The shard is neither a stream nor a file, is truncated, or has impossible metadata.
        OSError: The shard cannot be read.
    """
    at, end = _bounds(file)
    first = True
    while True:
        found = _message(file, at, end)
        if found is None:
            break
        if first != (found.kind == "schema"):
            raise _fault(
                file, at, f"a {found.kind} where {'the' if first else 'no'} schema belongs"
            )
        yield found
        at, first = found.stop, False
    if first:
        raise _fault(file, at, "no schema")


def _fault(file: ShardFile, at: int, what: str) -> IntegrityError:
    return IntegrityError(
        f"{file.path}: byte {at} of {file.size_bytes}: {what}; the file is cut short or corrupt, replace it"
    )


def _bounds(file: ShardFile) -> tuple[int, int]:
    """Return the start of the messages, and an upper limit of their end."""
    size = file.size_bytes
    head = file.read_range(0, min(_FILE_HEAD, size))
    if head[: len(_FILE_MAGIC)] != _FILE_MAGIC:
        return 0, size
    if size < _FILE_HEAD + _FILE_TAIL:
        raise _fault(file, 0, "an Arrow file without a footer")
    tail = file.read_range(size - _FILE_TAIL, size)
    footer = int.from_bytes(tail[:4], "little", signed=True)
    if tail[4:] != _FILE_MAGIC:
        raise _fault(
            file, size - len(_FILE_MAGIC), f"{tail[4:]!r} where {_FILE_MAGIC!r} ends an Arrow file"
        )
    if not 0 < footer <= size - _FILE_HEAD - _FILE_TAIL:
        raise _fault(file, size - _FILE_TAIL, f"a footer of {footer} bytes")
    # The footer's list of batches is not used, because the walk finds the batches and any damage in them.
    return _FILE_HEAD, size - _FILE_TAIL - footer


def _message(file: ShardFile, at: int, end: int) -> _Message | None:
    """Return the message at a byte; ``None`` if the stream ends there."""
    head = file.read_range(at, min(at + _AT_ONCE, end))
    # Before Arrow 0.15 there was no continuation mark
    prefix = 8 if head[:4] == _CONTINUATION else 4
    if len(head) < prefix:
        raise _fault(file, at, "the end of the file, and the stream has not ended")
    length = int.from_bytes(head[prefix - 4 : prefix], "little", signed=True)
    if length == 0:
        return None
    # Checked before memory is taken, because a damaged length may be any number.
    if not 8 <= length <= min(end - at - prefix, _LARGEST_METADATA):
        raise _fault(file, at, f"a message with {length} bytes of metadata")
    metadata = head[prefix : prefix + length]
    if len(metadata) < length:
        metadata = file.read_range(at + prefix, at + prefix + length)
    try:
        kind, body, rows = _read(metadata)
    except IndexError:
        raise _fault(file, at, "a message whose metadata points out of itself") from None
    start = at + prefix + length
    if kind not in _HEADERS:
        raise _fault(file, at, f"a message of type {kind}")
    if not 0 <= body <= end - start:
        raise _fault(file, at, f"a message with a body of {body} bytes, {end - start} are left")
    if rows < 0:
        raise _fault(file, at, f"a batch of {rows} rows")
    return _Message(kind=_HEADERS[kind], start=at, stop=start + body, rows=rows, metadata=metadata)


def _read(metadata: bytes) -> tuple[int, int, int]:
    """Return the type, the body length, and the rows of a message (``Message.fbs`` of Arrow).

    Raises:
        IndexError: An offset leads out of the metadata.
    """
    table = _number(metadata, 0, 4)
    kind = _field(metadata, table, 1, 1)
    body = _field(metadata, table, 3, 8)
    rows = 0
    if kind == _RECORD_BATCH and (place := _place(metadata, table, 2)):
        rows = _field(metadata, place + _number(metadata, place, 4), 0, 8)
    return kind, body, rows


def _place(metadata: bytes, table: int, field: int) -> int:
    """Return the place of a field in a flatbuffer's table; 0 if the field is absent."""
    # Without the flatbuffers library, because the library follows offsets wherever they lead.
    vtable = table - _number(metadata, table, 4)
    if 4 + 2 * field >= _number(metadata, vtable, 2):
        return 0
    offset = _number(metadata, vtable + 4 + 2 * field, 2)
    return table + offset if offset else 0


def _field(metadata: bytes, table: int, field: int, size: int) -> int:
    place = _place(metadata, table, field)
    return _number(metadata, place, size) if place else 0


def _number(metadata: bytes, at: int, size: int) -> int:
    if at < 0 or at + size > len(metadata):
        raise IndexError(at)
    return int.from_bytes(metadata[at : at + size], "little", signed=size != 2)


def _shards(files: Sequence[ShardFile], _: object) -> tuple[ShardFile, ...]:
    """Replace each ``state.json`` by the shards that it lists."""
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


FORMAT = FormatSpec(
    what="an Arrow IPC file or stream",
    names=FileNames(suffixes=frozenset({".arrow", ".arrows", ".feather", ".ipc"}), manifest=_STATE),
    open=ArrowFormat,
    knows_columns=True,
    magic=(((0, _FILE_MAGIC),), ((0, _CONTINUATION), (6, b"\0\0"))),
    shards=_shards,
)

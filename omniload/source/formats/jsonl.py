"""Lines of JSON: plain shards are cut into ranges of bytes, compressed ones are one unit.

A unit is parsed by Arrow at once; when that finds fewer records than there are lines,
or does not get through, line by line, to tell which line is at fault and why. A line
that cannot be used keeps its position, so mending it later moves no other record.
"""

from collections.abc import Iterator, Sequence
from pathlib import PurePosixPath

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.json as pj
from numpy.typing import NDArray
from typing_extensions import override

from omniload.base.errors import ConfigError, IntegrityError
from omniload.base.units import format_bytes
from omniload.source.columns import text_bytes
from omniload.source.files import ShardFile, reading
from omniload.source.formats.format import MAX_UNIT_BYTES, Format, Records, UnitTable
from omniload.source.index import FileUnits, IndexCache, index_of

__all__ = ["JsonlFormat"]

_SCAN_BYTES = 8 << 20
_NEWLINE = 10
_CODEC_OF_SUFFIX = {".zst": "zstd", ".gz": "gzip"}


class JsonlFormat(Format):
    """Reads the text under one key of every line."""

    holds_text = True

    def __init__(
        self,
        files: Sequence[ShardFile],
        *,
        key: str,
        unit_bytes: int,
        cache: IndexCache | None = None,
    ) -> None:
        self._files, self._key, self._unit_bytes = files, key, unit_bytes
        self._units = index_of(files, self._index, kind=f"jsonl/{unit_bytes}", cache=cache)

    @override
    def units(self) -> UnitTable:
        return self._units

    @override
    def read_unit(self, unit: int) -> Records:
        shard, rows = int(self._units.shards_U[unit]), int(self._units.rows_U[unit])
        start, stop = int(self._units.starts_U[unit]), int(self._units.stops_U[unit])
        file = self._files[shard]
        with reading(file, f"bytes {start} to {stop}"):
            data = _range_of(file, start, stop)
        parsed = _parsed(data, self._key, rows)
        if parsed is not None:
            return parsed
        before = self._units.rows_U[:unit][self._units.shards_U[:unit] == shard]
        return _line_by_line(data, self._key, file.path, int(before.sum()) + 1)

    def _index(self, file: ShardFile) -> FileUnits:
        with reading(file, "lines"), _stream(file) as stream:
            if _codec(file) is None:
                units = _ranges(_chunks(stream), max(1, self._unit_bytes))
            else:
                units = _whole(_chunks(stream), file.path)
        if len(units.rows) and (widest := int((units.stops - units.starts).max())) > MAX_UNIT_BYTES:
            raise ConfigError(
                f"{file.path}: a line makes a unit of {format_bytes(widest)}, more than "
                f"{format_bytes(MAX_UNIT_BYTES)}; lower unit, or split the line"
            )
        return units


def _codec(file: ShardFile) -> str | None:
    return _CODEC_OF_SUFFIX.get(PurePosixPath(file.path).suffix.lower())


def _stream(file: ShardFile) -> pa.NativeFile:
    """Open the decompressed bytes of a shard; Arrow raises on a stream that is cut short."""
    codec = _codec(file)
    opened = file.open()
    return opened if codec is None else pa.CompressedInputStream(opened, codec)


def _chunks(stream: pa.NativeFile) -> Iterator[pa.Buffer]:
    while len(chunk := stream.read_buffer(_SCAN_BYTES)):
        yield chunk


def _ranges(chunks: Iterator[pa.Buffer], unit_bytes: int) -> FileUnits:
    """Cut a file at the first newline after every ``unit_bytes``."""
    rows: list[int] = []
    stops: list[int] = []
    start = at = carried = 0
    ended = True
    for chunk in chunks:
        data = np.frombuffer(chunk, np.uint8)
        ends: NDArray[np.int64] = np.flatnonzero(data == _NEWLINE) + (at + 1)
        done = 0
        while (cut := int(np.searchsorted(ends, start + unit_bytes))) < len(ends):
            rows.append(carried + cut + 1 - done)
            start, done, carried = int(ends[cut]), cut + 1, 0
            stops.append(start)
        carried += len(ends) - done
        at += len(data)
        ended = bool(data[-1] == _NEWLINE)
    if at > start:
        rows.append(carried + (not ended))
        stops.append(at)
    return FileUnits(
        rows=np.array(rows, np.int64),
        starts=np.array([0, *stops[:-1]] if stops else [], np.int64),
        stops=np.array(stops, np.int64),
    )


def _whole(chunks: Iterator[pa.Buffer], path: str) -> FileUnits:
    """Count the lines of a compressed file, which is one unit."""
    size = rows = 0
    ended = True
    for chunk in chunks:
        data = np.frombuffer(chunk, np.uint8)
        rows += int(np.count_nonzero(data == _NEWLINE))
        size += len(data)
        ended = bool(data[-1] == _NEWLINE)
        if size > MAX_UNIT_BYTES:
            raise ConfigError(
                f"{path}: holds more than {format_bytes(MAX_UNIT_BYTES)} when decompressed, and a compressed "
                "shard is decoded whole; split it into smaller shards"
            )
    count = 1 if size else 0
    return FileUnits(
        rows=np.full(count, rows + (not ended), np.int64),
        starts=np.zeros(count, np.int64),
        stops=np.full(count, size, np.int64),
    )


def _range_of(file: ShardFile, start: int, stop: int) -> pa.Buffer:
    with _stream(file) as stream:
        if _codec(file) is None:
            stream.seek(start)
        data = stream.read_buffer(stop - start)
        more = _codec(file) is not None and len(stream.read_buffer(1)) > 0
    if len(data) != stop - start or more:
        raise IntegrityError(
            f"{file.path}: bytes {start} to {stop} gave {'more' if more else len(data)}; "
            "the file is not the one that was indexed, start anew"
        )
    return data


def _parsed(data: pa.Buffer, key: str, rows: int) -> Records | None:
    """Parse all lines at once; ``None`` where a line needs a closer look."""
    try:
        table = pj.read_json(
            pa.BufferReader(data),
            read_options=pj.ReadOptions(use_threads=False, block_size=len(data)),
            parse_options=pj.ParseOptions(
                explicit_schema=pa.schema([(key, pa.string())]),
                newlines_in_values=False,
                unexpected_field_behavior="ignore",
            ),
        )
        if table.num_rows != rows or table[key].null_count or table[key].num_chunks != 1:
            return None
        texts = table[key].chunk(0)
        texts.validate(full=True)  # Arrow's parser lets bytes through that are not UTF-8
    except pa.ArrowException:
        return None
    return Records(column=text_bytes(texts), bad_B=np.zeros(rows, np.bool_))


def _line_by_line(data: pa.Buffer, key: str, path: str, first_line: int) -> Records:
    """Parse each line by itself; blank lines are empty texts, which give no sample."""
    lines = data.to_pybytes().split(b"\n")
    if not lines[-1]:
        lines.pop()
    texts: list[str | None] = []
    reason = ""
    for number, line in enumerate(lines, start=first_line):
        text, fault = _text_of(line, key)
        texts.append(text)
        reason = reason or (fault and f"{path}:{number}: {fault}")
    return Records.of_texts(texts, reason)


def _text_of(line: bytes, key: str) -> tuple[str | None, str]:
    """Return the text of a line, or ``None`` and what is wrong with it."""
    if not line.strip():
        return "", ""
    try:
        value = orjson.loads(line)
    except orjson.JSONDecodeError as error:
        return None, f"is not JSON: {error}"
    if not isinstance(value, dict):
        return None, f"is a JSON {type(value).__name__}, not an object"
    if key not in value:
        return None, f"has no key {key!r}; it has {', '.join(sorted(value)) or 'none'}"
    text = value[key]
    if not isinstance(text, str):
        return None, f"{key!r} is {text!r:.40}, not a string"
    return text, ""

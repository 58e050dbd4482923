"""Lines of JSON. Shards are divided into ranges of bytes, and compressed shards into ranges of decompressed bytes.

``parsing.json_lines`` reads every line separately, so the content of a line never depends on its neighbours, or on the
unit that it falls into. A line that cannot be used keeps its position, so repairing it later moves no other record.
"""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import TypeAlias

import numpy as np
import pyarrow as pa
import xxhash
from numpy.typing import NDArray
from typing_extensions import override

from omniload.base.errors import ConfigError, IntegrityError
from omniload.base.units import format_bytes
from omniload.mix.schema.splits import key_of
from omniload.mix.sources import JsonlSource
from omniload.source.access.index_folders import indexes_beside
from omniload.source.access.points import (
    NEAR_BYTES,
    SMALL_BYTES,
    AccessPoints,
    KeptPoints,
    require_near,
)
from omniload.source.access.streams import points_of
from omniload.source.columns import Layer, text_bytes
from omniload.source.files import ShardFile, reading
from omniload.source.formats.content import digested
from omniload.source.formats.format import (
    FIRST_BYTES,
    LATER_BYTES,
    MAX_UNIT_BYTES,
    IndexedFormat,
    Records,
    doubt_of_beside,
    doubt_of_prompt,
    require_as_indexed,
)
from omniload.source.formats.spec import FormatSpec
from omniload.source.index import FileUnits, IndexCache, index_of
from omniload.source.parsing.beginnings import behind_mark, codec_of, is_marked, no_zeros, noting
from omniload.source.parsing.compressed import (
    ForwardReader,
    chunks_of,
    no_bomb,
    range_of,
    scan_of,
    stream_of,
)
from omniload.source.parsing.conditions import keeps
from omniload.source.parsing.cutting import line_ranges
from omniload.source.parsing.json_lines.lines import (
    BadLineError,
    key_in,
    object_in,
    object_of,
    text_in,
)
from omniload.source.parsing.json_lines.many_lines import (
    NEWLINES,
    PlainLines,
    one_by_one,
    parts_of,
)
from omniload.source.parsing.json_lines.token_lines import TokenLines
from omniload.source.parsing.table_records import with_others
from omniload.source.parsing.token_lists import LINE, RowsAt
from omniload.source.patterns import FileNames
from omniload.source.sample_tags import LineTags, Tags

__all__ = ["FORMAT", "JsonlFormat"]

_UNMARKED = "/unmarked"
"""Suffix of the digest of a file with a byte-order mark, which is removed; earlier releases read a bad line instead."""
_FIRST_LINES = 256
"""Lines that are checked for fields next to the fields that are read."""
_LONG_LINE = 1 << 14
"""Mean bytes of a line from which each line is parsed separately.

This is as fast as parsing many lines at once, which needs a check beforehand that the parser then makes itself.
"""


class JsonlFormat(IndexedFormat):
    """Reads the text, or the token ids, under one key of every line."""

    units_are_bytes = True

    def __init__(
        self, files: Sequence[ShardFile], config: JsonlSource, cache: IndexCache | None = None
    ) -> None:
        self._files, self._unit_bytes = files, config.unit
        self.holds_text = config.holds_text
        self._lines = _TextLines(config) if config.holds_text else TokenLines(config)
        # Files are divided in the same way for every key, so one index serves all keys.
        kind = f"lines/{config.unit}"
        self._kept = cache.path(kind) if cache else None
        self._points = KeptPoints(cache, kind)
        self._compressed = ForwardReader(self._points)
        index = partial(index_of, files, self._index, kind=kind, cache=cache, unpacks=True)
        self._units = index()
        if config.shuffle.method == "units":
            far = [file for i, file in enumerate(files) if self._last_start(i) > NEAR_BYTES]
            # An index from an earlier release has no entry points.
            if anew := {file.path for file in far if self._points.farthest(file) is None}:
                self._units = index(anew=anew)
            require_near(far, self._points)
        self._points.keep_only(files)

    def _last_start(self, file: int) -> int:
        """Return the decompressed start of the last unit of a file; 0 for a plain file, which is read at any byte."""
        first, behind = map(self._units.first_of, (file, file + 1))
        is_packed = codec_of(self._files[file]) is not None
        return int(self._units.starts_U[behind - 1]) if is_packed and behind > first else 0

    @override
    def read_unit(self, unit: int) -> Records:
        units, place = self._units, self._units[unit]
        file, start, stop = self._files[place.shard], place.start, place.stop
        with reading(file, f"bytes {start} to {stop}"):
            if codec_of(file) is None:
                data = range_of(file, start, stop)
            else:
                is_last = unit + 1 == len(units) or units[unit + 1].shard != place.shard
                number = unit - units.first_of(place.shard)
                data = self._compressed.range_of(file, start, stop, number=number, is_last=is_last)
        if not start:
            data = self._unmarked(data, place.shard)
        # Messages give the number of a line in its file, as editors count.
        records = self._lines.records(data, file.path, units.rows_before(unit) + 1)
        require_as_indexed(file.path, place, len(records.column), "lines")
        return records

    @override
    def reach(self, unit: int) -> None:
        place = self._units[unit]
        file, start = self._files[place.shard], place.start
        if codec_of(file) is not None:
            with reading(file, f"bytes up to {start}"):
                self._compressed.reach(file, start)

    @override
    def name_of_record(self, number: int) -> str:
        return f"{LINE}{number + 1}"

    @override
    def first_records(self) -> Records:
        first = self._first_lines()
        if first is None:
            return Records.of_texts([])
        file, data = first
        return self._lines.records(data, file.path, first_line=1)

    @override
    def first_records_of(self, file: int) -> Records | None:
        shard = self._files[file]
        # The first line may be longer than the bytes that have several lines of most files.
        looks = (_first_lines_of(shard, size_bytes) for size_bytes in (LATER_BYTES, FIRST_BYTES))
        data = next(filter(len, looks), None)
        return None if data is None else self._lines.records(data, shard.path, first_line=1)

    @override
    def doubt(self) -> str:
        first = self._first_lines() if self._lines.doubts else None
        if first is None:
            return ""
        _, data = first
        held = list[dict[str, object]]()
        for line in data.to_pybytes().split(NEWLINES)[:_FIRST_LINES]:
            with suppress(BadLineError):  # a read of the records reports it
                held.append(object_of(line) or {})
        return self._lines.doubt(held)

    def _first_lines(self) -> tuple[ShardFile, pa.Buffer] | None:
        """Return the first shard that has lines, and its first whole lines."""
        # Chosen by its records, because a compressed file has bytes even if it has no line.
        unit = self._units.first_filled()
        if unit is None:
            return None
        file = self._files[self._units[unit].shard]
        return file, _first_lines_of(file, FIRST_BYTES)

    def _index(self, file: ShardFile) -> FileUnits:
        digest, packed, head = xxhash.xxh3_128(), codec_of(file) is not None, bytearray()
        digests: list[int] = []
        with reading(file, "lines"), scan_of(file) as stream:
            chunks = digested(
                digest, noting(head, no_zeros(chunks_of(stream, file), file, FIRST_BYTES))
            )
            if packed:
                chunks = no_bomb(chunks, file)
            units = line_ranges(chunks, self._unit_bytes, digests if packed else None)
            widest = int((units.stops - units.starts).max(initial=0))
            if widest > MAX_UNIT_BYTES:
                raise ConfigError(
                    f"{file.path}: a line makes a unit of {format_bytes(widest)}, more than "
                    f"{format_bytes(MAX_UNIT_BYTES)}; lower unit, or split the line"
                )
            size = int(units.stops.max(initial=0))
            is_large = packed and size > SMALL_BYTES
            if is_large and (points := points_of(file, stream, size)) is not None:
                self._points.keep(file, AccessPoints.of(points, units, digests))
        # The digest covers every byte, because all bytes are searched for newlines anyway.
        content = digest.hexdigest()
        return replace(units, content=f"{content}{_UNMARKED}" if is_marked(head) else content)

    def _unmarked(self, data: pa.Buffer, shard: int) -> pa.Buffer:
        """Return the beginning of a file without a byte-order mark.

        Raises:
            IntegrityError: The index comes from an earlier release, for which the mark made a bad line; so do the runs
                that used it.
        """
        if is_marked(data) and not self._units.contents_F[shard].endswith(_UNMARKED):
            if self._kept is not None:
                for path in (self._kept, *indexes_beside(self._kept)):
                    path.unlink(missing_ok=True)
            raise IntegrityError(
                f"{self._files[shard].path}: begins with a byte-order mark. The release that wrote its index counted "
                "the mark as a bad line; this release leaves it out. The index is removed: start again, without an "
                "earlier state"
            )
        return behind_mark(data)


def _first_lines_of(file: ShardFile, most_bytes: int) -> pa.Buffer:
    """Return the first whole lines of a file."""
    with reading(file, "its first lines"), stream_of(file) as stream:
        data = stream.read_buffer(most_bytes)
    # A line that is cut off is left out.
    cut = len(data) == most_bytes
    return behind_mark(data.slice(0, data.to_pybytes().rfind(NEWLINES) + 1) if cut else data)


_Line: TypeAlias = tuple[bytes, int, bool, Tags]
"""The text of a line, the hash of its key, whether it is drawn from at all, and its tags."""


class _TextLines:
    """Reads the text under one key of every line."""

    def __init__(self, config: JsonlSource) -> None:
        # Stored here, because a property of the configuration is computed at each access.
        self._key, self._nested, self._known_by = config.text, config.is_nested, config.key_column
        self._beside, self._may_lack = config.beside_columns, config.may_lack_beside
        self._transforms = config.transforms
        self._where, self._tags = config.where, LineTags(config.columns_read)
        self._blank: _Line = (b"", 0, True, self._tags.blank)
        # Only a text under one key and values of whole records can be read from many lines at once.
        is_alone = not (self._nested or self._beside or self._where or self._known_by is not None)
        fields = [(self._key, str, False), *self._tags.fields]
        self._plain = PlainLines.of(fields) if is_alone else None

    @property
    def doubts(self) -> bool:
        """Whether fields next to the text may be meant to be read."""
        return self._nested

    def doubt(self, lines: Sequence[Mapping[str, object]]) -> str:
        """Describe unread fields next to conversations in the first lines; empty if there are none."""
        filled = {key for line in lines for key, value in line.items() if value}
        return doubt_of_beside(self._transforms, filled) or doubt_of_prompt(
            self._transforms, {key for line in lines for key in line}
        )

    def records(self, data: pa.Buffer, path: str, first_line: int) -> Records:
        """Read the records of lines.

        Args:
            data: Whole lines.
            path: Path of their file.
            first_line: Number of the first line in the file.
        """
        # Texts take at most as many bytes as the lines; Latin letters without escapes take about as many.
        layer = Layer(len(data), np.dtype(np.uint8))
        keys, kept, bad, reason, are_texts = [], [], [], "", True
        tags = self._tags.gathered()
        for part, ends in parts_of(data):
            # Lines of strict JSON give their texts in one pass. Other lines are judged separately. So are long lines
            # that have little other content, because in the slow path their other content would become Python objects.
            is_long = len(part) >= _LONG_LINE * len(ends)
            many = None if is_long and are_texts else self._plain
            texts = many.read(part, ends) if many is not None else None
            if texts is not None:
                layer.lay(text_bytes(pa.array(texts[0], pa.large_string())))
                tags.add_many(texts[1:])
                bad.append(np.zeros(len(texts[0]), np.bool_))
                continue
            lines: Sequence[bytes | memoryview] = (
                _long_lines(part, ends) if is_long else part[: ends[-1]].tobytes().split(NEWLINES)
            )
            read = one_by_one(lines, self._read, self._blank, path, first_line + sum(map(len, bad)))
            found_L, keys_L, kept_L, tags_L = zip(*read.found, strict=True)
            reason = reason or read.reason
            for each in tags_L:
                tags.add(each)
            are_texts = 2 * sum(map(len, found_L)) >= len(part)
            # Each text was encoded as UTF-8 here, so no check is needed.
            layer.lay(text_bytes(pa.array(found_L, pa.large_binary()).view(pa.large_string())))
            keys.append(np.array(keys_L, np.uint64))
            kept.append(np.array(kept_L, np.bool_))
            bad.append(read.bad_L)
        # Keys and conditions come only from lines that are read one by one, and then from all of them.
        nothing = np.zeros(0, np.bool_)
        records = Records(
            column=layer.finish(),
            is_own=True,
            bad_B=np.concatenate([nothing, *bad]),
            reason=reason,
            keys_B=np.concatenate([np.zeros(0, np.uint64), *keys])
            if self._known_by is not None
            else None,
            kept_B=np.concatenate([nothing, *kept]) if self._where else None,
        )
        where = RowsAt(where=path, first=first_line, word="line")
        return with_others(records, tags.columns(), where)

    def _read(self, line: bytes | memoryview) -> _Line:
        """Return the content of a line.

        Raises:
            BadLineError: The line has no text.
        """
        value = object_of(line)
        if value is None:
            return self._blank
        if self._where and not keeps(self._where, value):
            return b"", 0, False, self._tags.blank
        if self._beside:
            text = object_in(value, (self._key, *self._beside), self._may_lack)
        else:
            text = text_in(value, self._key, nested=self._nested)
        known = 0 if self._known_by is None else key_of(key_in(value, self._known_by))
        return text, known, True, self._tags.of(value)


def _long_lines(part: NDArray[np.uint8], ends: NDArray[np.int64]) -> list[memoryview]:
    """Return views of lines."""
    stops = ends.tolist()
    begins = [0, *(stop + 1 for stop in stops[:-1])]
    return [part.data[begin:stop] for begin, stop in zip(begins, stops, strict=True)]


FORMAT = FormatSpec(
    what="a file of JSON lines",
    names=FileNames(
        suffixes=frozenset({".jsonl", ".json", ".ndjson", ".jsonlines"}), compressed=True
    ),
    open=JsonlFormat,
    digests_all=True,
)

"""Comma-separated values with a header: each row is a record, of which one or several columns are read.

Fields have no types. Next to the text, a condition or a user's column reads a field as the type that it needs, and a
key uses the field unchanged. An empty field is no number, boolean or key, but it is a text.

A quoted field may contain newlines, so the end of a row depends on the quotes before it, whose number must be even.
This is correct if quotes open and close fields (RFC 4180). A quote inside an unquoted field would invert the meaning of
everything after it, so such a quote is refused.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa
import xxhash
from numpy.typing import NDArray
from pyarrow import csv
from typing_extensions import override

from omniload.base.errors import ConfigError, IntegrityError
from omniload.base.ragged import Ragged, offsets_of
from omniload.mix.columns import name_outside, said_of_inside
from omniload.mix.schema.splits import key_of
from omniload.mix.sources import CsvSource
from omniload.source.files import ShardFile, reading
from omniload.source.formats.content import digested
from omniload.source.formats.format import IndexedFormat, Records, Unit, require_as_indexed
from omniload.source.formats.spec import FormatSpec
from omniload.source.index import FileUnits, IndexCache, index_of
from omniload.source.parsing.arrow_columns import records_of, texts_in
from omniload.source.parsing.beginnings import MARK, codec_of, said_of_beginning
from omniload.source.parsing.compressed import (
    chunks_of,
    doubt_of_wholes,
    range_of,
    require_held_whole,
    stream_of,
)
from omniload.source.parsing.conditions import kept_records, value_of_text
from omniload.source.parsing.cutting import byte_ranges, cuts, whole_shard
from omniload.source.parsing.table_records import with_others
from omniload.source.parsing.token_lists import RowsAt, row_at, said_of_choice
from omniload.source.patterns import FileNames
from omniload.source.sample_tags import tags_of_fields

__all__ = ["FORMAT", "CsvFormat"]

_QUOTE, _NEWLINE, _RETURN = b'"\n\r'
_NEWLINES = b"\n"
_LARGEST_HEADER = 1 << 20
_HEAD_BYTES = 16


class CsvFormat(IndexedFormat):
    """Reads a text column, or several columns that become one object."""

    holds_text = True
    units_are_bytes = True
    records_from = "0 behind the header"

    def __init__(
        self, files: Sequence[ShardFile], config: CsvSource, cache: IndexCache | None = None
    ) -> None:
        self._files, self._config = files, config
        # The text column is part of the key, because the header is checked for it only when a shard is indexed. In
        # version 2, the units of compressed shards go to the end of the shard.
        kind = f"csv 2/{config.delimiter}/{config.quoted}/{config.unit}/{config.text}"
        self._texts = (config.text, *config.beside_columns)
        """Columns that make up the text of a record."""
        # Stored here, because a property of the configuration is computed at each access, and there are many units.
        self._key = config.key_column
        self._own = config.columns_read
        keys = () if self._key is None else (self._key,)
        self._names = tuple(
            dict.fromkeys((*self._texts, *keys, *config.where, *self._own.values()))
        )
        if len(self._names) > 1:
            kind += f"/{list(self._names[1:])}"
        self._units = index_of(files, self._index, kind=kind, cache=cache, unpacks=True)

    @override
    def read_unit(self, unit: int) -> Records:
        units, place = self._units, self._units[unit]
        file = self._files[place.shard]
        with reading(file, f"bytes {place.start} to {place.stop}"):
            # The header is put before every unit, so that columns are found by name.
            if codec_of(file) is None:
                # The header ends at the start of the first unit.
                header = range_of(file, 0, units[units.first_of(place.shard)].start)
                body = range_of(file, place.start, place.stop)
            else:
                whole = range_of(file, 0, place.stop)
                header, body = whole[: place.start], whole[place.start :]
            return self._parsed(header, body, place, file.path, units.rows_before(unit))

    @override
    def doubt(self) -> str:
        units = self._units
        together = self._config.shuffle.units_together(len(units))
        return doubt_of_wholes(
            self._files, units.shards_U, units.stops_U - units.starts_U, min(together, len(units))
        )

    def _parsed(
        self, header: pa.Buffer, body: pa.Buffer, unit: Unit, path: str, before: int
    ) -> Records:
        """Decode the rows of a unit after a header; ``before`` is the number of rows in the shard before the unit."""
        at = RowsAt(where=path, first=before)
        # Arrow removes a byte-order mark too, but not if the bytes are read as Latin-1 below.
        data = b"".join((memoryview(header), memoryview(body))).removeprefix(MARK)
        bad: dict[int, str] = {}
        try:
            columns = self._columns(data, self._names)
        except pa.ArrowInvalid:
            # A row has too many or too few fields. Arrow passes such a row to a handler as text, and drops it. As
            # Latin-1, any bytes are text, and commas, quotes and newlines keep their meaning. Arrow then knows no mark
            # and no names beyond ASCII, so the mark is removed above and the names are converted.
            def note(row: csv.InvalidRow) -> str:
                at = row.number - 2  # from 1, and the header counts as a row
                bad[at] = f"has {row.actual_columns} fields, not {row.expected_columns}"
                return "skip"

            latin, *names = (
                held.decode("latin-1") for held in (data, *map(str.encode, self._names))
            )
            columns = [_from_latin(each) for each in self._columns(latin.encode(), names, note)]
        count = len(columns[0]) + len(bad)
        require_as_indexed(path, unit, count, "rows")
        held = dict(zip(self._names, columns, strict=True))
        if not bad:
            records, faults = self._records(held, at)
            return records.with_faults(faults, partial(row_at, at))
        rows = np.delete(np.arange(count), sorted(bad))
        # Rows are named by their number in the file, for which the bad rows between them count.
        names = [f"{at.word} {before + row}" for row in rows.tolist()]
        records, faults = self._records(held, replace(at, names=names))
        records = _spread(records, rows, count)
        faults = bad | {int(rows[i]): said for i, said in faults.items()}
        return records.with_faults(faults, partial(row_at, at))

    def _records(
        self, columns: Mapping[str, pa.ChunkedArray], at: RowsAt
    ) -> tuple[Records, dict[int, str]]:
        """Return the records of the rows that could be parsed, and the faults outside their texts, by row."""
        where, rows = self._config.where, len(columns[self._config.text])
        faults: dict[int, str] = {}
        kept_B = keys_B = None
        if where:
            asked = {name: columns[name].to_pylist() for name in where}
            kept_B, faults = kept_records(
                where,
                lambda i: {
                    name: value_of_text(asked[name][i], name, where[name]) for name in where
                },
                rows,
            )
        if self._key is not None:
            keys = columns[self._key].to_pylist()
            keys_B = np.fromiter(map(key_of, keys), np.uint64, rows)
            for i, key in enumerate(keys):
                if not key and (kept_B is None or kept_B[i]):
                    faults.setdefault(
                        i, f"{self._key!r} is empty, and a key is a text or an integer"
                    )
        texts = {
            name: pa.chunked_array(
                [chunk.view(pa.large_string()) for chunk in columns[name].chunks], pa.large_string()
            )
            for name in self._texts
        }
        records = records_of(
            texts_in(texts, self._texts, "nested"), at, "text", kept_B, named=self._texts
        )
        for inside, column in self._own.items():
            values, wrong = tags_of_fields(columns[column], column, inside)
            for row, said in wrong.items():
                if records.usable_B[row]:
                    faults.setdefault(row, f"{name_outside(inside)}: {said}")
            records = with_others(records, {inside: values}, at)
        return replace(records, keys_B=keys_B), faults

    def _columns(
        self,
        data: bytes,
        names: Sequence[str],
        note: Callable[[csv.InvalidRow], str] | None = None,
    ) -> list[pa.ChunkedArray]:
        table = csv.read_csv(
            pa.BufferReader(data),
            # In one thread, because otherwise bad rows have no number; in one block, because otherwise a long row is
            # refused.
            read_options=csv.ReadOptions(use_threads=False, block_size=len(data) + 1),
            parse_options=self._parse_options(note),
            convert_options=csv.ConvertOptions(
                # Read as bytes, so that one row of invalid text does not make the whole unit fail.
                check_utf8=False,
                include_columns=list(names),
                column_types=dict.fromkeys(names, pa.large_binary()),
                # An empty field is an empty text, not a null.
                strings_can_be_null=False,
            ),
        )
        return [table.column(i) for i in range(len(names))]

    def _parse_options(
        self, note: Callable[[csv.InvalidRow], str] | None = None
    ) -> csv.ParseOptions:
        return csv.ParseOptions(
            delimiter=self._config.delimiter,
            quote_char='"' if self._config.quoted else False,
            newlines_in_values=self._config.quoted,
            invalid_row_handler=note,
        )

    def _index(self, file: ShardFile) -> FileUnits:
        digest = xxhash.xxh3_128()
        rows = _Rows(
            path=file.path, quoted=self._config.quoted, delimiter=ord(self._config.delimiter)
        )
        plain = codec_of(file) is None
        with reading(file, "rows"), stream_of(file) as stream:
            for chunk in digested(digest, chunks_of(stream, file)):
                if not rows.at and (said := said_of_beginning(chunk[:_HEAD_BYTES].to_pybytes())):
                    raise ConfigError(f"{file.path}: {said}")
                rows.take(np.frombuffer(chunk, np.uint8))
                if not plain:
                    require_held_whole(file, rows.at)
        ends = rows.finished()
        if not len(ends):
            raise ConfigError(f"{file.path}: is empty, without a header; remove it, or write one")
        with reading(file, "its header"):
            self._require_columns(file, int(ends[0]))
        start, ends, content = int(ends[0]), ends[1:], digest.hexdigest()
        if plain:
            found = cuts([ends - start], self._config.unit)
            return byte_ranges(file, start, found, content=content)
        return whole_shard(file, start, rows.at, rows=len(ends), content=content)  # to the end

    def _require_columns(self, file: ShardFile, stop: int) -> None:
        if stop > _LARGEST_HEADER:
            raise ConfigError(
                f"{file.path}: its first row has {stop:,} bytes, more than a header of {_LARGEST_HEADER:,}; "
                "is it of this type, with this delimiter?"
            )
        with stream_of(file) as stream:
            # A header without rows may lack its newline, and Arrow would then see no row at all.
            header = stream.read_buffer(stop).to_pybytes().removesuffix(_NEWLINES) + _NEWLINES
        names = csv.read_csv(
            pa.BufferReader(header), parse_options=self._parse_options()
        ).column_names
        odd = next((name for name in self._names if names.count(name) != 1), None)
        if odd is not None:
            has = "no column" if odd not in names else "more than one column"
            # Quoted, because pandas writes its index with an empty name.
            shown = ", ".join(map(repr, names))[:300]
            choice = (
                said_of_choice("text", names) if odd == self._config.text else "correct the name"
            )
            raise ConfigError(
                f"{file.path}: has {has} {odd!r}; its first row has {shown}: {choice}, or name the delimiter"
                f"{said_of_inside(odd, names)}"
            )


def _from_latin(column: pa.ChunkedArray) -> pa.ChunkedArray:
    # Convert back to the original bytes.
    values = [value.decode().encode("latin-1") for value in column.to_pylist()]
    return pa.chunked_array([pa.array(values, pa.large_binary())])


def _spread(records: Records, rows: NDArray[np.int64], count: int) -> Records:
    """Put the parsed rows at their places among ``count`` rows; the rows between them are empty."""

    def spread(values: NDArray[Any], between: float) -> NDArray[Any]:
        found = np.full(count, between, values.dtype)
        found[rows] = values
        return found

    offsets = offsets_of(spread(records.column.lengths_N, 0))
    return replace(
        records,
        column=Ragged(values_V=records.column.values_V, offsets=offsets),
        others={
            name: Ragged(values_V=column.values_V, offsets=offsets_of(spread(column.lengths_N, 0)))
            for name, column in records.others.items()
        },
        bad_B=spread(records.bad_B, False),
        keys_B=None if records.keys_B is None else spread(records.keys_B, 0),
        kept_B=None if records.kept_B is None else spread(records.kept_B, True),
    )


@dataclass(slots=True, kw_only=True)
class _Rows:
    """Finds the ends of rows, chunk by chunk; blank lines are not rows."""

    path: str
    quoted: bool
    delimiter: int
    at: int = 0
    """Bytes read so far."""
    quotes: int = 0
    """Quotes read so far."""
    before: int = _NEWLINE
    """The byte before the next chunk."""
    waits: bool = False
    """Whether this byte is a carriage return outside of quotes."""
    row_start: int = 0
    ends: list[NDArray[np.int64]] = field(default_factory=list)

    def take(self, data: NDArray[np.uint8]) -> None:
        """Process the next bytes.

        Raises:
            IntegrityError: A quote, or a carriage return, is at a place where none is allowed.
        """
        newlines = np.flatnonzero(data == _NEWLINE)
        returns = np.flatnonzero(data == _RETURN)
        previous = np.concatenate(([self.before], data[:-1])).astype(np.uint8)
        # The first row begins after a byte-order mark, so a quote there opens its first field.
        if self.at == 0 and bytes(data[: len(MARK)]) == MARK:
            self.row_start = len(MARK)
            previous[len(MARK) : len(MARK) + 1] = _NEWLINE
        if self.quoted:
            quotes = np.flatnonzero(data == _QUOTE)
            self._require_openings(previous, quotes)
            newlines = newlines[self._outside(quotes, newlines)]
            returns = returns[self._outside(quotes, returns)]
            self.quotes += len(quotes)
        self._require_pairs(data, returns)
        stops = newlines + self.at + 1
        lengths = np.diff(stops, prepend=self.row_start)
        blank = (lengths == 1) | ((lengths == 2) & (previous[newlines] == _RETURN))
        self.ends.append(stops[~blank])
        if len(stops):
            self.row_start = int(stops[-1])
        self.at += len(data)
        self.before = int(data[-1])

    def finished(self) -> NDArray[np.int64]:
        """Return the end of each row, including the header.

        Raises:
            IntegrityError: A quoted field is still open.
        """
        if self.waits:
            raise self._alone(self.at - 1)
        if self.quoted and self.quotes % 2:
            raise IntegrityError(
                f"{self.path}: the row that starts at byte {self.row_start} ends with the file in the middle of a "
                "quoted field; the file is cut short or a quote is missing, replace it"
            )
        ends = np.concatenate(self.ends) if self.ends else np.empty(0, np.int64)
        # The last row needs no newline.
        return np.append(ends, self.at) if self.at > self.row_start else ends

    def _outside(self, quotes: NDArray[np.int64], places: NDArray[np.int64]) -> NDArray[np.bool_]:
        # An even number of quotes before a place means that all of them are closed.
        outside: NDArray[np.bool_] = (np.searchsorted(quotes, places) + self.quotes) % 2 == 0
        return outside

    def _require_openings(self, previous: NDArray[np.uint8], quotes: NDArray[np.int64]) -> None:
        # Every second quote opens a field; the quotes of earlier chunks decide which.
        opening = quotes[self.quotes % 2 :: 2]
        left = previous[opening]
        wrong = opening[
            (left != self.delimiter) & (left != _NEWLINE) & (left != _QUOTE) & (left != _RETURN)
        ]
        if len(wrong):
            raise IntegrityError(
                f"{self.path}: byte {self.at + int(wrong[0])}: a quote in the middle of a field that is not quoted; "
                "quote the field and double the quote, or set quoted: false where quotes mean nothing"
            )

    def _require_pairs(self, data: NDArray[np.uint8], returns: NDArray[np.int64]) -> None:
        """Raise for a carriage return outside of quotes without a newline: readers disagree on its meaning."""
        last = len(data) - 1
        if self.waits and data[0] != _NEWLINE:
            raise self._alone(self.at - 1)
        alone = returns[(returns < last) & (data[np.minimum(returns + 1, last)] != _NEWLINE)]
        if len(alone):
            raise self._alone(self.at + int(alone[0]))
        self.waits = bool(len(returns) and returns[-1] == last)

    def _alone(self, at: int) -> IntegrityError:
        return IntegrityError(
            f"{self.path}: byte {at}: a carriage return alone; end rows with newlines, and quote fields that hold it"
        )


FORMAT = FormatSpec(
    what="a file of comma-separated values",
    names=FileNames(suffixes=frozenset({".csv", ".tsv"}), compressed=True),
    open=CsvFormat,
    digests_all=True,
    knows_columns=True,
)

"""MDS, the shards of Mosaic's streaming: a table of offsets, and samples end to end.

A shard, all numbers little-endian::

    samples, N                    uint32
    first byte of each, and end   uint32[N + 1]
    the columns as JSON           (index.json says the same)
    N samples

A sample holds the length (uint32) of each of its columns whose size differs from sample to sample, and then
its columns. Columns are cut out of all samples of a unit at once.

Shape suffixes:
    N  samples of a unit        K  columns of differing size
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from typing_extensions import override

from omniload.base.errors import ConfigError, IntegrityError
from omniload.base.ragged import Ragged, gather_ranges
from omniload.mix.sources import MdsSource
from omniload.source.columns import text_array
from omniload.source.files import ShardFile, beside, reading
from omniload.source.formats.content import digest_of_ranges, even_ranges
from omniload.source.formats.format import MAX_UNIT_BYTES, IndexedFormat, Records
from omniload.source.formats.spec import FormatSpec
from omniload.source.index import FileUnits, IndexCache, index_of
from omniload.source.parsing.arrow_columns import records_of
from omniload.source.parsing.cutting import cuts, require_sizes
from omniload.source.parsing.mds_index import MdsShard, shards_in
from omniload.source.parsing.shard_lists import listed_once, read_json
from omniload.source.parsing.token_lists import (
    RowsAt,
    fault_of,
    row_at,
    rows_of_ids,
    said_of_columns,
)
from omniload.source.patterns import FileNames

__all__ = ["FORMAT", "MdsFormat"]

_INDEX = "index.json"
_DTYPE_OF_CODE = {
    8: "<u1",
    9: "<i1",
    16: "<u2",
    17: "<i2",
    32: "<u4",
    33: "<i4",
    64: "<u8",
    65: "<i8",
}
_DTYPE_OF_NAME = {np.dtype(name).name: np.dtype(name) for name in _DTYPE_OF_CODE.values()}


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
        self._of_path = {file.path: each for file, each in zip(files, described, strict=True)}
        for file, each in zip(files, described, strict=True):
            # Here and not as shards are indexed: a kept index serves every column.
            _require_column(file, each, config)
        self._units = index_of(
            files, self._index, kind=f"mds/{config.unit}", cache=cache, unpacks=True
        )

    @override
    def read_unit(self, unit: int) -> Records:
        shard, start, stop, _ = self._units[unit]
        file, described = self._files[shard], self._described[shard]
        where = RowsAt(where=file.path, first=start, word="sample")
        with reading(file, f"samples {start} to {stop}"):
            whole = (
                # A name ends in no NUL: one that is never compressed matches nothing.
                _unzipped(file, described) if file.path.endswith(described.zipped or "\0") else None
            )
            offsets = _offsets(file, whole, start, stop)
            _require_rising(file, offsets, described)
            first, last = int(offsets[0]), int(offsets[-1])
            data = (
                whole[first:last]
                if whole is not None
                else file.read_range(first, last)
                if last > first
                else b""
            )
        values = _column(
            np.frombuffer(data, np.uint8), offsets - first, described, self._config.column, where
        )
        if self.holds_text:
            return records_of(
                pa.chunked_array([text_array(values)]), where, "text", named=(self._config.column,)
            )
        encoding = described.encodings[described.columns.index(self._config.column)]
        return _ids(values, encoding, self._config.dtype, (where, self._config.column))

    def _index(self, file: ShardFile) -> FileUnits:
        described = self._of_path[file.path]
        zipped = file.path.endswith(described.zipped or "\0")
        with reading(file, "its offsets"):
            whole = _unzipped(file, described) if zipped else None
            if whole is None and file.size_bytes != described.size_bytes:
                raise IntegrityError(
                    f"{file.path}: holds {file.size_bytes} bytes, {described.size_bytes} by its index; "
                    "replace one of them"
                )
            offsets = _offsets(file, whole, 0, described.samples)
            _require_rising(file, offsets, described)
            if offsets[-1] != described.size_bytes:
                raise IntegrityError(
                    f"{file.path}: its samples end at byte {offsets[-1]} of {described.size_bytes}; replace it"
                )
            content = digest_of_ranges(file, even_ranges(file.size_bytes))
        # A compressed shard is decompressed whole for any part of it.
        found = cuts(offsets[1:] - offsets[0], MAX_UNIT_BYTES if zipped else self._config.unit)
        require_sizes(file, offsets[found[1:]] - offsets[found[:-1]])
        return FileUnits(rows=np.diff(found), starts=found[:-1], stops=found[1:], content=content)


def _require_column(file: ShardFile, described: MdsShard, config: MdsSource) -> None:
    """Refuse a shard without the column, or with one of another kind."""
    if config.column not in described.columns:
        raise ConfigError(
            f"{file.path}: has no column {config.column!r}; it has {', '.join(described.columns)[:300]}"
        )
    if described.columns.count(config.column) > 1:
        raise ConfigError(
            f"{file.path}: has more than one column {config.column!r}; it has {', '.join(described.columns)[:300]}: "
            "name another, or write the shard anew"
        )
    encoding = described.encodings[described.columns.index(config.column)]
    kind, _, rest = encoding.partition(":")
    if config.holds_text and kind not in {"str", "bytes"}:
        raise ConfigError(
            f"{file.path}: column {config.column!r} is {encoding}, not str; name another column or use the key tokens"
        )
    if not config.holds_text and kind not in {"ndarray", "bytes"}:
        raise ConfigError(
            f"{file.path}: column {config.column!r} is {encoding}, not ndarray or bytes; name another column, or use "
            "the key text"
        )
    if not config.holds_text and kind == "bytes" and config.dtype is None:
        raise ConfigError(
            f"{file.path}: column {config.column!r} is of bytes; state the dtype of the ids in them, such as int64"
        )
    if kind == "ndarray" and rest and rest.partition(":")[0] not in _DTYPE_OF_NAME:
        raise ConfigError(
            f"{file.path}: column {config.column!r} is {encoding}; token ids are integers, name another column"
        )


def _unzipped(file: ShardFile, described: MdsShard) -> bytes:
    """Decompress a shard; no more than its index says, whatever the frame says of itself.

    Raises:
        IntegrityError: It holds another number of bytes.
    """
    # Before memory is taken: the index is a file like any other, and may be damaged.
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


def _offsets(file: ShardFile, whole: bytes | None, start: int, stop: int) -> NDArray[np.int64]:
    """Return the first byte of samples ``start`` to ``stop``, and of the one after them."""
    begin, end = 4 * (1 + start), 4 * (2 + stop)
    data = file.read_range(begin, end) if whole is None else whole[begin:end]
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


def _column(
    data: NDArray[np.uint8],
    offsets: NDArray[np.int64],
    described: MdsShard,
    column: str,
    where: RowsAt,
) -> Ragged:
    """Cut a column out of samples that lie end to end.

    Raises:
        IntegrityError: The columns of a sample do not fill it.
    """
    number = described.columns.index(column)
    sizes = np.array(described.sizes, np.int64)
    differing = np.flatnonzero(sizes == 0)
    begins_N, ends_N = offsets[:-1], offsets[1:]
    # Only columns that differ have a length in front; the others have the one that the index says.
    head = 4 * len(differing)
    if len(begins_N) and int((ends_N - begins_N).min()) < head:
        at = int((ends_N - begins_N).argmin())
        raise IntegrityError(
            f"{row_at(where, at)} has {ends_N[at] - begins_N[at]} bytes; replace the shard"
        )
    places = begins_N[:, None] + np.arange(head)
    lengths_NK = data[places].view("<u4").astype(np.int64).reshape(len(begins_N), len(differing))
    filled = begins_N + head + int(sizes.sum()) + lengths_NK.sum(axis=1)
    if (wrong := filled != ends_N).any():
        at = int(wrong.argmax())
        raise IntegrityError(
            f"{row_at(where, at)}: its columns end at byte {filled[at] - begins_N[at]} of "
            f"{ends_N[at] - begins_N[at]}; replace the shard"
        )
    before = int(np.searchsorted(differing, number))
    starts = begins_N + head + int(sizes[:number].sum()) + lengths_NK[:, :before].sum(axis=1)
    own = lengths_NK[:, before] if sizes[number] == 0 else np.full(len(starts), sizes[number])
    values, ends = gather_ranges(data, starts, starts + own)
    return Ragged(values_V=values, offsets=ends)


@dataclass(slots=True, kw_only=True)
class _Faults:
    """Which samples of a unit hold no token ids, and what is wrong with the first of them."""

    bad_N: NDArray[np.bool_]
    first: int = -1
    said: str = ""

    def note(self, wrong_N: NDArray[np.bool_], say: Callable[[int], str]) -> None:
        """Take in samples that are wrong; what is said of one before stands."""
        if wrong_N.any():
            at = int(wrong_N.argmax())
            if self.first < 0 or at < self.first:
                self.first, self.said = at, say(at)
            self.bad_N |= wrong_N


def _ids(values: Ragged, encoding: str, dtype: str | None, place: tuple[RowsAt, str]) -> Records:
    """Read the arrays of a column; what is none, or holds something else than token ids, is a bad record.

    Args:
        values: The bytes of each sample.
        encoding: What the index says of the column.
        dtype: Type of ids where they are bytes.
        place: That of the samples, and the name of the column.
    """
    faults = _Faults(bad_N=np.zeros(len(values), np.bool_))
    kind, _, rest = encoding.partition(":")
    named, _, shape = rest.partition(":")
    starts, stops = values.offsets[:-1].copy(), values.offsets[1:]
    types: list[np.dtype[Any]]
    # ``ndarray:TYPE:SHAPE``: what is left out there stands before each array.
    if kind == "bytes" or named:
        types = [np.dtype(dtype) if kind == "bytes" else _DTYPE_OF_NAME[named]]
        chosen = np.zeros(len(values), np.int64)
    else:
        codes = _bytes_at(values, starts, faults)
        faults.note(
            ~np.isin(codes, list(_DTYPE_OF_CODE)),
            lambda at: f"is of type {codes[at]}, where integers belong; name another column",
        )
        codes[faults.bad_N] = next(iter(_DTYPE_OF_CODE))
        found = np.unique(codes).tolist()
        types = [np.dtype(_DTYPE_OF_CODE[code]) for code in found]
        chosen = np.searchsorted(found, codes)
        starts += 1
    if kind == "ndarray" and not shape:
        codes = _bytes_at(values, starts, faults)
        # The shape: how many numbers in the upper bits of its code, in the lower ones how wide each is.
        starts += 1 + (codes >> 2) * (1 << (codes & 3))
    column = _cast(values.values_V, starts, stops, types, chosen, faults)
    reason = ""
    if faults.said:
        where, name = place
        reason = f"{row_at(where, faults.first)}: {said_of_columns([name])}{faults.said}"
    return Records(column=column, bad_B=faults.bad_N, reason=reason)


def _bytes_at(values: Ragged, places: NDArray[np.int64], faults: _Faults) -> NDArray[np.int64]:
    faults.note(places >= values.offsets[1:], lambda _: "has an array that is cut short")
    if not len(values.values_V):
        return np.zeros(len(places), np.int64)
    # Of those that are cut short any byte.
    return values.values_V[np.minimum(places, len(values.values_V) - 1)].astype(np.int64)


def _cast(
    data: NDArray[np.uint8],
    starts: NDArray[np.int64],
    stops: NDArray[np.int64],
    types: list[np.dtype[Any]],
    chosen: NDArray[np.int64],
    faults: _Faults,
) -> Ragged:
    """Read ranges of bytes as token ids, each of the type that was chosen for it; of what is wrong nothing."""
    widths = np.array([each.itemsize for each in types] or [1], np.int64)[chosen]
    sizes = stops - starts
    faults.note(
        (sizes < 0) | (sizes % widths != 0),
        lambda at: f"has an array of {sizes[at]} bytes, of ids of {widths[at]}",
    )
    starts = np.where(faults.bad_N, stops, starts)
    offsets = np.concatenate((np.zeros(1, np.int64), np.cumsum((stops - starts) // widths)))
    ids = np.empty(0 if len(types) == 1 else int(offsets[-1]), np.int32)
    for number, dtype in enumerate(types):
        mine = np.flatnonzero(chosen == number)
        found, ends = gather_ranges(data, starts[mine], stops[mine])
        ids_V, ends = found.view(dtype), ends // dtype.itemsize
        part, wrong_B = rows_of_ids(ids_V, ends)
        wrong_N = np.zeros(len(chosen), np.bool_)
        wrong_N[mine[wrong_B]] = True
        faults.note(wrong_N, partial(_fault_of_owner, ids_V, ends, mine))
        # Nearly always: a writer gives a column one type.
        if len(types) == 1:
            return part
        counts = np.diff(ends)
        inside = np.arange(len(ids_V)) - np.repeat(ends[:-1], counts)
        # Back to the places of their samples.
        ids[np.repeat(offsets[mine], counts) + inside] = part.values_V
    return Ragged(values_V=ids, offsets=offsets)


def _fault_of_owner(
    ids_V: NDArray[Any], ends: NDArray[np.int64], mine: NDArray[np.int64], sample: int
) -> str:
    """Say what is wrong with the ids of a sample, by its place in the column, not among those of one type."""
    at = int(np.searchsorted(mine, sample))
    return fault_of(ids_V[ends[at] : ends[at + 1]])


def _shards(files: Sequence[ShardFile]) -> tuple[ShardFile, ...]:
    """Put the shards that an index lists in its place, each by its plain file; compressed ones where both are there."""
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
    # Each read once, and not for each of its shards.
    indexes = {file.beside[0].path: file.beside[0] for file in files}
    described: dict[str, MdsShard] = {}
    for path, index in indexes.items():
        folder = path.rpartition("/")[0]
        for each in shards_in(index, read_json(index)):
            # By both names: a shard may be there compressed or not.
            described |= {f"{folder}/{name}": each for name in (each.name, each.zipped) if name}
    return MdsFormat(files, [described[file.path] for file in files], config, cache)


FORMAT = FormatSpec(
    what="a shard of MDS",
    names=FileNames(suffixes=frozenset(), manifest=_INDEX),
    open=_opened,
    shards=_shards,
)

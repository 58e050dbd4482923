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

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from typing_extensions import override

from omniload.base.errors import ConfigError, IntegrityError
from omniload.base.ragged import Ragged, gather_ranges
from omniload.mix.sources import MdsSource
from omniload.source.columns import text_array
from omniload.source.content import digest_of_ranges, even_ranges
from omniload.source.files import ShardFile, beside, reading
from omniload.source.formats.format import MAX_UNIT_BYTES, IndexedFormat, Records
from omniload.source.formats.spec import FormatSpec
from omniload.source.index import FileUnits, IndexCache, index_of
from omniload.source.parsing.arrow_columns import records_of
from omniload.source.parsing.cutting import cuts, require_sizes
from omniload.source.parsing.mds_index import MdsShard, shards_in
from omniload.source.parsing.shard_lists import read_json
from omniload.source.parsing.token_lists import RowsAt, ids_of_rows, row_at
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
        self._units = index_of(files, self._index, kind=f"mds/{config.unit}", cache=cache)

    @override
    def read_unit(self, unit: int) -> Records:
        units = self._units
        shard = int(units.shards_U[unit])
        start, stop = int(units.starts_U[unit]), int(units.stops_U[unit])
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
        column = _ids(values, encoding, self._config.dtype, (where, self._config.column))
        return Records(column=column, bad_B=np.zeros(len(column), np.bool_))

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


def _ids(values: Ragged, encoding: str, dtype: str | None, place: tuple[RowsAt, str]) -> Ragged:
    """Read the arrays of a column; ``place`` is that of its samples, and its name.

    Raises:
        IntegrityError: One of them is none.
    """
    kind, _, rest = encoding.partition(":")
    named, _, shape = rest.partition(":")
    starts, stops = values.offsets[:-1].copy(), values.offsets[1:]
    types: list[np.dtype[Any]]
    # ``ndarray:TYPE:SHAPE``: what is left out there stands before each array.
    if kind == "bytes" or named:
        types = [np.dtype(dtype) if kind == "bytes" else _DTYPE_OF_NAME[named]]
        chosen = np.zeros(len(values), np.int64)
    else:
        codes = _bytes_at(values, starts, place)
        found = np.unique(codes).tolist()
        if strange := [code for code in found if code not in _DTYPE_OF_CODE]:
            at = int((codes == strange[0]).argmax())
            raise IntegrityError(
                f"{_said_at(place, at)}: an array of type {strange[0]}, where integers belong; name another column"
            )
        types = [np.dtype(_DTYPE_OF_CODE[code]) for code in found]
        chosen = np.searchsorted(found, codes)
        starts += 1
    if kind == "ndarray" and not shape:
        codes = _bytes_at(values, starts, place)
        # The shape: how many numbers in the upper bits of its code, in the lower ones how wide each is.
        starts += 1 + (codes >> 2) * (1 << (codes & 3))
    return _cast(values.values_V, starts, stops, types, chosen, place)


def _bytes_at(
    values: Ragged, places: NDArray[np.int64], place: tuple[RowsAt, str]
) -> NDArray[np.int64]:
    if (places >= values.offsets[1:]).any():
        at = int((places >= values.offsets[1:]).argmax())
        raise IntegrityError(f"{_said_at(place, at)}: its array is cut short; replace the shard")
    return values.values_V[places].astype(np.int64)


def _cast(
    data: NDArray[np.uint8],
    starts: NDArray[np.int64],
    stops: NDArray[np.int64],
    types: list[np.dtype[Any]],
    chosen: NDArray[np.int64],
    place: tuple[RowsAt, str],
) -> Ragged:
    """Read ranges of bytes as integers, each of the type that was chosen for it."""
    widths = np.array([each.itemsize for each in types] or [1], np.int64)[chosen]
    sizes = stops - starts
    if ((sizes < 0) | (sizes % widths != 0)).any():
        at = int(((sizes < 0) | (sizes % widths != 0)).argmax())
        raise IntegrityError(
            f"{_said_at(place, at)}: its array has {sizes[at]} bytes of ids of {widths[at]}; replace the shard"
        )
    offsets = np.concatenate((np.zeros(1, np.int64), np.cumsum(sizes // widths)))
    # Nearly always: a writer gives a column one type.
    if len(types) == 1:
        found, _ = gather_ranges(data, starts, stops)
        return Ragged(
            values_V=ids_of_rows(found.view(types[0]), offsets[1:], place[0], [place[1]]),
            offsets=offsets,
        )
    ids = np.empty(int(offsets[-1]), np.int32)
    for number, dtype in enumerate(types):
        mine = np.flatnonzero(chosen == number)
        found, ends = gather_ranges(data, starts[mine], stops[mine])
        # By the place in the column, not among those of one type.
        owners = np.repeat(mine, np.diff(ends) // dtype.itemsize)
        part = _ids_owned(found.view(dtype), owners, place)
        inside = np.arange(len(part)) - np.repeat(
            ends[:-1] // dtype.itemsize, np.diff(ends) // dtype.itemsize
        )
        # Back to the places of their samples.
        ids[np.repeat(offsets[mine], np.diff(ends) // dtype.itemsize) + inside] = part
    return Ragged(values_V=ids, offsets=offsets)


def _ids_owned(
    ids_V: NDArray[Any], owners_V: NDArray[np.int64], place: tuple[RowsAt, str]
) -> NDArray[np.int32]:
    """Show integers as token ids, each of a sample of its own number."""
    ends_N = np.cumsum(np.bincount(owners_V))
    return ids_of_rows(ids_V, ends_N, place[0], [place[1]])


def _said_at(place: tuple[RowsAt, str], sample: int) -> str:
    where, column = place
    return f"{row_at(where, sample)}: column {column!r}"


def _shards(files: Sequence[ShardFile]) -> tuple[ShardFile, ...]:
    """Put the shards that an index lists in its place; compressed ones where both are there."""
    found: list[ShardFile] = []
    for file in files:
        if file.path.rpartition("/")[2] != _INDEX:
            raise ConfigError(f"{file.path}: is no {_INDEX}; name the folder that holds one")
        found += [
            replace(_present(file, each), beside=(file,))
            for each in shards_in(file, read_json(file))
        ]
    return tuple(found)


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

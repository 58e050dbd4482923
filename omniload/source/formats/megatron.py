"""Megatron's indexed datasets: token ids end to end in ``.bin``, and the places of documents in ``.idx``.

A document is a range of sequences. Sequences lie end to end, so a document is also a range of bytes.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from omniload.base.errors import ConfigError, IntegrityError
from omniload.base.ragged import Ragged, offsets_of
from omniload.mix.sources import MegatronSource
from omniload.source.files import ShardFile, beside, reading
from omniload.source.formats.content import digest_of_ranges, even_ranges
from omniload.source.formats.format import FIRST_BYTES, FIRST_RECORDS, IndexedFormat, Records
from omniload.source.formats.spec import FormatSpec
from omniload.source.index import FileUnits, IndexCache, index_of
from omniload.source.parsing.arrays.idx import HEAD_BYTES, MAGIC, IdxHead, idx_head
from omniload.source.parsing.cutting import cuts, require_sizes
from omniload.source.parsing.token_lists import RowsAt, id_records
from omniload.source.patterns import FileNames

__all__ = ["FORMAT", "MegatronFormat"]

_AT_ONCE = 1 << 20
"""Numbers of an index that are looked at together."""


class MegatronFormat(IndexedFormat):
    """Reads documents of token ids; a unit is a range of documents, numbered within their shard."""

    holds_text = False

    def __init__(
        self, files: Sequence[ShardFile], config: MegatronSource, cache: IndexCache | None = None
    ) -> None:
        self._files, self._unit_bytes = files, config.unit
        self._units = index_of(files, self._index, kind=f"megatron/{config.unit}", cache=cache)

    @override
    def read_unit(self, unit: int) -> Records:
        shard, start, stop, _ = self._units[unit]
        return self._read(shard, start, stop)

    @override
    def first_records(self) -> Records:
        unit = self._units.first_filled()
        if unit is None:
            return _records(Ragged.of([]))
        shard, start, stop, _ = self._units[unit]
        stop = min(stop, start + FIRST_RECORDS)
        file = self._files[shard]
        with reading(file, "its first documents"):
            places = _places(file, start, stop)
        # Take as many whole documents as lie within the limit of bytes.
        inside = int(np.searchsorted(places.bytes_N, places.bytes_N[0] + FIRST_BYTES, "right")) - 1
        return self._read(shard, start, start + inside) if inside else _records(Ragged.of([]))

    def _read(self, shard: int, start: int, stop: int) -> Records:
        file = self._files[shard]
        where = f"documents {start} to {stop}"
        with reading(file, where):
            places = _places(file, start, stop)
            first, last = int(places.bytes_N[0]), int(places.bytes_N[-1])
            data = file.read_range(first, last) if last > first else b""
        offsets = (places.bytes_N - first) // places.dtype.itemsize
        at = RowsAt(where=file.path, first=start, word="document")
        return id_records(np.frombuffer(data, places.dtype), offsets, at)

    def _index(self, file: ShardFile) -> FileUnits:
        (index,) = file.beside
        with reading(file, "its index"):
            head = idx_head(index)
            _require_sequences(file, index, head)
            found = cuts(_document_ends(file, index, head), self._unit_bytes)
            content = digest_of_ranges(index, even_ranges(index.size_bytes))
            # The digest covers both files, because other ids may belong to the same index.
            if file.size_bytes:
                content += digest_of_ranges(file, even_ranges(file.size_bytes))
        require_sizes(file, found.stops_U - found.starts_U)
        records_U = found.records_U
        return FileUnits(
            rows=np.diff(records_U), starts=records_U[:-1], stops=records_U[1:], content=content
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Places:
    """The places of documents in the ``.bin``."""

    dtype: np.dtype[Any]
    bytes_N: NDArray[np.int64]
    """First byte of each document, and the end of the last."""


def _records(column: Ragged) -> Records:
    return Records(column=column, bad_B=np.zeros(len(column), np.bool_))


def _array(index: ShardFile, at: int, count: int, dtype: str) -> NDArray[np.int64]:
    size = count * np.dtype(dtype).itemsize
    data = index.read_range(at, at + size) if count else b""
    return np.frombuffer(data, dtype).astype(np.int64)


def _parts(start: int, stop: int) -> Iterator[tuple[int, int]]:
    """Cut numbers of an index into parts: columns of a thousand million documents would take 8 GB each."""
    return ((first, min(first + _AT_ONCE, stop)) for first in range(start, stop, _AT_ONCE))


def _require_sequences(file: ShardFile, index: ShardFile, head: IdxHead) -> None:
    """Look at the length of every sequence and at where it starts.

    Raises:
        IntegrityError: One is not where the one before ends, or all of them end elsewhere than the ``.bin``.
    """
    end = 0
    for first, stop in _parts(0, head.sequences):
        lengths = _array(index, HEAD_BYTES + 4 * first, stop - first, "<i4")
        _refuse(index, lengths < 0, lengths, "sequence {} has the length {}", first)
        starts = end + offsets_of(lengths) * head.dtype.itemsize
        pointers = _array(index, head.pointers_at + 8 * first, stop - first, "<i8")
        _refuse(
            index,
            pointers != starts[:-1],
            pointers,
            "sequence {} starts at byte {}, not where the one before ends",
            first,
        )
        end = int(starts[-1])
    if end != file.size_bytes:
        raise IntegrityError(
            f"{file.path}: holds {file.size_bytes} bytes, but its index {index.path} describes {end}: one of them is "
            "cut short or of another data set, replace them"
        )


def _document_ends(file: ShardFile, index: ShardFile, head: IdxHead) -> Iterator[NDArray[np.int64]]:
    """Yield the byte after each document, some at a time, by an index whose sequences were looked at.

    Raises:
        IntegrityError: A document leads elsewhere than behind the one before.
    """
    behind = 0
    for first, stop in _parts(0, head.boundaries):
        documents = _array(index, head.documents_at + 8 * first, stop - first, "<i8")
        outside = (documents < 0) | (documents > head.sequences)
        said = f"document {{}} starts at sequence {{}} of {head.sequences}"
        _refuse(index, outside, documents, said, first)
        said = "document {} starts at sequence {}, before the one before"
        _refuse(index, np.diff(documents, prepend=behind) < 0, documents, said, first)
        if (not first and documents[0]) or (
            stop == head.boundaries and documents[-1] != head.sequences
        ):
            begin, end = (
                int(_array(index, head.documents_at + 8 * number, 1, "<i8")[0])
                for number in (0, head.boundaries - 1)
            )
            raise IntegrityError(
                f"{index.path}: documents reach from sequence {begin} to {end} of {head.sequences}; "
                "replace the index"
            )
        behind = int(documents[-1])
        ends = np.full(len(documents), file.size_bytes)
        for at, until in _parts(int(documents[0]), min(behind + 1, head.sequences)):
            pointers = _array(index, head.pointers_at + 8 * at, until - at, "<i8")
            begin, end = np.searchsorted(documents, (at, until)).tolist()
            ends[begin:end] = pointers[documents[begin:end] - at]
        # A document ends where the next one starts.
        yield ends[1:] if not first else ends


def _refuse(
    index: ShardFile, wrong: NDArray[np.bool_], values: NDArray[np.int64], what: str, before: int
) -> None:
    """Refuse an index of which some are wrong; so many numbers lie before them."""
    if wrong.any():
        at = int(wrong.argmax())
        raise IntegrityError(
            f"{index.path}: {what.format(before + at, values[at])}; replace the index"
        )


def _places(file: ShardFile, start: int, stop: int) -> _Places:
    """Look up a range of documents in the index, which was checked when the source was opened."""
    (index,) = file.beside
    head = idx_head(index)
    documents = _array(index, head.documents_at + 8 * start, stop - start + 1, "<i8")
    # Checked again, because numbers that were changed since then would lead to reads anywhere.
    first, last = int(documents[0]), int(documents[-1])
    if not 0 <= first <= last <= head.sequences or (np.diff(documents) < 0).any():
        raise IntegrityError(
            f"{index.path}: documents {start} to {stop} lie in sequences {first} to {last} of {head.sequences}; "
            "the file is not the one that was indexed, start anew"
        )
    lengths = _array(index, HEAD_BYTES + 4 * first, last - first, "<i4") * head.dtype.itemsize
    # One pointer is enough: sequences lie end to end, so the lengths give the other starts.
    (begin,) = _array(index, head.pointers_at + 8 * first, 1, "<i8") if last > first else (0,)
    ends = begin + offsets_of(lengths)
    if lengths.min(initial=0) < 0 or begin < 0 or ends[-1] > file.size_bytes:
        raise IntegrityError(
            f"{index.path}: documents {start} to {stop} lie in bytes {begin} to {ends[-1]} of {file.size_bytes}; "
            "the file is not the one that was indexed, start anew"
        )
    # Documents count the sequences of the whole file, but ends begin with the first sequence here.
    return _Places(dtype=head.dtype, bytes_N=ends[documents - first])


def _shards(files: Sequence[ShardFile], _: object) -> tuple[ShardFile, ...]:
    """Pair every ``.bin`` with its ``.idx``, whichever of the two was named."""
    found: dict[str, ShardFile] = {}
    for file in files:
        folder, _, name = file.path.rpartition("/")
        stem, dot, suffix = name.rpartition(".")
        if suffix not in {"bin", "idx"} or not dot:
            raise ConfigError(
                f"{file.path}: is neither .bin nor .idx; name the .bin files, or the prefix of both"
            )
        path = f"{folder}/{stem}.bin"
        # A glob may match both files of a pair.
        if path not in found:
            data = file if suffix == "bin" else beside(file, f"{stem}.bin")
            # Both files are checked before each read, because an index must belong to its ids.
            found[path] = replace(data, beside=(beside(file, f"{stem}.idx"),))
    return tuple(found.values())


FORMAT = FormatSpec(
    what="an index of Megatron's",
    names=FileNames(suffixes=frozenset({".bin"}), implied=".bin"),
    open=MegatronFormat,
    magic=(((0, MAGIC),),),
    shards=_shards,
)

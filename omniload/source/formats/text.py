"""Plain text: each file is a record, and files are read in groups."""

import codecs
from collections.abc import Sequence

import numpy as np
from typing_extensions import override

from omniload.base.errors import ConfigError, IntegrityError
from omniload.base.units import format_bytes
from omniload.mix.sources import TextSource
from omniload.source.files import ShardFile, reading
from omniload.source.formats.content import digest_of_read, even_ranges
from omniload.source.formats.format import (
    FIRST_BYTES,
    LATER_BYTES,
    MAX_UNIT_BYTES,
    IndexedFormat,
    Records,
    UnitTable,
)
from omniload.source.formats.spec import FormatSpec
from omniload.source.index import FileUnits, IndexCache, index_of
from omniload.source.parsing.beginnings import said_of_beginning
from omniload.source.patterns import FileNames

__all__ = ["FORMAT", "TextFormat"]

_NO_TEXT = frozenset(
    {
        *(".tmp", ".temp", ".partial", ".part", ".crc", ".lock", ".swp", ".bak", ".index"),
        *(".tar", ".tgz", ".gz", ".zst", ".bz2", ".xz", ".zip", ".7z", ".parquet", ".arrow"),
        *(".bin", ".npy", ".npz", ".pt", ".safetensors", ".so", ".pyc", ".png", ".jpg", ".pdf"),
    }
)
"""Suffixes of files that are not text; files with other suffixes may be."""

_BEGINNINGS = (
    (b"PAR1", "a Parquet file"),
    (b"\x1f\x8b", "compressed by gzip"),
    (b"\x28\xb5\x2f\xfd", "compressed by zstd"),
    (b"PK\x03\x04", "a zip archive"),
    (b"%PDF-", "a PDF"),
)
_TAR_AT = 257
_MARK = "\ufeff"
"""Byte-order mark, which shows the encoding at the beginning of a file and is not part of the text there."""


class TextFormat(IndexedFormat):
    """Reads whole files; ``files_per_unit`` files, in order, form a unit, which is also a shard of the order."""

    holds_text = True

    def __init__(
        self, files: Sequence[ShardFile], config: TextSource, cache: IndexCache | None = None
    ) -> None:
        self._files = files
        # Indexed file by file, so that the index does not depend on the size of groups. The 2 excludes indexes of an
        # earlier release, whose digest of a file with a mark assumed that the mark was read.
        found = index_of(files, _indexed, kind="text/2", cache=cache)
        starts = np.arange(0, len(files), config.files_per_unit)
        stops = np.minimum(starts + config.files_per_unit, len(files))
        self._units = UnitTable(
            rows_U=stops - starts,
            shards_U=np.arange(len(starts)),
            starts_U=starts,
            stops_U=stops,
            contents_F=found.contents_F,
            are_whole_files=True,
        )
        for unit, (start, stop) in enumerate(zip(starts.tolist(), stops.tolist(), strict=True)):
            size = sum(file.size_bytes for file in files[start:stop])
            if size > MAX_UNIT_BYTES:
                raise ConfigError(
                    f"{files[start].path}: unit {unit} of {stop - start} files holds {format_bytes(size)}, more than "
                    f"{format_bytes(MAX_UNIT_BYTES)}; lower files_per_unit, or split the files"
                )

    @override
    def read_unit(self, unit: int) -> Records:
        texts: list[str | None] = []
        reason = ""
        for file in self._files[self._units.starts_U[unit] : self._units.stops_U[unit]]:
            data = _bytes_of(file)
            text, fault = _text_of(data)
            texts.append(text)
            reason = reason or (fault and f"{file.path}: {fault}")
        return Records.of_texts(texts, reason)

    @override
    def place_of(self, shard: str, unit: int, before: int, row: int) -> tuple[str, str]:
        return self._files[int(self._units.starts_U[unit]) + row].path, ""

    @override
    def first_records(self) -> Records:
        file = next((file for file in self._files if file.size_bytes), None)
        if file is None:
            return Records.of_texts([])
        return _first_of(file, FIRST_BYTES)

    @override
    def first_records_of(self, file: int) -> Records | None:
        return _first_of(self._files[file], LATER_BYTES)


def _first_of(file: ShardFile, most_bytes: int) -> Records:
    """Return the beginning of a file as a record."""
    with reading(file, "its first bytes"), file.open() as opened:
        data = opened.read(most_bytes)
    # A character may be cut at the end.
    text, fault = _text_of(data, whole=len(data) < most_bytes)
    return Records.of_texts([text], fault and f"{file.path}: {fault}")


def _text_of(data: bytes, *, whole: bool = True) -> tuple[str | None, str]:
    """Return the text of a file, or ``None`` and its fault."""
    if fault := _fault_of(data):
        return None, fault
    try:
        # The incremental decoder accepts half a character at the end, unless the end is the end of the file.
        text = codecs.getincrementaldecoder("utf-8")().decode(data, final=whole)
    except UnicodeDecodeError as error:
        return None, f"is not UTF-8: {error}"
    return text.removeprefix(_MARK), ""


def _fault_of(data: bytes) -> str:
    """Return the evidence that a file is not text; empty if there is none."""
    # Named by its type, which says more than the byte that no text has, although most such files have one.
    kind = next((kind for start, kind in _BEGINNINGS if data.startswith(start)), None)
    if data[_TAR_AT : _TAR_AT + 5] == b"ustar":
        kind = "a tar archive"
    if kind is not None:
        return f"is {kind}, not text; unpack it, or choose the type that reads it"
    if said := said_of_beginning(data):
        return said
    at = data.find(0)
    return (
        f"holds a byte 0 at {at:,}, as no text does; leave it out of the pattern" if at >= 0 else ""
    )


def _indexed(file: ShardFile) -> FileUnits:
    """Return a file as one record, with a digest of ranges of the file."""
    ranges = even_ranges(file.size_bytes)
    with reading(file):
        read = file.read_ranges(ranges)
        content = digest_of_read(file, ranges, read)
    # Earlier releases read the mark as a letter, so their token caches and states belong to another text.
    if read[0].startswith(_MARK.encode()):
        content = f"{content}/unmarked"
    # An empty file is a record too, because the number of a record is the number of its file.
    one = np.ones(1, np.int64)
    return FileUnits(rows=one, starts=one - 1, stops=one, content=content)


def _bytes_of(file: ShardFile) -> bytes:
    with reading(file), file.open() as opened:
        data: bytes = opened.read()
    if len(data) != file.size_bytes:
        raise IntegrityError(
            f"{file.path}: gave {len(data)} bytes of {file.size_bytes}; replace the file"
        )
    return data


FORMAT = FormatSpec(
    what="a text file",
    names=FileNames(suffixes=frozenset({".txt", ".text", ".md", ".rst"}), never=_NO_TEXT),
    open=TextFormat,
)

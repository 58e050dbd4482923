"""First bytes of sound files that are not what their source reads, and the command that converts such a file."""

import re
from collections.abc import Iterator
from itertools import chain

import numpy as np
import pyarrow as pa

from omniload.base.errors import ConfigError
from omniload.base.units import format_bytes
from omniload.source.files import ShardFile

__all__ = [
    "MARK",
    "behind_mark",
    "codec_of",
    "is_marked",
    "mends_all",
    "no_zeros",
    "noting",
    "said_of_beginning",
    "said_of_shard",
    "said_of_stand_in",
    "said_of_unpacked",
]

MARK = b"\xef\xbb\xbf"
"""The byte-order mark of UTF-8, which is not a letter at the beginning of a file."""
_BLANK_LINE = pa.py_buffer(b"\n")
# By the name, like in all readers of such shards; if the name is wrong, decompression fails.
_CODEC_OF_SUFFIX = {".zst": "zstd", ".zstd": "zstd", ".gz": "gzip", ".tgz": "gzip"}

_PACKED = {
    b"\x1f\x8b": "is compressed by gzip; give the file a name that ends in .gz",
    b"\x28\xb5\x2f\xfd": "is compressed by zstd; give the file a name that ends in .zst",
    b"BZh": "is compressed by bzip2, which is not read; unpack it: bunzip2 FILE",
    b"\xfd7zXZ\x00": "is compressed by xz, which is not read; unpack it: unxz FILE",
}
_UNPACKED = {
    b"\x1f\x8b\x08": "is compressed by gzip, as no file of this type is; unpack it: gzip -dc < FILE > NEW",
    b"\x28\xb5\x2f\xfd": "is compressed by zstd, as no file of this type is; unpack it: zstd -dc < FILE > NEW",
}
"""Remedies for files of types that have a compression of their own, or none."""
_MARKS = {
    "gzip": (b"\x1f\x8b",),
    "zstd": (b"\x28\xb5\x2f\xfd", *(bytes([i]) + b"*M\x18" for i in range(80, 96))),
}
"""First bytes of files of each codec, including a zstd frame without content."""
_NOT_READ = {
    b"PK\x03\x04": "is a zip archive, which is not read; unpack it: unzip FILE",
    b"FEA1": (
        "is Feather of version 1, which is not read; write it anew in Python: "
        "pyarrow.feather.write_feather(pyarrow.feather.read_table(FILE), NEW)"
    ),
    b"PARE": "is encrypted Parquet, which is not read; write it without encryption",
}
_STAND_INS = {
    b"version https://git-lfs.github.com/spec/": (
        "is a pointer of Git LFS, and not the file that it stands for; fetch that: git lfs pull"
    ),
    b"<!doctype html": "is a page of HTML, as a server sends in the place of a file; fetch the file anew",
    b"<html": "is a page of HTML, as a server sends in the place of a file; fetch the file anew",
}
_CODINGS = {
    # Longer marks come first, because they begin with the marks of two bytes.
    b"\xff\xfe\0\0": "UTF-32",
    b"\0\0\xfe\xff": "UTF-32",
    b"\xff\xfe": "UTF-16",
    b"\xfe\xff": "UTF-16",
    # Lines of JSON after the first line, or in a file without a byte-order mark.
    b'{\0"\0': "UTF-16LE",
    b'\0{\0"': "UTF-16",
}


_OF_FILES = re.compile(
    r"; (give the file a name that |unpack it: |write it as UTF-8: |save the file as UTF-8 "
    r"|of a file that is one list, |write each on a line )"
)
"""Beginnings of remedies, here and in ``json_lines``, that concern a whole file, whichever record showed the fault."""


def mends_all(reason: str) -> bool:
    """Return whether the reason for a bad record gives a remedy for the whole file, so that no other remedy helps."""
    return bool(_OF_FILES.search(reason))


def codec_of(file: ShardFile) -> str | None:
    """Return the compression of a shard, according to its name; ``None`` for a plain shard."""
    # Not by a path of Python's, which takes longer than all else that is asked of a shard of one record.
    stem, dot, suffix = file.path.rpartition("/")[2].rpartition(".")
    return _CODEC_OF_SUFFIX.get(f"{dot}{suffix.lower()}") if stem else None


def said_of_beginning(data: bytes) -> str:
    """Return what the first bytes of a file, or of a line, show the file to be, with a remedy; empty if nothing.

    The text is a predicate of the file, with ``FILE`` for its name.
    """
    for magic, said in _PACKED.items():
        if data.startswith(magic):
            return said
    for mark, coding in _CODINGS.items():
        if data.startswith(mark):
            return f"is {coding}; write it as UTF-8: iconv -f {coding} -t UTF-8 FILE > NEW"
    return ""


def said_of_stand_in(data: bytes) -> str:
    """Return what the first bytes show to be in the place of the data; empty if nothing."""
    begins = data.lower()
    return next((said for mark, said in _STAND_INS.items() if begins.startswith(mark)), "")


def said_of_unpacked(data: bytes, codec: str) -> str:
    """Return what decompressed first bytes show to be compressed once more, with a remedy; empty if nothing."""
    within = next((name for name, marks in _MARKS.items() if data.startswith(marks)), "")
    if not within:
        return ""
    return (
        f"is compressed twice, by {codec} and within that by {within}; unpack it once, to a file whose name fits the "
        f"remaining compression: {codec} -dc < FILE > NEW"
    )


def said_of_shard(head: bytes, codec: str | None, *, unpacks: bool | None) -> str:
    """Return what the first bytes of an unreadable shard show it to be; empty if the shard may be damaged.

    Args:
        head: First bytes of the shard.
        codec: Compression of the shard, according to its name; ``None`` for a plain shard.
        unpacks: Whether the type reads compressed shards; ``None`` if its shards may begin with any bytes.
    """
    if unpacks is None:
        return said_of_stand_in(head)
    is_called_packed = unpacks and codec is not None
    if not head or (is_called_packed and head.startswith(_MARKS[codec or ""])):
        return ""
    known = (_NOT_READ, _PACKED) if unpacks else (_NOT_READ, _UNPACKED, _PACKED)
    marks = chain.from_iterable(table.items() for table in known)
    said = next((said for mark, said in marks if head.startswith(mark)), "")
    said = said or said_of_stand_in(head)
    if said or not is_called_packed:
        return said
    return f"is not compressed by {codec}, although its name says so; give it a fitting name, or replace it"


def is_marked(data: pa.Buffer | bytearray) -> bool:
    """Return whether the beginning of a file is a byte-order mark."""
    return bytes(data[: len(MARK)]) == MARK


def behind_mark(data: pa.Buffer) -> pa.Buffer:
    """Return lines from the beginning of a file without a byte-order mark; a mark alone becomes a blank line."""
    if not is_marked(data):
        return data
    return data.slice(len(MARK)) if data.size > len(MARK) else _BLANK_LINE


def noting(head: bytearray, chunks: Iterator[pa.Buffer]) -> Iterator[pa.Buffer]:
    """Yield the chunks of a file, and copy its first bytes, as many as a mark has, to ``head``."""
    for chunk in chunks:
        head += memoryview(chunk)[: len(MARK) - len(head)]
        yield chunk


def no_zeros(chunks: Iterator[pa.Buffer], file: ShardFile, first_bytes: int) -> Iterator[pa.Buffer]:
    """Raise an error for a file that begins like a device or a hole: it may have terabytes, and no line.

    Args:
        chunks: Content of the file, in order.
        file: The file.
        first_bytes: Bytes that the first records may take.

    Raises:
        ConfigError: These first bytes are all zeros.
    """
    first = next(chunks, None)
    if first is None:
        return
    if first.size >= first_bytes and not np.frombuffer(first, np.uint8, first_bytes).any():
        raise ConfigError(
            f"{file.path}: begins with {format_bytes(first_bytes)} of zero bytes, which no line of JSON holds; "
            "replace the file, or leave it out"
        )
    yield first
    yield from chunks

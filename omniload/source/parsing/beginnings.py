"""What a file begins with that is not what its source reads, though it is sound, and the command that mends it."""

import re
from collections.abc import Iterator
from itertools import chain
from pathlib import PurePosixPath

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
"""The byte-order mark of UTF-8: no letter where it begins a file."""
_BLANK_LINE = pa.py_buffer(b"\n")
# By the name, as every reader of such shards goes by it; what is none fails as it is decompressed.
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
"""Of files of a type that has a compression of its own, or none."""
_MARKS = {
    "gzip": (b"\x1f\x8b",),
    "zstd": (b"\x28\xb5\x2f\xfd", *(bytes([i]) + b"*M\x18" for i in range(80, 96))),
}
"""What begins a file of a codec; of zstd a frame without content, too."""
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
    # The longer ones first: they begin as those of two bytes do.
    b"\xff\xfe\0\0": "UTF-32",
    b"\0\0\xfe\xff": "UTF-32",
    b"\xff\xfe": "UTF-16",
    b"\xfe\xff": "UTF-16",
    # Lines of JSON behind the first one, or in a file without a mark of its byte order.
    b'{\0"\0': "UTF-16LE",
    b'\0{\0"': "UTF-16",
}


_OF_FILES = re.compile(
    r"; (give the file a name that |unpack it: |write it as UTF-8: |save the file as UTF-8 "
    r"|of a file that is one list, |write each on a line )"
)
"""How remedies begin, here and of ``json_lines``, that are of a whole file, whichever record showed what it is."""


def mends_all(reason: str) -> bool:
    """Tell whether what is said of a record says what to do with its whole file: no other remedy is of any use."""
    return bool(_OF_FILES.search(reason))


def codec_of(file: ShardFile) -> str | None:
    """Return how a shard is compressed, by its name; ``None`` where it is plain."""
    return _CODEC_OF_SUFFIX.get(PurePosixPath(file.path).suffix.lower())


def said_of_beginning(data: bytes) -> str:
    """Return what the first bytes of a file, or of a line of it, show it to be and what mends it; empty where nothing.

    As a predicate of the file, with ``FILE`` for its name.
    """
    for magic, said in _PACKED.items():
        if data.startswith(magic):
            return said
    for mark, coding in _CODINGS.items():
        if data.startswith(mark):
            return f"is {coding}; write it as UTF-8: iconv -f {coding} -t UTF-8 FILE > NEW"
    return ""


def said_of_stand_in(data: bytes) -> str:
    """Return what the first bytes of a file show to lie in the place of data; empty where nothing."""
    begins = data.lower()
    return next((said for mark, said in _STAND_INS.items() if begins.startswith(mark)), "")


def said_of_unpacked(data: bytes, codec: str) -> str:
    """Return what the first bytes of what a codec gave show to be packed once more, and what mends it; or nothing."""
    within = next((name for name, marks in _MARKS.items() if data.startswith(marks)), "")
    if not within:
        return ""
    return (
        f"is compressed twice, by {codec} and within that by {within}; unpack it once, to a file with the name of "
        f"what is left: {codec} -dc < FILE > NEW"
    )


def said_of_shard(head: bytes, codec: str | None, *, unpacks: bool | None) -> str:
    """Return what the first bytes of a shard that cannot be read show it to be; empty where it may be damaged.

    Args:
        head: Its first bytes.
        codec: How it is compressed by its name; ``None`` where it is plain.
        unpacks: Whether its type reads compressed shards; ``None`` where its shards may begin in any way.
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
    return f"is not compressed by {codec}, as its name says; give it the name of what it is, or replace it"


def is_marked(data: pa.Buffer | bytearray) -> bool:
    """Tell whether what a file begins with is a byte-order mark."""
    return bytes(data[: len(MARK)]) == MARK


def behind_mark(data: pa.Buffer) -> pa.Buffer:
    """Return lines that begin a file without a byte-order mark; one of nothing else is a blank line."""
    if not is_marked(data):
        return data
    return data.slice(len(MARK)) if data.size > len(MARK) else _BLANK_LINE


def noting(head: bytearray, chunks: Iterator[pa.Buffer]) -> Iterator[pa.Buffer]:
    """Return what a file holds as it is, and add as many of its first bytes to ``head`` as a mark has."""
    for chunk in chunks:
        head += memoryview(chunk)[: len(MARK) - len(head)]
        yield chunk


def no_zeros(chunks: Iterator[pa.Buffer], file: ShardFile, first_bytes: int) -> Iterator[pa.Buffer]:
    """Refuse what begins like a device or a file with a hole: it may be of terabytes, and have no line.

    Args:
        chunks: What it holds, in order.
        file: The file.
        first_bytes: Of its first records.

    Raises:
        ConfigError: It is zeros as far as its first records would reach.
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

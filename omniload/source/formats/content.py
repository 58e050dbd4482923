"""Digests of the contents of shards, which distinguish two shards of the same name and size.

The digest of a Parquet shard covers the whole footer, with the statistics of its row groups, and ranges of the column
that is read. The digest of a text file covers ranges of its bytes. The digest of JSON lines covers every byte, because
all bytes are searched for newlines anyway. Ranges are a sample: other data differs in them, but a change of a few bytes
between them is not noticed.
"""

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

import pyarrow as pa
import xxhash

from omniload.base.errors import IntegrityError
from omniload.source.files import ShardFile

if TYPE_CHECKING:
    import pyarrow.parquet as pq

__all__ = [
    "digest_of",
    "digest_of_ranges",
    "digest_of_read",
    "digest_of_texts",
    "digested",
    "even_ranges",
    "parquet_ranges",
]

_SAMPLE_BYTES = 8 << 10
"""Bytes of one range."""
_SAMPLES = 8
_TAIL_BYTES = 8
"""Length of the end of a Parquet file, which is the length of the footer and the magic."""


def digest_of_ranges(file: ShardFile, ranges: Sequence[tuple[int, int]]) -> str:
    """Return a digest of ranges of a shard, which also covers their positions.

    Raises:
        IntegrityError: The file is shorter than before.
        OSError: The file cannot be read.
    """
    return digest_of_read(file, ranges, file.read_ranges(ranges))


def digest_of_read(
    file: ShardFile, ranges: Sequence[tuple[int, int]], read: Sequence[bytes]
) -> str:
    """Return the same digest for bytes that were read already; see ``digest_of_ranges``."""
    digest = xxhash.xxh3_128()
    for (start, stop), data in zip(ranges, read, strict=True):
        if len(data) != stop - start:
            raise IntegrityError(
                f"{file.path}: gave {len(data)} bytes from {start} on where {stop - start} were wanted of "
                f"{file.size_bytes}; the file is cut short, replace it"
            )
        digest.update(b"%d-%d:" % (start, stop))
        digest.update(data)
    return digest.hexdigest()


def even_ranges(size_bytes: int) -> list[tuple[int, int]]:
    """Return ranges that are spread over a file and include its first and last bytes; all of a small file."""
    if size_bytes <= _SAMPLES * _SAMPLE_BYTES:
        return [(0, size_bytes)]
    last = size_bytes - _SAMPLE_BYTES
    starts = (last * i // (_SAMPLES - 1) for i in range(_SAMPLES))
    return [(start, start + _SAMPLE_BYTES) for start in starts]


def parquet_ranges(
    file: ShardFile, metadata: "pq.FileMetaData", columns: Sequence[str]
) -> list[tuple[int, int]]:
    """Return the footer, and ranges from the middle of chunks of ``columns`` in row groups spread over the shard.

    Raises:
        IntegrityError: The footer is longer than the file.
        OSError: The file cannot be read.
    """
    size = file.size_bytes
    (tail,) = file.read_ranges([(max(0, size - _TAIL_BYTES), size)])
    footer = size - _TAIL_BYTES - int.from_bytes(tail[:4], "little")
    if footer < 0:
        raise IntegrityError(
            f"{file.path}: says that its footer has {-footer} bytes more than the file's {size}; replace it"
        )
    ranges = [(footer, size)]
    groups = _spread(metadata.num_row_groups)
    for group in (metadata.row_group(i) for i in groups):
        for chunk in (group.column(i) for i in range(group.num_columns)):
            path = f"{chunk.path_in_schema}."
            # Compared with the dot, because a list is stored as ``tokens.list.element``, and ``text`` is not
            # ``text_2``.
            if not any(path.startswith(f"{column}.") for column in columns):
                continue
            start = chunk.data_page_offset
            if chunk.has_dictionary_page and chunk.dictionary_page_offset is not None:
                # A chunk begins with its dictionary, if it has one.
                start = min(start, chunk.dictionary_page_offset)
            begin = start + max(0, (chunk.total_compressed_size - _SAMPLE_BYTES) // 2)
            # Offsets in a footer may be damaged, so no range goes beyond the data.
            stop = min(begin + _SAMPLE_BYTES, start + chunk.total_compressed_size, footer)
            ranges.append((min(begin, stop), stop))
    return ranges


def _spread(count: int) -> Iterable[int]:
    """Return up to ``_SAMPLES`` numbers below ``count``, evenly spread."""
    if count <= _SAMPLES:
        return range(count)
    return ((count - 1) * i // (_SAMPLES - 1) for i in range(_SAMPLES))


def digested(digest: xxhash.xxh3_128, chunks: Iterable[pa.Buffer]) -> Iterator[pa.Buffer]:
    """Yield the chunks, and update ``digest`` with each."""
    for chunk in chunks:
        digest.update(chunk)
        yield chunk


def digest_of(files: Sequence[ShardFile]) -> str:
    """Return a digest of names and sizes, which does not depend on the folder or the time of a copy."""
    return digest_of_texts(
        " ".join(
            f"{each.size_bytes} {each.path.rpartition('/')[2]}" for each in (file, *file.beside)
        )
        for file in files
    )


def digest_of_texts(texts: Iterable[str]) -> str:
    """Return a digest of texts in their order."""
    # Names need not be UTF-8.
    lines = "\n".join(texts).encode(errors="surrogateescape")
    return hashlib.blake2b(lines, digest_size=8).hexdigest()

"""Digests of the contents of shards, which distinguish two shards of the same name and size.

The digest of a Parquet shard covers the whole footer, with the statistics of its row groups, and ranges of the column
that is read. The digest of a text file covers ranges of its bytes. The digest of JSON lines covers every byte, because
all bytes are searched for newlines anyway. Ranges are a sample: other data differs in them, but a change of a few bytes
between them is not noticed.
"""

import hashlib
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import pyarrow as pa
import xxhash

from omniload.base.concurrency.calls_under_way import under_way
from omniload.base.errors import ConfigError, IntegrityError
from omniload.base.log import get_logger
from omniload.source.files import Known, ShardFile
from omniload.source.stores.asking import rewritten

if TYPE_CHECKING:
    import pyarrow.parquet as pq

    from omniload.source.index import FileUnits

__all__ = [
    "HeldContent",
    "digest_of",
    "digest_of_ranges",
    "digest_of_read",
    "digest_of_texts",
    "digested",
    "even_ranges",
    "parquet_ranges",
]

_log = get_logger(__name__)
_SAMPLE_BYTES = 8 << 10
"""Bytes of one range."""
_SAMPLES = 8
_REST, _AT_ONCE, _RAREST, _LONGEST_S = 100.0, 4, 4, 43_200.0
"""Behind the n-th look at what a shard holds passes its time, times 100 to the n - 4, at most half a day."""
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


class HeldContent:
    """What a local shard held when its units were found: looked at anew where its time of change is another.

    Another mode, owner, name or link changes that time too, and no byte. Not by the inode: where one is made up for
    as long as a file is remembered, as by FUSE, it says nothing, and what is renamed into a place was changed then.
    """

    __slots__ = ("_content", "_due_s", "_find", "_looks", "_times")

    def __init__(
        self, content: str, find: Callable[[], Callable[[ShardFile], "FileUnits"] | None]
    ) -> None:
        self._content, self._find = content, find  # which gives none once nobody reads by the units
        self._times: list[str] | None = None  # as the file's mark says, which is not held twice
        self._due_s, self._looks = -math.inf, 0

    def __call__(self, file: ShardFile, marks: Sequence[str]) -> None:
        """Refuse other content; see ``Known``. Raises as ``ShardFile.require_unchanged``."""
        times = _times_of(marks)
        then = self._times or _times_of([each.mark for each in (*file.beside, file)])
        find = self._find()
        if find is None or times == then or (begin_s := time.monotonic()) < self._due_s:
            return
        # As it was found: what is kept of places in it stays that of this shard.
        looked_at = replace(file, known=Known())
        with under_way(f"looks at what {file.path} holds"):
            try:
                content = find(looked_at).content
            except (IntegrityError, ConfigError) as error:
                looked_at.require_unchanged()  # which says more, where its size is another by now
                if isinstance(error.__cause__, MemoryError):
                    raise  # as of a reader of somebody else's; it says nothing of the file
                content = ""
        if content != self._content:
            changes = zip((*file.beside, file), then, times, strict=True)
            each, since = [(each, now) for each, before, now in changes if before != now][-1]
            raise rewritten(each.path, each.size_bytes, since)
        _log.info("%s: its modification time differs, but its content is the same", file.path)
        end_s, self._times, self._looks = time.monotonic(), times, self._looks + 1
        # Where that time says nothing, as of file systems that make it up, looks are fewer, and never none.
        rest_s = (end_s - begin_s) * _REST ** min(self._looks - _AT_ONCE, _RAREST)
        self._due_s = end_s + min(rest_s, max(_LONGEST_S, (end_s - begin_s) * _REST))


def _times_of(marks: Sequence[str]) -> list[str]:
    """Return the times of change of marks of local files."""
    return [mark.rpartition("/")[2] for mark in marks]

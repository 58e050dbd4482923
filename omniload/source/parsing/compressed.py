"""Shards that may be compressed: what they hold, in order, and one range of it."""

import os
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from weakref import WeakKeyDictionary

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from omniload.base.errors import ConfigError, IntegrityError
from omniload.base.units import format_bytes
from omniload.source.files import ShardFile
from omniload.source.formats.format import MAX_UNIT_BYTES
from omniload.source.parsing.beginnings import said_of_unpacked

__all__ = [
    "ForwardReader",
    "chunks_of",
    "codec_of",
    "doubt_of_wholes",
    "range_of",
    "require_held_whole",
    "require_no_bomb",
    "stream_of",
]

_SCAN_BYTES = 8 << 20
_HEAD_BYTES = 16
_LARGE_BYTES = 64 << 20
"""Bytes of a unit from which on it is told that it is decoded whole: 16 times those of a plain one."""
_MOST_BEGUN = 64
"""Shards that a process keeps decompressed in part, some 3 MiB each: sources beyond that begin theirs anew."""
_MOST_TIMES = 500
"""Of what is larger than a unit may be: most bytes that a byte becomes. Text of web pages becomes 3 to 10 times as
large, and a bomb of zstd tens of thousands of times."""
# By the name, as every reader of such shards goes by it; what is none fails as it is decompressed.
_CODEC_OF_SUFFIX = {".zst": "zstd", ".zstd": "zstd", ".gz": "gzip", ".tgz": "gzip"}


def codec_of(file: ShardFile) -> str | None:
    """Return how a shard is compressed, by its name; ``None`` where it is plain."""
    return _CODEC_OF_SUFFIX.get(PurePosixPath(file.path).suffix.lower())


def stream_of(file: ShardFile) -> pa.NativeFile:
    """Open the decompressed bytes of a shard; Arrow raises on a stream that is cut short."""
    codec = codec_of(file)
    opened = file.open()
    return opened if codec is None else pa.CompressedInputStream(opened, codec)


def chunks_of(stream: pa.NativeFile, file: ShardFile) -> Iterator[pa.Buffer]:
    """Read the stream of a shard to its end; raises ``IntegrityError`` where it gives what is compressed once more."""
    chunk, codec = stream.read_buffer(_SCAN_BYTES), codec_of(file)
    if codec is not None and (said := said_of_unpacked(chunk[:_HEAD_BYTES].to_pybytes(), codec)):
        raise IntegrityError(f"{file.path}: {said}")
    while len(chunk):
        yield chunk
        chunk = stream.read_buffer(_SCAN_BYTES)


def range_of(file: ShardFile, start: int, stop: int) -> pa.Buffer:
    """Return a range of what a shard holds; of a compressed one the whole, from 0.

    Raises:
        IntegrityError: It holds less, or a compressed one more.
    """
    with stream_of(file) as stream:
        if codec_of(file) is None:
            stream.seek(start)
        data = stream.read_buffer(stop - start)
        # Read to its end: only there does a stream say that it was cut short, or that its check is wrong.
        more = codec_of(file) is not None and len(stream.read_buffer(1)) > 0
    _require_indexed(file, start, stop, data, more=more)
    return data


def _require_indexed(
    file: ShardFile, start: int, stop: int, data: pa.Buffer, *, more: bool
) -> None:
    """Refuse a range that holds less than its index says, or has ``more`` behind it."""
    if len(data) != stop - start or more:
        raise IntegrityError(
            f"{file.path}: bytes {start} to {stop} gave {'more' if more else len(data)}; "
            "the file is not the one that was indexed, start anew"
        )


def require_held_whole(file: ShardFile, size_bytes: int) -> None:
    """Refuse a compressed shard that is too large: it is decoded whole.

    Raises:
        ConfigError: With the limit.
    """
    if size_bytes > MAX_UNIT_BYTES:
        raise ConfigError(
            f"{file.path}: holds more than {format_bytes(MAX_UNIT_BYTES)} when decompressed, and a compressed "
            "shard is decoded whole; split it into smaller shards"
        )


def doubt_of_wholes(
    files: Sequence[ShardFile],
    shards_U: NDArray[np.int64],
    sizes_U: NDArray[np.int64],
    together: int,
) -> str:
    """Say whether compressed shards, each of them one unit, are large to be decoded whole; empty where none is.

    Args:
        files: The shards.
        shards_U: Number of the shard of each unit.
        sizes_U: Bytes of each, decompressed.
        together: Units that are held decoded together.
    """
    large = [
        (int(size), files[shard].path)
        for shard, size in zip(shards_U.tolist(), sizes_U.tolist(), strict=True)
        if size > _LARGE_BYTES and codec_of(files[shard]) is not None
    ]
    if not large:
        return ""
    size, path = max(large)
    held = f", and {together} of them are held decoded together" if together > 1 else ""
    return (
        f"{len(large):,} compressed shards are decoded whole before their first record is drawn, {path} to "
        f"{format_bytes(size)}{held}; write smaller shards, or plain ones, which are read in parts"
    )


def require_no_bomb(file: ShardFile, size_bytes: int) -> None:
    """Refuse a compressed shard that becomes many times what text does: it may be without an end.

    Raises:
        ConfigError: With the limit.
    """
    if size_bytes > max(MAX_UNIT_BYTES, _MOST_TIMES * file.size_bytes):
        raise ConfigError(
            f"{file.path}: {format_bytes(file.size_bytes)} become {format_bytes(size_bytes)} and more, over "
            f"{_MOST_TIMES} times as many, which no text does; replace the file, or leave it out"
        )


@dataclass(slots=True)
class _Begun:
    """A shard that is decompressed up to ``at``."""

    file: ShardFile
    stream: pa.NativeFile
    at: int = 0


class ForwardReader:
    """Ranges of the compressed shards of a source. Not thread-safe.

    A range behind the one before it takes what lies between them; any other one takes the shard from its first byte.
    """

    def range_of(self, file: ShardFile, start: int, stop: int, *, is_last: bool) -> pa.Buffer:
        """Return a range of what a shard holds; ``is_last`` says that nothing is behind it.

        Raises:
            IntegrityError: The shard holds less, or more behind the last range.
        """
        begun = self._reached(file, start)
        data = begun.stream.read_buffer(stop - start)
        begun.at += len(data)
        # Only at its end does a stream say that it was cut short, or that its check is wrong.
        more = is_last and len(begun.stream.read_buffer(1)) > 0
        _require_indexed(file, start, stop, data, more=more)
        if is_last:
            begun.stream.close()
        else:
            _BEGUN.keep(self, begun)
        return data

    def reach(self, file: ShardFile, start: int) -> None:
        """Decompress a shard up to where a range starts."""
        _BEGUN.keep(self, self._reached(file, start))

    def _reached(self, file: ShardFile, start: int) -> _Begun:
        # Taken, not looked at: what fails in the middle is begun anew.
        begun = _BEGUN.take(self)
        if begun is None or begun.file is not file or begun.at > start:
            begun = _Begun(file, stream_of(file))
        while begun.at < start:
            skipped = begun.stream.read_buffer(min(start - begun.at, _SCAN_BYTES))
            if not len(skipped):
                break  # shorter than it was: the range says so
            begun.at += len(skipped)
        return begun


class _BegunShards:
    """Shards that readers go on with, at most ``_MOST_BEGUN``; those that waited longest are closed."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._of: WeakKeyDictionary[ForwardReader, _Begun] = WeakKeyDictionary()

    def take(self, reader: ForwardReader) -> _Begun | None:
        with self._lock:
            return self._of.pop(reader, None)

    def keep(self, reader: ForwardReader, begun: _Begun) -> None:
        with self._lock:
            self._of[reader] = begun
            for longest in list(self._of)[:-_MOST_BEGUN]:
                self._of.pop(longest).stream.close()

    def let_go(self) -> None:
        """Begin with none, as a forked process must: it has the place in an open file in common with its parent."""
        self._lock = threading.Lock()  # another thread of the parent may have held it
        self._of = WeakKeyDictionary()


_BEGUN = _BegunShards()
os.register_at_fork(after_in_child=_BEGUN.let_go)

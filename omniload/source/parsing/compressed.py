"""Shards that may be compressed: their content in order, and single ranges of it."""

import os
import threading
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import numpy as np
import pyarrow as pa
import xxhash
import zstandard
from numpy.typing import NDArray

from omniload.base.errors import ConfigError, IntegrityError
from omniload.base.log import get_logger
from omniload.base.units import format_bytes
from omniload.source.access.points import AccessPoints, KeptPoints
from omniload.source.access.streams import ByteStream, FrameStream, entered
from omniload.source.files import ShardFile
from omniload.source.formats.format import MAX_UNIT_BYTES
from omniload.source.parsing.beginnings import codec_of, said_of_unpacked

__all__ = [
    "ForwardReader",
    "chunks_of",
    "doubt_of_wholes",
    "no_bomb",
    "range_of",
    "require_held_whole",
    "scan_of",
    "stream_of",
]

_SCAN_BYTES = 8 << 20
_HEAD_BYTES = 16
_NEAR_BYTES = 1 << 20
"""Bytes up to which decompressing to a range is faster than a search for a nearer entry point."""
_UNDECODABLE = (IntegrityError, EOFError, zlib.error, zstandard.ZstdError)
_log = get_logger(__name__)
_LARGE_BYTES = 64 << 20
"""Size of a unit from which ``doubt`` reports that it is decoded as a whole: 16 times the size of a plain unit."""
_MOST_BEGUN = 64
"""Most shards that a process keeps partly decompressed, about 3 MiB each; further sources begin their shards again."""
_MOST_TIMES = 500
"""Most decompressed bytes per compressed byte, for shards that are larger than a unit may be.

The text of web pages expands 3 to 10 times, and a zstd bomb tens of thousands of times.
"""


def stream_of(file: ShardFile) -> pa.NativeFile:
    """Open the decompressed bytes of a shard. Arrow raises an error for a truncated stream."""
    codec = codec_of(file)
    opened = file.open()
    return opened if codec is None else pa.CompressedInputStream(opened, codec)


def scan_of(file: ShardFile) -> pa.NativeFile | FrameStream:
    """Open the content of a shard from the first to the last byte, for a caller that needs entry points afterwards."""
    return FrameStream(file) if codec_of(file) == "zstd" else stream_of(file)


def chunks_of(stream: pa.NativeFile | FrameStream, file: ShardFile) -> Iterator[pa.Buffer]:
    """Read the stream of a shard to its end. Raises ``IntegrityError`` for content that is compressed once more."""
    chunk, codec = stream.read_buffer(_SCAN_BYTES), codec_of(file)
    if codec is not None and (said := said_of_unpacked(chunk[:_HEAD_BYTES].to_pybytes(), codec)):
        raise IntegrityError(f"{file.path}: {said}")
    while len(chunk):
        yield chunk
        chunk = stream.read_buffer(_SCAN_BYTES)


def range_of(file: ShardFile, start: int, stop: int) -> pa.Buffer:
    """Return a range of the content of a shard; for a compressed shard the whole content, from 0.

    Raises:
        IntegrityError: The shard has less content, or a compressed shard has more.
    """
    with stream_of(file) as stream:
        if codec_of(file) is None:
            stream.seek(start)
        data = stream.read_buffer(stop - start)
        # Read to the end, because only there does a stream report that it is truncated, or that its checksum is wrong.
        more = codec_of(file) is not None and len(stream.read_buffer(1)) > 0
    _require_indexed(file, start, stop, data, more=more)
    return data


def _require_indexed(
    file: ShardFile, start: int, stop: int, data: pa.Buffer, *, more: bool
) -> None:
    """Raise for a range that has fewer bytes than its index says, or has ``more`` after it."""
    if len(data) != stop - start or more:
        raise IntegrityError(
            f"{file.path}: bytes {start} to {stop} gave {'more' if more else len(data)}; the file is not the one that "
            "was indexed, start again"
        )


def require_held_whole(file: ShardFile, size_bytes: int) -> None:
    """Raise an error for a compressed shard that is too large, because it is decoded as a whole.

    Raises:
        ConfigError: Gives the limit.
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
    """Describe compressed shards that are single units and large to decode as a whole; empty if there are none.

    Args:
        files: The shards.
        shards_U: Number of the shard of each unit.
        sizes_U: Decompressed bytes of each unit.
        together: Units that are in memory together.
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


def no_bomb(chunks: Iterator[pa.Buffer], file: ShardFile) -> Iterator[pa.Buffer]:
    """Raise an error for a compressed shard that expands far more than text does, because it may be endless.

    Raises:
        ConfigError: Gives the limit.
    """
    size_bytes = 0
    for chunk in chunks:
        size_bytes += chunk.size
        if size_bytes > max(MAX_UNIT_BYTES, _MOST_TIMES * file.size_bytes):
            raise ConfigError(
                f"{file.path}: {format_bytes(file.size_bytes)} become {format_bytes(size_bytes)} and more, over "
                f"{_MOST_TIMES} times as many, which no text does; replace the file, or leave it out"
            )
        yield chunk


@dataclass(slots=True)
class _Begun:
    """A shard that is decompressed up to ``at``."""

    file: ShardFile
    stream: ByteStream
    at: int = 0
    digests_U: NDArray[np.uint64] | None = None
    """Digests that its units are compared with, if it was entered in its middle."""


class _WrongPlaceError(Exception):
    """The data after an entry point is not the data that was indexed."""


@contextmanager
def _compared(*, is_entered: bool) -> Iterator[None]:
    """Read from a shard in this context. If it was entered in its middle, no error shows damage of the shard.

    Raises:
        _WrongPlaceError: The shard was entered in its middle, and cannot be decoded, or differs from the index.
    """
    try:
        yield
    except (*_UNDECODABLE, OSError, pa.ArrowException) as error:
        # Decoders raise OSError itself without a number; errors of the system or of a store are passed on.
        is_of_system = isinstance(error, OSError) and (type(error) is not OSError or error.errno)
        if not is_entered or is_of_system:
            raise
        raise _WrongPlaceError(str(error)) from error


class ForwardReader:
    """Ranges of the compressed shards of a source. Not thread-safe.

    For a range after the previous one, only the data between them is decompressed. For any other range, decompression
    begins at the nearest entry point before it, if there is one, or at the first byte.

    Args:
        kept: Entry points of the shards. Data that is read by way of an entry point is compared with the digests from
            the index, so a wrong entry point is noticed.
    """

    def __init__(self, kept: KeptPoints | None = None) -> None:
        self._kept = kept
        self._known: tuple[ShardFile, AccessPoints | None] | None = None
        """Entry points of the last shard that was asked for."""
        self._disbelieved: dict[str, NDArray[np.uint64]] = {}
        """Digests of the units of shards that are only entered at their first byte, after a wrong entry point."""

    def range_of(
        self, file: ShardFile, start: int, stop: int, *, number: int, is_last: bool
    ) -> pa.Buffer:
        """Return a range of the content of a shard.

        Args:
            file: The shard.
            start: First byte of the range.
            stop: Byte after its last.
            number: Number of the unit that the range is, among the units of the shard.
            is_last: Whether nothing comes after the range.

        Raises:
            IntegrityError: The shard has less, has more after the last range, or has other bytes than were indexed.
        """
        try:
            data = self._range_of(file, start, stop, number=number, is_last=is_last)
        except _WrongPlaceError as error:
            self._disbelieve(file, error)
            data = self._range_of(file, start, stop, number=number, is_last=is_last)
        digests_U = self._disbelieved.get(file.path)
        if digests_U is not None and not _is_unit(digests_U, number, data):
            raise IntegrityError(
                f"{file.path}: bytes {start} to {stop} differ from those that were indexed; the file was changed in "
                "place, or it or the index is damaged: replace the file, or remove the index, and start again"
            )
        return data

    def _range_of(
        self, file: ShardFile, start: int, stop: int, *, number: int, is_last: bool
    ) -> pa.Buffer:
        begun = self._reached(file, start)
        with _compared(is_entered=begun.digests_U is not None):
            data = begun.stream.read_buffer(stop - start)
            begun.at += len(data)
            # Only at its end does a stream report that it is truncated, or that its checksum is wrong.
            more = is_last and len(begun.stream.read_buffer(1)) > 0
            _require_indexed(file, start, stop, data, more=more)
            if begun.digests_U is not None and not _is_unit(begun.digests_U, number, data):
                raise IntegrityError(f"bytes {start} to {stop} are others than were indexed")
        if is_last:
            begun.stream.close()
        else:
            _BEGUN.keep(self, begun)
        return data

    def reach(self, file: ShardFile, start: int) -> None:
        """Decompress a shard up to the start of a range."""
        try:
            begun = self._reached(file, start)
        except _WrongPlaceError as error:
            self._disbelieve(file, error)
            begun = self._reached(file, start)
        _BEGUN.keep(self, begun)

    def _reached(self, file: ShardFile, start: int) -> _Begun:
        # Taken out, so that after an error in the middle the shard is begun again.
        begun = _BEGUN.take(self)
        if begun is not None and (begun.file is not file or begun.at > start):
            begun = None
        at = 0 if begun is None else begun.at
        if start - at > _NEAR_BYTES:
            begun = self._entered(file, start, at) or begun
        if begun is None:
            begun = _Begun(file, stream_of(file))
        with _compared(is_entered=begun.digests_U is not None):
            while begun.at < start:
                skipped = begun.stream.read_buffer(min(start - begun.at, _SCAN_BYTES))
                if not len(skipped):
                    break  # shorter than before, which the read of the range reports
                begun.at += len(skipped)
        return begun

    def _entered(self, file: ShardFile, start: int, at: int) -> _Begun | None:
        """Enter a shard at the last entry point before a range; ``None`` if that is not nearer than ``at``."""
        if self._kept is None or file.path in self._disbelieved:
            return None
        if self._known is None or self._known[0] is not file:
            self._known = file, self._kept.of(file)
        points = self._known[1]
        if points is None:
            return None
        with _compared(is_entered=True):
            point = points.before(start)
            if point is None or point.place <= at:
                return None
            return _Begun(file, entered(file, point), point.place, points.digests_U)

    def _disbelieve(self, file: ShardFile, error: _WrongPlaceError) -> None:
        """Enter a shard only at its first byte from now on, and continue to compare its units."""
        _log.warning(
            "%s: cannot be entered where its index says (%s); it is read from its first byte, which gives the same "
            "records but takes longer: remove the index, and it is built again",
            *(file.path, error),
        )
        if self._known is None or self._known[1] is None:
            raise AssertionError("a shard without places was entered at one")
        self._disbelieved[file.path] = self._known[1].digests_U
        self._known = None


def _is_unit(digests_U: NDArray[np.uint64], number: int, data: pa.Buffer) -> bool:
    """Return whether a range has the content that a unit of this number had when the shard was indexed."""
    # As lists, because the shard may have had fewer units.
    return bool(digests_U[number : number + 1].tolist() == [xxhash.xxh3_64_intdigest(data)])


class _BegunShards:
    """Shards that readers will continue, at most ``_MOST_BEGUN``; the shards that waited longest are closed."""

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
        """Drop all shards, as a forked process must, because it shares the offset of an open file with its parent."""
        self._lock = threading.Lock()  # another thread of the parent may have held it
        self._of = WeakKeyDictionary()


_BEGUN = _BegunShards()
os.register_at_fork(after_in_child=_BEGUN.let_go)

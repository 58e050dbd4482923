"""Shards that may be compressed: what they hold, in order, and one range of it."""

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
"""What is decompressed on the way to a range sooner than a nearer place is looked for."""
_UNDECODABLE = (IntegrityError, EOFError, zlib.error, zstandard.ZstdError)
_log = get_logger(__name__)
_LARGE_BYTES = 64 << 20
"""Bytes of a unit from which on it is told that it is decoded whole: 16 times those of a plain one."""
_MOST_BEGUN = 64
"""Shards that a process keeps decompressed in part, some 3 MiB each: sources beyond that begin theirs anew."""
_MOST_TIMES = 500
"""Of what is larger than a unit may be: most bytes that a byte becomes. Text of web pages becomes 3 to 10 times as
large, and a bomb of zstd tens of thousands of times."""


def stream_of(file: ShardFile) -> pa.NativeFile:
    """Open the decompressed bytes of a shard; Arrow raises on a stream that is cut short."""
    codec = codec_of(file)
    opened = file.open()
    return opened if codec is None else pa.CompressedInputStream(opened, codec)


def scan_of(file: ShardFile) -> pa.NativeFile | FrameStream:
    """Open what a shard holds from its first byte to its last, for whoever asks for its places behind that."""
    return FrameStream(file) if codec_of(file) == "zstd" else stream_of(file)


def chunks_of(stream: pa.NativeFile | FrameStream, file: ShardFile) -> Iterator[pa.Buffer]:
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


def no_bomb(chunks: Iterator[pa.Buffer], file: ShardFile) -> Iterator[pa.Buffer]:
    """Refuse a compressed shard that becomes many times what text does: it may be without an end.

    Raises:
        ConfigError: With the limit.
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
    """What its units are compared with, where it was entered in its middle."""


class _WrongPlaceError(Exception):
    """What came by way of a place is not what was found of the shard."""


@contextmanager
def _compared(*, is_entered: bool) -> Iterator[None]:
    """Read inside from a shard; where it was entered in its middle, nothing that goes wrong says anything of it.

    Raises:
        _WrongPlaceError: It was entered so, and does not decode, or is not what was indexed.
    """
    try:
        yield
    except (*_UNDECODABLE, OSError, pa.ArrowException) as error:
        # Decoders raise OSError itself, without a number; the system's and a store's say what they say.
        is_of_system = isinstance(error, OSError) and (type(error) is not OSError or error.errno)
        if not is_entered or is_of_system:
            raise
        raise _WrongPlaceError(str(error)) from error


class ForwardReader:
    """Ranges of the compressed shards of a source. Not thread-safe.

    A range behind the one before it takes what lies between them. Any other one takes the shard from the nearest place
    before it where that can be entered, or from its first byte.

    Args:
        kept: Places of the shards. What is read by way of one is compared with what was found when they were indexed,
            so that none is believed.
    """

    def __init__(self, kept: KeptPoints | None = None) -> None:
        self._kept = kept
        self._known: tuple[ShardFile, AccessPoints | None] | None = None
        """Places of the shard that was asked for last."""
        self._disbelieved: dict[str, NDArray[np.uint64]] = {}
        """Shards that are entered at their first byte alone, as a place was wrong, and digests of their units."""

    def range_of(
        self, file: ShardFile, start: int, stop: int, *, number: int, is_last: bool
    ) -> pa.Buffer:
        """Return a range of what a shard holds.

        Args:
            file: The shard.
            start: Its first byte.
            stop: The byte behind its last.
            number: Of the unit that the range is, among those of the shard.
            is_last: Whether nothing is behind it.

        Raises:
            IntegrityError: The shard holds less, more behind the last range, or other bytes than were indexed.
        """
        try:
            data = self._range_of(file, start, stop, number=number, is_last=is_last)
        except _WrongPlaceError as error:
            self._disbelieve(file, error)
            data = self._range_of(file, start, stop, number=number, is_last=is_last)
        digests_U = self._disbelieved.get(file.path)
        if digests_U is not None and not _is_unit(digests_U, number, data):
            raise IntegrityError(
                f"{file.path}: bytes {start} to {stop} are others than when it was indexed; it was changed in place, "
                "or it or the index is damaged: replace the file, or remove the index, and start anew"
            )
        return data

    def _range_of(
        self, file: ShardFile, start: int, stop: int, *, number: int, is_last: bool
    ) -> pa.Buffer:
        begun = self._reached(file, start)
        with _compared(is_entered=begun.digests_U is not None):
            data = begun.stream.read_buffer(stop - start)
            begun.at += len(data)
            # Only at its end does a stream say that it was cut short, or that its check is wrong.
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
        """Decompress a shard up to where a range starts."""
        try:
            begun = self._reached(file, start)
        except _WrongPlaceError as error:
            self._disbelieve(file, error)
            begun = self._reached(file, start)
        _BEGUN.keep(self, begun)

    def _reached(self, file: ShardFile, start: int) -> _Begun:
        # Taken, not looked at: what fails in the middle is begun anew.
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
                    break  # shorter than it was: the range says so
                begun.at += len(skipped)
        return begun

    def _entered(self, file: ShardFile, start: int, at: int) -> _Begun | None:
        """Enter a shard at the last place before a range; ``None`` where that is no nearer than ``at``."""
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
        """Enter a shard at its first byte from now on, and go on comparing its units."""
        _log.warning(
            "%s: cannot be entered where its index says (%s); it is read from its first byte, which is as exact and "
            "takes longer: remove the index, and it is made anew",
            *(file.path, error),
        )
        if self._known is None or self._known[1] is None:
            raise AssertionError("a shard without places was entered at one")
        self._disbelieved[file.path] = self._known[1].digests_U
        self._known = None


def _is_unit(digests_U: NDArray[np.uint64], number: int, data: pa.Buffer) -> bool:
    """Whether a range holds what the unit of a number did when the shard was indexed."""
    # As lists: a shard may have had fewer units.
    return bool(digests_U[number : number + 1].tolist() == [xxhash.xxh3_64_intdigest(data)])


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

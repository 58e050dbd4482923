"""Compressed shards as streams, which find entry points while a shard is divided into units, and enter at them.

For zstd, entry points are starts of frames. The heads of its blocks give the compressed size of a frame, and
decompression gives its content size. For gzip, entry points are starts of members, and places within them with the 32
KiB of content before each.

Source:
    RFC 8878, section 3.1, for frames and blocks of zstd.
"""

import math
from io import BytesIO
from types import TracebackType
from typing import Protocol, Self

import pyarrow as pa

from omniload.base.compression.gzip_places import BrokenGzipError, indexed_gzip, places_of
from omniload.base.compression.streams import Inflater
from omniload.base.errors import ConfigError
from omniload.base.log import get_logger
from omniload.source.access.points import Point
from omniload.source.files import ShardFile
from omniload.source.parsing.beginnings import codec_of

__all__ = ["ByteStream", "FrameStream", "entered", "points_of"]

_GZIP_BYTES = 8 << 20
"""Decompressed bytes between two gzip entry points: the most that an entry costs before the wanted data."""
_MOST_PLACES = 512
"""Most entry points of a gzip shard, with 32 KiB each before compression; in a large shard they are further apart."""
_GROUP_BYTES = 128 << 10
"""Bytes of the file between two zstd entry points: of several smaller frames, only the first is an entry point."""
_MOST_FRAMES = 1 << 16
"""Most entry points of a zstd shard."""

_READ_BYTES = 1 << 20
_FRAME, _SKIPPED, _SKIPPED_MASK = 0xFD2FB528, 0x184D2A50, 0xFFFFFFF0
_HEAD_BYTES, _BLOCK_BYTES, _CHECK_BYTES = 8, 3, 4
"""Bytes of a frame's head (a skippable one's, more than is read of others), of a block's head, and of a checksum."""
_SAME_BYTES, _NO_BLOCK = 1, 3
"""Types of blocks: one byte many times, and a reserved type."""
_log = get_logger(__name__)
_told: set[str] = set()


class ByteStream(Protocol):
    """The content of a shard from some byte on."""

    def read_buffer(self, size: int) -> pa.Buffer:
        """Return the next ``size`` bytes, or fewer at the end of the shard."""
        ...

    def close(self) -> None:
        """Close the file."""
        ...


def entered(file: ShardFile, point: Point) -> ByteStream:
    """Open the content of a shard from an entry point on; the caller must compare it with the kept digests."""
    raw = file.open()
    raw.seek(point.raw - (1 if point.bits else 0))
    is_zstd = codec_of(file) == "zstd"
    opened: ByteStream = (
        pa.CompressedInputStream(raw, "zstd") if is_zstd else _InflatedStream(raw, point)
    )
    return opened


class _InflatedStream:
    """The content of a gzip shard from an entry point on."""

    def __init__(self, raw: pa.NativeFile, point: Point) -> None:
        self._raw = raw
        self._inflater = Inflater(raw.read, bits=point.bits, window=point.window)

    def read_buffer(self, size: int) -> pa.Buffer:
        return pa.py_buffer(self._inflater.read(size))

    def close(self) -> None:
        self._raw.close()


class FrameStream:
    """The content of a zstd shard in order; raises the same errors as ``pyarrow.CompressedInputStream``.

    An Arrow stream decompresses some whole frames, and the next stream the following frames, so that the content before
    each is known. Bytes that are no frame are passed on unchanged, so that Arrow judges them.
    """

    def __init__(self, file: ShardFile) -> None:
        self._frames = _Frames(file.open())
        self._stream: pa.NativeFile | None = None
        self._at = 0
        self.points: list[Point] = []
        """Entry points that were found so far."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the file."""
        if self._stream is not None:
            self._stream.close()
        self._frames.file.close()

    def read_buffer(self, size: int) -> pa.Buffer:
        """Return the next ``size`` bytes, or fewer at the end of the shard."""
        parts: list[pa.Buffer] = []
        while size:
            if self._stream is None:
                # At least one stream is made, so that Arrow's judgement of an empty file is used.
                if self._at and self._frames.ended():
                    break
                self._stream = self._entered()
            part = self._stream.read_buffer(size)
            if not len(part):
                self._stream = None
                if self._frames.ended():
                    break
            parts.append(part)
            size -= len(part)
            self._at += len(part)
        filled = [part for part in parts if len(part)]
        return filled[0] if len(filled) == 1 else pa.py_buffer(b"".join(filled))

    def _entered(self) -> pa.NativeFile:
        """Return a stream of the frames after those that were read."""
        if self._at:
            self.points.append(Point(self._frames.at, self._at))
        if len(self.points) > _MOST_FRAMES:
            del self.points[::2]
            self._frames.group_bytes *= 2
        self._frames.begin()
        return pa.CompressedInputStream(pa.PythonFile(self._frames, mode="r"), "zstd")


class _Frames:
    """The bytes of a zstd file, some whole frames at a time: a file that ends after a frame, and then begins again."""

    closed = False

    def __init__(self, file: pa.NativeFile) -> None:
        self.file, self.group_bytes = file, _GROUP_BYTES
        self.at = 0
        """Bytes of the file that were passed on."""
        self._held, self._held_at = b"", 0
        """Bytes that were read from the file, and their start."""
        self._next = 0
        """Place of the next head, of a frame or of a block within one."""
        self._is_checked: bool | None = None
        """Whether the present frame ends with a checksum; ``None`` between two frames."""
        self._began = 0
        self._stop: int | None = None
        """End of the present frames, once it is known."""
        self._is_blind = False
        """Whether something that is no frame was found, after which there are no entry points."""

    def begin(self) -> None:
        """Begin the next frames."""
        self._began, self._stop = self.at, None

    def ended(self) -> bool:
        """Return whether the file has no more bytes."""
        return self.at == self._held_at + len(self._held) and not self._read_on()

    def readable(self) -> bool:
        """Return true, as a file that can be read."""
        return True

    def close(self) -> None:
        """Do nothing, because the file stays open for the next frames."""

    def read(self, size: int) -> bytes:
        """Return the next bytes, at most ``size``; none after the last of the present frames."""
        if self.at == self._stop or self.ended():
            return b""
        self._walk()
        stop = self._held_at + len(self._held)
        if self._stop is not None:
            stop = min(stop, self._stop)
        elif not self._is_blind:
            # A head that is only partly in memory is read completely before it is passed on.
            stop = min(stop, self._next)
        data = self._held[self.at - self._held_at : min(stop, self.at + size) - self._held_at]
        self.at += len(data)
        return data

    def _read_on(self) -> bool:
        """Read more of the file; return whether there was more."""
        more = self.file.read(_READ_BYTES)
        self._held, self._held_at = self._held[self.at - self._held_at :] + more, self.at
        return bool(more)

    def _walk(self) -> None:
        """Read the heads of frames and blocks in memory."""
        while self._stop is None and not self._is_blind:
            at = self._next - self._held_at
            if at >= len(self._held):
                return
            if self._step(self._held[at : at + _HEAD_BYTES]):
                continue
            # The head is incomplete. The bytes before it are passed on first.
            if self.at < self._next:
                return
            self._is_blind = not self._read_on()

    def _step(self, head: bytes) -> bool:
        """Advance from one head to the next; return whether the head was complete."""
        if self._is_checked is None:
            return self._step_frame(head)
        if len(head) < _BLOCK_BYTES:
            return False
        said = int.from_bytes(head[:_BLOCK_BYTES], "little")
        is_last, kind, size = said & 1, said >> 1 & 3, said >> 3
        self._is_blind = kind == _NO_BLOCK
        self._next += _BLOCK_BYTES + (1 if kind == _SAME_BYTES else size)
        if is_last:
            self._next += _CHECK_BYTES * self._is_checked
            self._is_checked = None
            if self._next - self._began >= self.group_bytes:
                self._stop = self._next
        return True

    def _step_frame(self, head: bytes) -> bool:
        if len(head) < _HEAD_BYTES:
            return False
        magic = int.from_bytes(head[:4], "little")
        if magic & _SKIPPED_MASK == _SKIPPED:
            self._next += _HEAD_BYTES + int.from_bytes(head[4:], "little")
            return True
        # The content size and the window size of a frame are not needed.
        said = head[4]
        is_single, holds, dictionary = said >> 5 & 1, said >> 6, said & 3
        self._is_blind = magic != _FRAME or bool(said >> 3 & 1)
        self._next += 5 + (not is_single) + (0, 1, 2, 4)[dictionary] + (is_single, 2, 4, 8)[holds]
        self._is_checked = bool(said >> 2 & 1)
        return True


def points_of(
    file: ShardFile, scanned: "pa.NativeFile | FrameStream", size_bytes: int
) -> list[Point] | None:
    """Return the entry points of a fully scanned shard; ``None`` if the package that finds them is missing.

    Args:
        file: The shard.
        scanned: Result of ``compressed.scan_of``.
        size_bytes: Decompressed size of the shard.
    """
    if isinstance(scanned, FrameStream):
        return scanned.points
    return _gzip_points(file, size_bytes) if codec_of(file) == "gzip" else []


def _gzip_points(file: ShardFile, size_bytes: int) -> list[Point] | None:
    """Return the entry points of a gzip shard: none if it is small, ``None`` if the needed package is missing.

    The shard is read once more. Data that is no complete gzip stream has no entry points; reading it reports the fault.

    Args:
        file: The shard.
        size_bytes: Decompressed size of the shard.
    """
    spacing = max(_GZIP_BYTES, math.ceil(size_bytes / _MOST_PLACES))
    if size_bytes <= spacing:
        return []
    exported = BytesIO()
    try:
        with (
            file.open() as raw,
            indexed_gzip(
                raw, spacing_bytes=spacing, what="random access to gzip", extra="gzip"
            ) as opened,
        ):
            opened.build_full_index()
            opened.export_index(fileobj=exported)
    except ConfigError as error:
        if str(error) not in _told:
            _told.add(str(error))
            _log.info("%s: any place of it is reached from its first byte: %s", file.path, error)
        return None
    except BrokenGzipError as error:
        _log.info("%s: is read from its first byte: %s", file.path, error)
        return []
    points: list[Point] = []
    # Starts of small members are entry points, however close they are.
    wanted = spacing
    for place in places_of(exported.getvalue(), file.size_bytes):
        if wanted <= place.offset < size_bytes:
            points.append(Point(place.raw_offset, place.offset, place.bits, place.window))
            wanted = place.offset + spacing
    return points

"""Shards that may be compressed: what they hold, in order, and one range of it."""

from collections.abc import Iterator
from pathlib import PurePosixPath

import pyarrow as pa

from omniload.base.errors import ConfigError, IntegrityError
from omniload.base.units import format_bytes
from omniload.source.files import ShardFile
from omniload.source.formats.format import MAX_UNIT_BYTES

__all__ = ["chunks_of", "codec_of", "range_of", "require_held_whole", "stream_of"]

_SCAN_BYTES = 8 << 20
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


def chunks_of(stream: pa.NativeFile) -> Iterator[pa.Buffer]:
    """Read a stream to its end."""
    while len(chunk := stream.read_buffer(_SCAN_BYTES)):
        yield chunk


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
    if len(data) != stop - start or more:
        raise IntegrityError(
            f"{file.path}: bytes {start} to {stop} gave {'more' if more else len(data)}; "
            "the file is not the one that was indexed, start anew"
        )
    return data


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

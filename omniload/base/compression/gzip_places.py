"""Places in a gzip at which a decoder can start.

Source:
    Mark Adler's zran.c; ``indexed_gzip`` finds the places.
"""

import struct
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO, TYPE_CHECKING, NamedTuple

from omniload.base.compression.streams import WINDOW_BYTES
from omniload.base.errors import IntegrityError
from omniload.base.extras import missing_extra

if TYPE_CHECKING:
    from indexed_gzip import IndexedGzipFile

__all__ = ["BrokenGzipError", "GzipPlace", "indexed_gzip", "places_of"]

_HEAD = struct.Struct("<5sBBQQIII")
_POINT = struct.Struct("<QQBB")
_COPY_BYTES = 1 << 20


class BrokenGzipError(IntegrityError):
    """The data is not a complete gzip."""


class GzipPlace(NamedTuple):
    """A place where decoding can start."""

    raw_offset: int
    """Offset in the file; if ``bits`` is not 0, these bits are in the byte before."""
    offset: int
    """Offset in the decompressed content."""
    bits: int
    """Number of high bits of the byte before that belong to what follows."""
    window: bytes
    """Decompressed bytes before the place, at most ``WINDOW_BYTES``; empty at the start of a member."""


@contextmanager
def indexed_gzip(
    file: IO[bytes], *, spacing_bytes: int, what: str, extra: str | None = None
) -> Iterator["IndexedGzipFile"]:
    """Read a gzip through the library that notes where decoding can start.

    Args:
        file: The gzip; it is not closed.
        spacing_bytes: Least distance of two places, in decompressed bytes; starts of members may be nearer.
        what: Name of what needs the library, for the message if it is missing.
        extra: The extra that installs the library, if it is not the first one that does.

    Raises:
        BrokenGzipError: The data read inside is not a complete gzip.
        ConfigError: The library is not installed.
    """
    try:
        from indexed_gzip import IndexedGzipFile, NotCoveredError, ZranError  # noqa: PLC0415 -- an extra
        from indexed_gzip.indexed_gzip import CrcError  # noqa: PLC0415 -- an extra
    except ModuleNotFoundError as error:
        raise missing_extra(what, error, extra=extra) from error
    try:
        with IndexedGzipFile(
            fileobj=file, spacing=spacing_bytes, window_size=WINDOW_BYTES, readbuf_size=_COPY_BYTES
        ) as opened:
            yield opened
    except (ZranError, CrcError, NotCoveredError) as error:
        raise BrokenGzipError(str(error)) from error
    except OSError as error:
        # The library raises plain OSError without a number. Errors of the system and of a store pass unchanged.
        if error.errno is not None or type(error) is not OSError:
            raise
        raise BrokenGzipError(str(error)) from error


def places_of(exported: bytes, raw_bytes: int) -> Iterator[GzipPlace]:
    """Read the export of the library: a head, points with their bits, and a window for each point that needs one.

    Args:
        exported: Output of ``export_index`` after ``build_full_index`` has read the gzip to its end.
        raw_bytes: Size of the file.
    """
    magic, version, _, _, stream_bytes, _, window_bytes, count = _HEAD.unpack_from(exported)
    if magic != b"GZIDX" or version > 1:
        raise AssertionError(f"indexed_gzip exports {magic!r} version {version}; 1 is read")
    at = _HEAD.size + count * _POINT.size
    for number in range(count):
        found = _POINT.unpack_from(exported, _HEAD.size + number * _POINT.size)
        raw_offset, offset, bits, has_window = found
        window = exported[at : at + window_bytes] if has_window else b""
        at += len(window)
        if offset >= stream_bytes:  # the end itself, after which nothing is left to decode
            yield GzipPlace(raw_bytes, stream_bytes, 0, b"")
            return
        yield GzipPlace(raw_offset, offset, bits, window)

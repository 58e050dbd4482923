"""Places of a gzip at which a decoder can start anew.

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
    """What was read is no whole gzip."""


class GzipPlace(NamedTuple):
    """A place where decoding can start."""

    raw_offset: int
    """Byte of the file; where ``bits`` are more than none, the first of them lie in the byte before."""
    offset: int
    """Byte of what the file holds, decompressed."""
    bits: int
    """High bits of the byte before that belong to what follows."""
    window: bytes
    """What lies before, ``WINDOW_BYTES`` at most; empty at the start of a member."""


@contextmanager
def indexed_gzip(
    file: IO[bytes], *, spacing_bytes: int, what: str, extra: str | None = None
) -> Iterator["IndexedGzipFile"]:
    """Read a gzip through the library that notes where it can be entered.

    Args:
        file: The gzip; it is left open.
        spacing_bytes: Least distance of two places, decompressed, but for starts of members, which may be nearer.
        what: What needs the library, for the message where it is missing.
        extra: The extra that brings it, where that is not the first that does.

    Raises:
        BrokenGzipError: What was read inside is no whole gzip.
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
        # The library raises OSError itself, without a number; the system's and a store's say what they say.
        if error.errno is not None or type(error) is not OSError:
            raise
        raise BrokenGzipError(str(error)) from error


def places_of(exported: bytes, raw_bytes: int) -> Iterator[GzipPlace]:
    """Read the library's export, all that has bits and windows: a head, points, and a window for each that needs one.

    Args:
        exported: What ``export_index`` wrote once ``build_full_index`` had read the gzip to its end.
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
        if offset >= stream_bytes:  # the end itself, where nothing is left to decode
            yield GzipPlace(raw_bytes, stream_bytes, 0, b"")
            return
        yield GzipPlace(raw_offset, offset, bits, window)

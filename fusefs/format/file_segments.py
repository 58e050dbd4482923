"""Pieces of a file: ranges of striped segments, a plain file, or bytes in memory."""

import bisect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fusefs.format.layout import MAX_UNIT_BYTES, StripeLayout
from fusefs.format.manifest import Manifest, Segment

__all__ = ["FileSegment", "FileUnits", "UnitPart", "file_segments_of"]


@dataclass(frozen=True, slots=True, kw_only=True)
class FileSegment:
    """A range of a file: one segment, or a whole plain file."""

    start: int
    """Offset of the first byte within the file."""
    size_bytes: int
    """Bytes of the file in this piece."""
    layout: StripeLayout
    key: str
    """Name of the bytes for the cache: other bytes have another key."""
    path_of: Callable[[int], str]
    """Path of an object by its number."""
    checksums_U: NDArray[np.uint64] | None = None
    """One checksum per unit from ``before_bytes`` on; None for a plain file."""
    before_bytes: int = 0
    """Bytes of the objects before the range that the file shows."""
    after_bytes: int = 0
    """Bytes of the objects after the range."""
    data: bytes | None = None
    """The bytes themselves, for a file that is stored in its manifest."""

    @classmethod
    def of_segment(cls, segment: Segment, start: int) -> "FileSegment":
        """Return the piece of a file for a segment."""
        return cls(
            start=start,
            size_bytes=segment.size_bytes,
            layout=segment.layout,
            key=segment.segment_id,
            path_of=segment.object_path,
            checksums_U=segment.checksums_U,
            before_bytes=segment.before_bytes,
            after_bytes=segment.after_bytes,
        )

    @property
    def stored_bytes(self) -> int:
        """Bytes of all its objects together, which decide the places of units."""
        return self.before_bytes + self.size_bytes + self.after_bytes

    @classmethod
    def of_bytes(cls, data: bytes, start: int) -> "FileSegment":
        """Return the piece of a file whose bytes are in memory."""
        # Use the largest possible unit: bytes in memory are rarely more than one.
        layout = StripeLayout(MAX_UNIT_BYTES, 1)
        return cls(start=start, size_bytes=len(data), layout=layout, key="", path_of=str, data=data)

    @property
    def units(self) -> range:
        """Numbers of the units of which the file shows at least one byte."""
        first = self.before_bytes // self.layout.unit_bytes
        return range(first, self.layout.num_units(self.before_bytes + self.size_bytes))

    def cached_unit(self, unit: int) -> bytes | None:
        """Return the bytes of a unit that needs no fetching, or None."""
        if self.data is None:
            return None
        unit_bytes = self.layout.unit_bytes
        return self.data[unit * unit_bytes : (unit + 1) * unit_bytes]


UnitPart = tuple[FileSegment, int, int, int]
"""Piece, unit, first wanted byte within the unit, and number of wanted bytes."""


class FileUnits:
    """The units of one version of a file, found by their bytes: arithmetic.

    Args:
        pieces: The whole file, in order.
    """

    def __init__(self, pieces: Sequence[FileSegment]) -> None:
        # An empty file is one piece without bytes.
        self._pieces = [piece for piece in pieces if piece.size_bytes]
        self._starts = [piece.start for piece in self._pieces]
        self.size_bytes = sum(piece.size_bytes for piece in self._pieces)
        """Bytes of the file."""

    def of(self, offset: int, size_bytes: int) -> Iterator[UnitPart]:
        """Yield the part of each unit in a range that is cut at the end of the file, in order."""
        end = min(offset + size_bytes, self.size_bytes)
        # Search instead of walking, because a file with random writes has up to a thousand pieces.
        at = max(0, bisect.bisect_right(self._starts, offset) - 1)
        while offset < end:
            piece = self._pieces[at]
            unit_bytes = piece.layout.unit_bytes
            stop = min(end, piece.start + piece.size_bytes)
            while offset < stop:
                unit, start = divmod(offset - piece.start + piece.before_bytes, unit_bytes)
                size = min(unit_bytes - start, stop - offset)
                yield piece, unit, start, size
                offset += size
            at += 1

    def all(self) -> Iterator[UnitPart]:
        """Yield the part of each unit that the file shows, in order."""
        return self.of(0, self.size_bytes)


def file_segments_of(manifest: Manifest) -> list[FileSegment]:
    """Return the pieces of a striped file, in order; one empty piece for an empty file."""
    pieces, at = [], 0
    for segment in manifest.segments:
        pieces.append(FileSegment.of_segment(segment, at))
        at += segment.size_bytes
    if manifest.inline or not pieces:
        pieces.append(FileSegment.of_bytes(manifest.inline, at))
    return pieces

"""The places of a file's units in its local copy."""

from collections.abc import Iterable, Iterator, Mapping, Sequence

from fusefs.cache.copy_state import Span
from fusefs.cache.disk_cache import DiskCopy
from fusefs.cache.disk_format import CopyVersion
from fusefs.format.file_segments import FileSegment

__all__ = ["LocalCopy", "runs_of", "version_of"]

_VERIFIED_AT_ONCE_BYTES = 8 << 20


def version_of(pieces: Sequence[FileSegment], prefix: str = "") -> CopyVersion | None:
    """Return the version that ``pieces`` make up; None if some bytes need no copy, or there are no bytes.

    Args:
        pieces: The whole file, in order.
        prefix: Text that makes the keys of the pieces unique if they are not unique themselves.
    """
    if not pieces or any(piece.data is not None for piece in pieces):
        return None
    lines = [prefix]
    for piece in pieces:
        # Include the range, because two versions may show different parts of one segment.
        numbers = (piece.before_bytes, piece.size_bytes, piece.layout.unit_bytes)
        lines.append(f"{piece.key}\0{numbers}")
    size_bytes = sum(piece.size_bytes for piece in pieces)
    return CopyVersion("\n".join(lines), size_bytes, sum(len(piece.units) for piece in pieces))


class LocalCopy:
    """A copy that is addressed by piece and unit.

    If the file shows only a part of a unit, the copy keeps that part. This is enough for a complete
    copy, but the reader of the unit reads it from the store.

    Args:
        copy: The copy on the disk.
        version: The version that is copied.
        pieces: The whole file, in order.
    """

    def __init__(
        self,
        copy: DiskCopy,
        version: CopyVersion,
        pieces: Iterable[FileSegment],
    ) -> None:
        self.copy = copy
        self.version = version
        # Keyed by the piece's identity, because several pieces may be ranges of one segment, with one key.
        self._first_of: dict[int, int] = {}
        self._pieces = list(pieces)
        first = 0
        for piece in self._pieces:
            self._first_of[id(piece)] = first
            first += len(piece.units)

    def span(self, piece: FileSegment, unit: int) -> tuple[Span, int]:
        """Return the place of the part of a unit that the file shows, and the offset of that part in the unit."""
        unit_bytes = piece.layout.unit_bytes
        begin = max(unit * unit_bytes, piece.before_bytes)
        end = min((unit + 1) * unit_bytes, piece.before_bytes + piece.size_bytes)
        number = self._first_of[id(piece)] + unit - piece.units.start
        at = piece.start + begin - piece.before_bytes
        return Span(number, at, end - begin), begin - unit * unit_bytes

    def has_whole(self, piece: FileSegment, unit: int) -> bool:
        """Return whether all bytes of a unit are in the copy. Never waits."""
        span, _ = self.span(piece, unit)
        whole = piece.layout.unit_size(unit, piece.stored_bytes)
        # A part is enough for the copy, but the cache in memory holds whole units, because checksums cover these.
        return span.size_bytes == whole and self.copy.has(span.unit)

    def read(self, piece: FileSegment, units: Sequence[int]) -> dict[int, memoryview]:
        """Return the cached and undamaged ones of adjacent whole units."""
        spans = [self.span(piece, unit)[0] for unit in units]
        found = self.copy.read(spans)
        return {
            unit: found[span.unit]
            for unit, span in zip(units, spans, strict=True)
            if span.unit in found
        }

    def store(self, piece: FileSegment, unit: int, data: bytes | memoryview) -> bool:
        """Keep the part of a unit that the file shows; return whether it is in the copy now."""
        span, start = self.span(piece, unit)
        if self.copy.has(span.unit):
            return True
        return self.copy.store(span, memoryview(data)[start : start + span.size_bytes])

    def keep(self, piece: FileSegment, parts: Mapping[int, bytes | memoryview]) -> None:
        """Keep parts of units that were just read."""
        for unit, data in parts.items():
            self.store(piece, unit, data)

    def is_sound(self, piece: FileSegment, unit: int) -> bool:
        """Return whether the part of a unit that the file shows is in the copy and matches its checksum."""
        span, _ = self.span(piece, unit)
        if self.copy.has(span.unit) and not self.copy.is_verified(span.unit):
            self.copy.read([span])
        return self.copy.has(span.unit)

    def spans(self) -> Iterator[Span]:
        """Yield the places of all units, in the order of the file."""
        for piece in self._pieces:
            for unit in piece.units:
                yield self.span(piece, unit)[0]

    def held_bytes(self) -> int:
        """Return the bytes of the file that are in the copy."""
        return sum(span.size_bytes for span in self.spans() if self.copy.has(span.unit))

    def verify(self) -> None:
        """Compare all units that this process has neither written nor compared; drop damaged ones."""
        batch: list[Span] = []
        for span in self.spans():
            wanted = self.copy.has(span.unit) and not self.copy.is_verified(span.unit)
            size = sum(known.size_bytes for known in batch)
            # A gap ends a batch, because one read covers adjacent units.
            if batch and (not wanted or size + span.size_bytes > _VERIFIED_AT_ONCE_BYTES):
                self.copy.read(batch)
                batch = []
            if wanted:
                batch.append(span)
        if batch:
            self.copy.read(batch)


def runs_of(units: Iterable[int], unit_bytes: int, longest_bytes: int) -> Iterator[list[int]]:
    """Group rising units into runs of consecutive units, none longer than ``longest_bytes``."""
    most = max(1, longest_bytes // unit_bytes)
    run: list[int] = []
    for unit in units:
        if run and (unit != run[-1] + 1 or len(run) == most):
            yield run
            run = []
        run.append(unit)
    if run:
        yield run

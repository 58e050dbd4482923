"""Comparison of a unit that was read with its checksum, whichever tier it came from."""

from fusefs.format.file_segments import FileSegment
from fusefs.format.manifest import unit_checksum
from fusefs.format.manifest_header import MAGIC
from omniload.base.errors import IntegrityError

__all__ = ["check_unit"]


def check_unit(piece: FileSegment, unit: int, data: bytes | memoryview) -> None:
    """Compare a whole unit with its checksum.

    Raises:
        IntegrityError: It does not match, or a plain file begins like a truncated manifest.
    """
    if piece.checksums_U is None:
        # fusefs never writes such a plain file, because such content is stored inline or striped.
        if unit == 0 and data[: len(MAGIC)] == MAGIC:
            raise IntegrityError(
                f"{piece.path_of(0)!r} begins like a manifest and has {piece.size_bytes} bytes, "
                "which no manifest has: it was cut short; restore it from another copy"
            )
        return
    first = piece.before_bytes // piece.layout.unit_bytes
    found, wanted = unit_checksum(data), int(piece.checksums_U[unit - first])
    if found != wanted:
        object_number, at = piece.layout.place(unit)
        raise IntegrityError(
            f"object {piece.path_of(object_number)!r}: {len(data)} bytes at {at} have checksum "
            f"{found:016x}, the manifest says {wanted:016x}; restore the file from another copy"
        )

"""The manifest: the file at the path of a striped file, a symbolic link, or a file with attributes.

(Directories with attributes contain one, too, under a hidden name: ``fusefs.tree.directory_attributes``.)

A manifest is a header of 4096 bytes, a body, and a tail, laid out byte by byte in
``docs/design/fusefs/0010-fusefs-format.md``. Its size is ``RESIDUE`` modulo 4096, so a
listing distinguishes nearly every plain file without opening it. In the other cases the magic at both ends
decides; header and body each carry a checksum. A manifest is published last
and atomically, so a reader of a complete manifest can rely on every object it names.
"""

import binascii
import errno
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np
import xxhash
from numpy.typing import NDArray

from fusefs.format.layout import StripeLayout
from fusefs.format.manifest_header import (
    HEADER_BYTES,
    MAX_INT64,
    MAX_MANIFEST_BYTES,
    MAX_SEGMENT_RECORDS,
    RECORD_OF,
    RESIDUE,
    TAIL,
    Header,
    decode_header,
    header_text,
)
from omniload.base.errors import IntegrityError

__all__ = ["Manifest", "Segment", "decode_manifest", "encode_manifest", "unit_checksum"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """The part that a file shows of bytes striped in one go: all bytes, or a range after some were replaced.

    Its objects are named by ``segment_id`` and never change.
    """

    segment_id: str
    """32 hexadecimal digits, random."""
    layout: StripeLayout
    size_bytes: int
    """Bytes of the file in this segment."""
    checksums_U: NDArray[np.uint64]
    """xxh3-64 of every whole unit that holds one of these bytes, ``[U]``."""
    before_bytes: int = 0
    """Bytes of the objects before the range."""
    after_bytes: int = 0
    """Bytes of the objects after the range."""

    @property
    def stored_bytes(self) -> int:
        """Bytes of all its objects together."""
        return self.before_bytes + self.size_bytes + self.after_bytes

    @property
    def is_whole(self) -> bool:
        """Whether the file shows every byte of the objects."""
        return not (self.before_bytes or self.after_bytes)

    @property
    def first_unit(self) -> int:
        """Number of the unit that ``checksums_U`` begins with."""
        return self.before_bytes // self.layout.unit_bytes

    def part(self, start: int, size_bytes: int) -> "Segment":
        """Return the range of ``size_bytes`` from byte ``start`` of this segment; no data is touched.

        Raises:
            ValueError: The range is empty or leaves the segment.
        """
        if start < 0 or size_bytes < 1 or start + size_bytes > self.size_bytes:
            raise ValueError(f"range {start}+{size_bytes} is not within {self.size_bytes} bytes")
        unit = self.layout.unit_bytes
        before = self.before_bytes + start
        first, stop = before // unit, -(-(before + size_bytes) // unit)
        return replace(
            self,
            size_bytes=size_bytes,
            before_bytes=before,
            after_bytes=self.stored_bytes - before - size_bytes,
            checksums_U=self.checksums_U[first - self.first_unit : stop - self.first_unit],
        )

    def object_paths(self) -> list[str]:
        """Return the paths of all objects of the segment."""
        count = self.layout.num_objects(self.stored_bytes)
        return [self.object_path(number) for number in range(count)]

    def object_path(self, number: int) -> str:
        """Return the path of one object; the objects are spread over 256 folders, which keeps each folder short."""
        return object_path(self.segment_id, number)


def object_path(segment_id: str, number: int) -> str:
    """Return the path of object ``number`` of a segment on the store."""
    return f".omnifs/objects/{segment_id[:2]}/{segment_id}.{number}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """A logical file: its attributes, and either its segments in order, its bytes, or its target."""

    kind: Literal["file", "symlink", "directory"] = "file"
    mtime_ns: int
    mode: int = 0o644
    segments: tuple[Segment, ...] = ()
    inline: bytes = b""
    target: str | None = None
    xattrs: dict[str, bytes] = field(default_factory=dict)

    @property
    def size_bytes(self) -> int:
        """Bytes of the logical file."""
        if self.target is not None:
            return len(self.target.encode())
        return len(self.inline) + sum(segment.size_bytes for segment in self.segments)

    def object_paths(self) -> list[str]:
        """Return the paths of all objects that the manifest names, each once."""
        return [path for segment in self.distinct_segments() for path in segment.object_paths()]

    def distinct_segments(self) -> list[Segment]:
        """Return one range of every segment the manifest names."""
        return list({segment.segment_id: segment for segment in self.segments}.values())


def unit_checksum(unit: bytes | bytearray | memoryview) -> int:
    """Return the xxh3-64 of one stripe unit."""
    return xxhash.xxh3_64_intdigest(unit)


def encode_manifest(manifest: Manifest) -> bytes:
    """Return the bytes of a manifest.

    Raises:
        ValueError: Target and extended attributes together do not fit the header.
        OSError: ``EFBIG``: it would be longer than ``MAX_MANIFEST_BYTES``.
    """
    segments = manifest.segments
    # Write the older version wherever it suffices, because releases without ranges can read it.
    version: Literal[1, 2] = 1 if all(segment.is_whole for segment in segments) else 2
    # A small file with attributes has no segments, and encoding an empty array takes as long as all the rest.
    records = _records_of(segments, version) if segments else b""
    num_units = sum(len(segment.checksums_U) for segment in segments)
    body_bytes = len(records) + num_units * 8 + len(manifest.inline)
    if len(segments) > MAX_SEGMENT_RECORDS or body_bytes > MAX_MANIFEST_BYTES - 2 * HEADER_BYTES:
        raise OSError(
            errno.EFBIG,
            f"{len(segments)} segments of {num_units} units need a manifest of {body_bytes} bytes, more "
            f"than {MAX_MANIFEST_BYTES}; write larger units",
        )
    sums = [segment.checksums_U.astype("<u8").tobytes() for segment in segments]
    body = b"".join([records, *sums, manifest.inline])
    header = Header(
        omnifs=version,
        kind=manifest.kind,
        size=manifest.size_bytes,
        mtime_ns=manifest.mtime_ns,
        mode=manifest.mode,
        segments=len(segments),
        units=num_units,
        inline=len(manifest.inline),
        target=manifest.target,
        xattrs={name: value.hex() for name, value in manifest.xattrs.items()},
        body_xxh3=xxhash.xxh3_64_hexdigest(body),
    )
    text = header_text(header)
    digest = xxhash.xxh3_64_hexdigest(text).encode()
    used = HEADER_BYTES + len(body) + len(TAIL)
    # Pad to a size that only manifests have, so that a listing need not open other files.
    padding = b" " * ((RESIDUE - used) % 4096)
    return b"".join([text, b"\n", digest, b"\n", body, padding, TAIL])


def _records_of(segments: Sequence[Segment], version: Literal[1, 2]) -> bytes:
    records = np.zeros(len(segments), RECORD_OF[version])
    for record, segment in zip(records, segments, strict=True):
        record["id"] = np.void(binascii.unhexlify(segment.segment_id))
        record["size"] = segment.stored_bytes
        record["unit"] = segment.layout.unit_bytes
        # At most 256 objects, so 16 bits are enough.
        record["count"] = segment.layout.stripe_count
        if version > 1:
            record["start"], record["length"] = segment.before_bytes, segment.size_bytes
    return records.tobytes()


def decode_manifest(data: bytes | bytearray | memoryview, *, name: str) -> Manifest:
    """Read a whole manifest.

    Raises:
        IntegrityError: It is cut short, altered, or contradicts itself.
        StateError: Another version wrote it.
    """
    view = memoryview(data)
    header = decode_header(view[:HEADER_BYTES], name=name)
    body = bytes(view[HEADER_BYTES : HEADER_BYTES + header.body_bytes])
    digest = xxhash.xxh3_64_hexdigest(body)
    # Check the tail as well, because it shows that nothing was cut off or added after the body.
    whole = len(data) == header.manifest_bytes and bytes(view[-len(TAIL) :]) == TAIL
    if not whole or len(body) < header.body_bytes or digest != header.body_xxh3:
        raise IntegrityError(
            f"manifest {name!r}: body has checksum {digest}, header says {header.body_xxh3}; "
            f"{len(data)} bytes read; restore the file from another copy"
        )
    split = header.segments * RECORD_OF[header.omnifs].itemsize
    records = np.frombuffer(body, RECORD_OF[header.omnifs], count=header.segments)
    sums_U = np.frombuffer(body, "<u8", count=header.units, offset=split)
    manifest = Manifest(
        kind=header.kind,
        mtime_ns=header.mtime_ns,
        mode=header.mode,
        segments=tuple(_segments(records, sums_U, name)),
        inline=body[split + header.units * 8 :],
        target=header.target,
        xattrs={key: bytes.fromhex(value) for key, value in header.xattrs.items()},
    )
    # stat uses the header, reads use the segments, so both must describe the same file.
    if manifest.size_bytes != header.size:
        raise IntegrityError(
            f"manifest {name!r}: segments hold {manifest.size_bytes} bytes, "
            f"header says {header.size}"
        )
    return manifest


def _segments(
    records: NDArray[np.void], sums_U: NDArray[np.uint64], name: str
) -> Sequence[Segment]:
    segments, at = [], 0
    for record in records:
        try:
            layout = StripeLayout(int(record["unit"]), int(record["count"]))
        except ValueError as error:
            raise IntegrityError(f"manifest {name!r}: {error}") from error
        stored = int(record["size"])
        # The field has 64 bits, but the kernel's sizes have 63.
        if stored > MAX_INT64:
            raise IntegrityError(
                f"manifest {name!r}: a segment has {stored} bytes, more than any file"
            )
        start, length = _shown(record, stored, name)
        units = layout.num_units(start + length) - start // layout.unit_bytes
        segments.append(
            Segment(
                segment_id=record["id"].tobytes().hex(),
                layout=layout,
                size_bytes=length,
                before_bytes=start,
                after_bytes=stored - start - length,
                checksums_U=sums_U[at : at + units],
            )
        )
        at += units
    if at != len(sums_U):
        raise IntegrityError(f"manifest {name!r}: {len(sums_U)} checksums for {at} units")
    return segments


def _shown(record: np.void, stored: int, name: str) -> tuple[int, int]:
    """Return start and length of the range that a record names; version 1 has only whole segments."""
    if "start" not in (record.dtype.names or ()):
        return 0, stored
    start, length = int(record["start"]), int(record["length"])
    if length < 1 or start + length > stored:
        raise IntegrityError(
            f"manifest {name!r}: range {start}+{length} is not within a segment of {stored} bytes"
        )
    return start, length

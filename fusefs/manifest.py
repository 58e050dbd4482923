"""The manifest: what stands at the path of a striped file, a symbolic link, or a file with attributes.

(And in a directory that has attributes, under a name that is hidden: ``fusefs.directories``.)

A manifest is a header of 4096 bytes, a body, and a tail, laid out byte by byte in
``docs/design/0010-fusefs-format.md``. Its size is ``RESIDUE`` modulo 4096, so a
listing tells apart nearly every plain file without opening it; magic at both ends
decides, and both header and body carry a checksum. A manifest is published last
and atomically: whoever reads it whole can rely on every object it names.
"""

import binascii
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np
import orjson
import xxhash
from numpy.typing import NDArray
from pydantic import Field, ValidationError

from fusefs.layout import StripeLayout
from omniload.base.config import StrictModel
from omniload.base.errors import IntegrityError, StateError

__all__ = [
    "HEADER_BYTES",
    "MAGIC",
    "VERSION",
    "Header",
    "Manifest",
    "Segment",
    "check_xattrs_fit",
    "decode_header",
    "decode_manifest",
    "encode_manifest",
    "has_manifest_size",
    "unit_checksum",
]

VERSION = 2
"""Newest version this code reads and writes; what needs none of its news is written as version 1."""
MAGIC = b'{"omnifs":'
TAIL = b"\nomnifs\n"
HEADER_BYTES = 4096
RESIDUE = 1365
"""Size of every manifest modulo 4096: odd, so no padded or block-sized plain file has it."""
_SUM_BYTES = 18  # b"\n", 16 hexadecimal digits, b"\n"

_FIELDS = [("id", "V16"), ("size", "<u8"), ("unit", "<u4"), ("count", "<u2"), ("reserved", "<u2")]
_RECORD_OF = {
    1: np.dtype(_FIELDS),
    2: np.dtype([*_FIELDS, ("start", "<u8"), ("length", "<u8")]),
}
"""A record of each version; version 2 names the range of the segment that the file shows."""


class Header(StrictModel):
    """The JSON of a manifest's first 4096 bytes: all that ``stat`` needs."""

    omnifs: int
    """Version of the format."""
    kind: Literal["file", "symlink", "directory"]
    size: int = Field(ge=0)
    """Bytes of the logical file; of the target for a symbolic link."""
    mtime_ns: int
    mode: int = Field(ge=0, le=0o7777)
    """Permission bits."""
    segments: int = Field(ge=0)
    """Segment records in the body."""
    units: int = Field(ge=0)
    """Unit checksums in the body."""
    inline: int = Field(ge=0)
    """Bytes of the file held in the body itself."""
    target: str | None = None
    """Target of a symbolic link."""
    xattrs: dict[str, str] = Field(default_factory=dict)
    """Extended attributes, values in hexadecimal."""
    body_xxh3: str
    """xxh3-64 of the body, 16 hexadecimal digits."""

    @property
    def body_bytes(self) -> int:
        """Bytes of the body."""
        return self.segments * _RECORD_OF[self.omnifs].itemsize + self.units * 8 + self.inline


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """What a file shows of bytes striped in one go: all of them, or a range after some were replaced.

    Its objects are named by ``segment_id`` and never change.
    """

    segment_id: str
    """32 hexadecimal digits, random."""
    layout: StripeLayout
    size_bytes: int
    """Bytes of the file that lie here."""
    checksums_U: NDArray[np.uint64]
    """xxh3-64 of every whole unit that holds one of them, ``[U]``."""
    before_bytes: int = 0
    """Bytes of the objects ahead of the range."""
    after_bytes: int = 0
    """Bytes of the objects behind it."""

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
        """Return the range of ``size_bytes`` from byte ``start`` of this one; no data is touched.

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
        """Return the path of one object; 256 folders keep each of them short."""
        return object_path(self.segment_id, number)


def object_path(segment_id: str, number: int) -> str:
    """Return where object ``number`` of a segment lies on the store."""
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
        """Return the paths of every object the manifest names, each once."""
        return [path for segment in self.distinct_segments() for path in segment.object_paths()]

    def distinct_segments(self) -> list[Segment]:
        """Return one range of every segment the manifest names."""
        return list({segment.segment_id: segment for segment in self.segments}.values())


def unit_checksum(unit: bytes | bytearray | memoryview) -> int:
    """Return the xxh3-64 of one stripe unit."""
    return xxhash.xxh3_64_intdigest(unit)


def has_manifest_size(size_bytes: int) -> bool:
    """Tell whether a store file of ``size_bytes`` may be a manifest; if not, it is a plain file."""
    return size_bytes % 4096 == RESIDUE and size_bytes > HEADER_BYTES


def encode_manifest(manifest: Manifest) -> bytes:
    """Return the bytes of a manifest.

    Raises:
        ValueError: Target and extended attributes together do not fit the header.
    """
    version = 1 if all(segment.is_whole for segment in manifest.segments) else 2
    records = np.zeros(len(manifest.segments), _RECORD_OF[version])
    for record, segment in zip(records, manifest.segments, strict=True):
        record["id"] = np.void(binascii.unhexlify(segment.segment_id))
        record["size"] = segment.stored_bytes
        record["unit"] = segment.layout.unit_bytes
        # 256 objects at most, so 16 bits are ample.
        record["count"] = segment.layout.stripe_count
        if version > 1:
            record["start"], record["length"] = segment.before_bytes, segment.size_bytes
    sums = [segment.checksums_U.astype("<u8").tobytes() for segment in manifest.segments]
    body = b"".join([records.tobytes(), *sums, manifest.inline])
    header = Header(
        omnifs=version,
        kind=manifest.kind,
        size=manifest.size_bytes,
        mtime_ns=manifest.mtime_ns,
        mode=manifest.mode,
        segments=len(records),
        units=sum(len(segment.checksums_U) for segment in manifest.segments),
        inline=len(manifest.inline),
        target=manifest.target,
        xattrs={name: value.hex() for name, value in manifest.xattrs.items()},
        body_xxh3=xxhash.xxh3_64_hexdigest(body),
    )
    text = _header_text(header)
    digest = xxhash.xxh3_64_hexdigest(text).encode()
    used = HEADER_BYTES + len(body) + len(TAIL)
    padding = b" " * ((RESIDUE - used) % 4096)
    return b"".join([text, b"\n", digest, b"\n", body, padding, TAIL])


def check_xattrs_fit(xattrs: Mapping[str, bytes]) -> None:
    """Check that extended attributes fit the header of any file, however large it becomes.

    Raises:
        ValueError: They do not.
    """
    most = 2**63 - 1
    widest = Header(
        omnifs=VERSION,
        kind="symlink",
        size=most,
        mtime_ns=-most,
        mode=0o7777,
        segments=most,
        units=most,
        inline=most,
        xattrs={name: value.hex() for name, value in xattrs.items()},
        body_xxh3="f" * 16,
    )
    _header_text(widest)


def decode_header(head: bytes | memoryview, *, name: str) -> Header:
    """Read the first ``HEADER_BYTES`` of a manifest.

    Args:
        head: At least those bytes.
        name: Path for messages.

    Raises:
        IntegrityError: The header is cut short or does not match its checksum.
        StateError: Another version wrote it.
    """
    block = bytes(head[:HEADER_BYTES])
    text = block[: HEADER_BYTES - _SUM_BYTES]
    found = block[len(text) + 1 : len(text) + 17]
    if len(block) < HEADER_BYTES or xxhash.xxh3_64_hexdigest(text).encode() != found:
        raise IntegrityError(
            f"manifest {name!r}: header of {len(block)} bytes does not match its checksum "
            f"{found.decode('ascii', 'replace')!r}; restore the file from another copy"
        )
    value = orjson.loads(text)
    if value.get("omnifs") not in _RECORD_OF:
        raise StateError(
            f"manifest {name!r} has version {value.get('omnifs')!r}, this code reads 1 to {VERSION}; "
            "use the release that wrote it"
        )
    try:
        return Header.model_validate(value)
    except ValidationError as error:
        raise IntegrityError(f"manifest {name!r}: header breaks the format: {error}") from error


def decode_manifest(data: bytes | memoryview, *, name: str) -> Manifest:
    """Read a whole manifest.

    Raises:
        IntegrityError: It is cut short, altered, or contradicts itself.
        StateError: Another version wrote it.
    """
    header = decode_header(data[:HEADER_BYTES], name=name)
    body = bytes(data[HEADER_BYTES : HEADER_BYTES + header.body_bytes])
    digest = xxhash.xxh3_64_hexdigest(body)
    whole = has_manifest_size(len(data)) and bytes(data[-len(TAIL) :]) == TAIL
    if not whole or len(body) < header.body_bytes or digest != header.body_xxh3:
        raise IntegrityError(
            f"manifest {name!r}: body has checksum {digest}, header says {header.body_xxh3}; "
            f"{len(data)} bytes read; restore the file from another copy"
        )
    split = header.segments * _RECORD_OF[header.omnifs].itemsize
    records = np.frombuffer(body[:split], _RECORD_OF[header.omnifs])
    sums_U = np.frombuffer(body[split : split + header.units * 8], "<u8")
    manifest = Manifest(
        kind=header.kind,
        mtime_ns=header.mtime_ns,
        mode=header.mode,
        segments=tuple(_segments(records, sums_U, name)),
        inline=body[split + header.units * 8 :],
        target=header.target,
        xattrs={key: bytes.fromhex(value) for key, value in header.xattrs.items()},
    )
    if manifest.size_bytes != header.size:
        raise IntegrityError(
            f"manifest {name!r}: segments hold {manifest.size_bytes} bytes, "
            f"header says {header.size}"
        )
    return manifest


def _header_text(header: Header) -> bytes:
    text = orjson.dumps(header.model_dump())
    room = HEADER_BYTES - _SUM_BYTES
    if len(text) > room:
        raise ValueError(
            f"attributes need a header of {len(text)} bytes, more than {room}; "
            "shorten the link target or the extended attributes"
        )
    return text.ljust(room)


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
    """Return start and length of the range that a record names; version 1 knows whole segments alone."""
    if "start" not in (record.dtype.names or ()):
        return 0, stored
    start, length = int(record["start"]), int(record["length"])
    if length < 1 or start + length > stored:
        raise IntegrityError(
            f"manifest {name!r}: range {start}+{length} is not within a segment of {stored} bytes"
        )
    return start, length

"""The header of a manifest: its first 4096 bytes, JSON with a checksum, which suffice for ``stat``.

Any caller that can write to the store can make a valid checksum, so nothing in a header is
used before it is checked: types and ranges here, the body against it in ``fusefs.format.manifest``.
"""

from collections.abc import Mapping
from typing import Annotated, Literal, Self

import numpy as np
import orjson
import xxhash
from pydantic import ConfigDict, Field, StringConstraints, ValidationError, model_validator

from omniload.base.config import StrictModel
from omniload.base.errors import IntegrityError, StateError

__all__ = [
    "HEADER_BYTES",
    "MAGIC",
    "MAX_INT64",
    "MAX_MANIFEST_BYTES",
    "MAX_SEGMENT_RECORDS",
    "RECORD_OF",
    "RESIDUE",
    "TAIL",
    "VERSION",
    "Header",
    "check_xattrs_fit",
    "decode_header",
    "has_manifest_size",
    "header_text",
]

VERSION = 2
"""Newest version that this code reads and writes; a manifest without its new features is written as version 1."""
MAGIC = b'{"omnifs":'
TAIL = b"\nomnifs\n"
HEADER_BYTES = 4096
RESIDUE = 1365
"""Size of every manifest modulo 4096; it is odd, so no padded or block-sized plain file has it."""
MAX_MANIFEST_BYTES = 128 << 20
"""Most bytes of a manifest in reads and writes: 16 TiB in units of 1 MiB, or 64 GiB in units of 4 KiB."""
MAX_SEGMENT_RECORDS = 1 << 17
"""Twice the limit of a file that is appended to (``fusefs.write.file_writer``)."""
MAX_INT64 = 2**63 - 1
_SUM_BYTES = 18  # b"\n", 16 hexadecimal digits, b"\n"

_FIELDS = [("id", "V16"), ("size", "<u8"), ("unit", "<u4"), ("count", "<u2"), ("reserved", "<u2")]
RECORD_OF = {
    1: np.dtype(_FIELDS),
    2: np.dtype([*_FIELDS, ("start", "<u8"), ("length", "<u8")]),
}
"""Fields of a record by version; version 2 names the range of the segment that the file shows."""


_XattrName = Annotated[str, StringConstraints(min_length=1, max_length=255, pattern=r"^[^\x00]*$")]
_Hexadecimal = Annotated[str, StringConstraints(pattern=r"^(?:[0-9a-fA-F]{2})*$")]


class Header(StrictModel):
    """The JSON of a manifest's first 4096 bytes, which suffices for ``stat``."""

    # Our writers never write a number as text, or 1.0 for 1.
    model_config = ConfigDict(strict=True)

    omnifs: Literal[1, 2]
    """Version of the format."""
    kind: Literal["file", "symlink", "directory"]
    size: int = Field(ge=0, le=MAX_INT64)
    """Bytes of the logical file; for a symbolic link, of its target."""
    # The smallest value means that a directory has the store's own time (``NOT_KEPT``).
    mtime_ns: int = Field(ge=-MAX_INT64 - 1, le=2**64 - 1)
    mode: int = Field(ge=0, le=0o7777)
    """Permission bits."""
    segments: int = Field(ge=0, le=MAX_SEGMENT_RECORDS)
    """Number of segment records in the body."""
    units: int = Field(ge=0, le=MAX_MANIFEST_BYTES // 8)
    """Number of unit checksums in the body."""
    inline: int = Field(ge=0, le=MAX_MANIFEST_BYTES)
    """Bytes of the file that are in the body itself."""
    target: str | None = Field(default=None, min_length=1, max_length=4095, pattern=r"^[^\x00]*$")
    """Target of a symbolic link."""
    xattrs: dict[_XattrName, _Hexadecimal] = Field(default_factory=dict)
    """Extended attributes, values in hexadecimal."""
    body_xxh3: str = Field(pattern=r"^[0-9a-f]{16}$")
    """xxh3-64 of the body, 16 hexadecimal digits."""

    @model_validator(mode="after")
    def _of_its_kind(self) -> Self:
        if (self.kind == "symlink") != (self.target is not None):
            raise ValueError(f"a {self.kind} has the target {self.target!r}")
        # Otherwise a link could name objects, which verify would keep and no reader would ask for.
        if self.kind != "file" and self.body_bytes:
            raise ValueError(f"a {self.kind} has a body of {self.body_bytes} bytes")
        if self.manifest_bytes > MAX_MANIFEST_BYTES:
            raise ValueError(f"{self.manifest_bytes} bytes are more than {MAX_MANIFEST_BYTES}")
        return self

    @property
    def body_bytes(self) -> int:
        """Bytes of the body."""
        return self.segments * RECORD_OF[self.omnifs].itemsize + self.units * 8 + self.inline

    @property
    def manifest_bytes(self) -> int:
        """Bytes of the whole manifest."""
        used = HEADER_BYTES + self.body_bytes + len(TAIL)
        return used + (RESIDUE - used) % 4096


def has_manifest_size(size_bytes: int) -> bool:
    """Return whether a store file of ``size_bytes`` may be a manifest; if not, it is a plain file."""
    return size_bytes % 4096 == RESIDUE and size_bytes > HEADER_BYTES


def check_xattrs_fit(xattrs: Mapping[str, bytes]) -> None:
    """Check that extended attributes fit the header of any file, however large it becomes.

    Raises:
        ValueError: They do not fit.
    """
    widest = Header.model_construct(
        omnifs=VERSION,
        # Each field has its longest value, so anything that fits next to it fits whatever the file becomes.
        kind="symlink",
        size=MAX_INT64,
        mtime_ns=-MAX_INT64,
        mode=0o7777,
        segments=MAX_INT64,
        units=MAX_INT64,
        inline=MAX_INT64,
        xattrs={name: value.hex() for name, value in xattrs.items()},
        body_xxh3="f" * 16,
    )
    header_text(widest)


def decode_header(head: bytes | bytearray | memoryview, *, name: str) -> Header:
    """Read the first ``HEADER_BYTES`` of a manifest.

    Args:
        head: At least these bytes.
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
    try:
        value = orjson.loads(text)
    except orjson.JSONDecodeError as error:
        raise IntegrityError(
            f"manifest {name!r}: header is no JSON: {error}; restore the file from another copy"
        ) from error
    version = value.get("omnifs") if isinstance(value, dict) else None
    # Before the fields are checked, because a newer release may have others.
    if isinstance(version, int) and version > VERSION:
        raise StateError(
            f"manifest {name!r} has version {version}, this code reads 1 to {VERSION}; "
            "use the release that wrote it"
        )
    try:
        return Header.model_validate(value)
    except ValidationError as error:
        faults = "; ".join(
            f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors()[:3]
        )
        raise IntegrityError(
            f"manifest {name!r}: header breaks the format: {faults}; "
            "restore the file from another copy"
        ) from error


def header_text(header: Header) -> bytes:
    """Return the JSON of a header, padded.

    Raises:
        ValueError: It is too long.
    """
    text = orjson.dumps(header.model_dump())
    room = HEADER_BYTES - _SUM_BYTES
    if len(text) > room:
        raise ValueError(
            f"attributes need a header of {len(text)} bytes, more than {room}; "
            "shorten the link target or the extended attributes"
        )
    return text.ljust(room)

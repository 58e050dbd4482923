"""Files in the directory of a disk cache, byte by byte: docs/design/fusefs/0013-fusefs-disk-cache.md.

A copy is two files. ``NAME.data`` is the version of a file as it is, sparse where units are
missing. ``NAME.map`` is a header and one checksum per unit, 0 for a missing unit.
No byte is trusted because it is in the file: a header must equal the expected header, and a unit must
match its checksum. So no write needs to be ordered or synced, whenever the process or machine ends.
"""

import struct
from dataclasses import dataclass

import numpy as np
import orjson
import xxhash
from numpy.typing import NDArray

from omniload.base.errors import StateError

__all__ = [
    "COPIES",
    "HEADER_BYTES",
    "LEAVING",
    "MARKER",
    "VERSION",
    "CopyVersion",
    "check_marker",
    "decode_map",
    "encode_marker",
    "entry_bytes",
    "entry_of",
    "footprint",
    "header_of",
    "map_bytes",
    "num_units_of",
    "room_for",
    "size_in_map",
]

VERSION = 1
MARKER = "omnifs-disk-cache.json"
"""File that identifies the directory; the process that uses the directory holds a lock on it."""
COPIES = "copies"
LEAVING = "leaving"
"""Folder for files that are being removed; emptied at start."""
HEADER_BYTES = 64
_MAGIC = b"omnifs-copy\n"
_FIELDS = struct.Struct("<16s I I Q Q 16s")  # magic, version, zero, size, units, digest of the key
_PAGE = 4096


@dataclass(frozen=True, slots=True)
class CopyVersion:
    """A version of a file, as its copy identifies it."""

    key: str
    """Name of the bytes and of their division into units: other bytes have another key."""
    size_bytes: int
    num_units: int

    @property
    def name(self) -> str:
        """Name of the copy's files, 32 hexadecimal digits."""
        return xxhash.xxh3_128_hexdigest(self.key.encode("utf-8", "surrogateescape"))


def header_of(version: CopyVersion) -> bytes:
    """Return the header of a copy of ``version``, 64 bytes."""
    digest = bytes.fromhex(version.name)
    fields = _FIELDS.pack(_MAGIC, VERSION, 0, version.size_bytes, version.num_units, digest)
    return fields + xxhash.xxh3_64_digest(fields)


def map_bytes(num_units: int) -> int:
    """Return the size of a map in bytes."""
    return HEADER_BYTES + 8 * num_units


def num_units_of(size_bytes: int) -> int:
    """Return the number of units that a map of ``size_bytes`` describes."""
    return (size_bytes - HEADER_BYTES) // 8


def footprint(num_units: int) -> int:
    """Return the bytes on the disk of a copy without units: its map, and a page for its inodes."""
    # Round up to whole pages, because the cap is one of the disk, not of the bytes.
    return -(-map_bytes(num_units) // _PAGE) * _PAGE + _PAGE


def room_for(offset: int, size_bytes: int) -> int:
    """Return the most bytes that a unit takes on the disk: every page it touches, and its checksum."""
    first, stop = offset // _PAGE, -(-(offset + size_bytes) // _PAGE)
    return (stop - first) * _PAGE + 8


def size_in_map(head: bytes, table_bytes: int, name: str) -> int | None:
    """Return the bytes of the version that a map describes; None if the map is incomplete, or not of ``name``.

    Args:
        head: First ``HEADER_BYTES`` of the map.
        table_bytes: Bytes of the whole map.
        name: Name of the copy.
    """
    if len(head) < HEADER_BYTES:
        return None
    magic, version, _, size_bytes, units, digest = _FIELDS.unpack(head[: _FIELDS.size])
    sound = (
        magic.rstrip(b"\0") == _MAGIC
        and version == VERSION
        # If a file was renamed by hand, its header does not match its name.
        and digest.hex() == name
        and table_bytes == map_bytes(units)
        and head[_FIELDS.size : HEADER_BYTES] == xxhash.xxh3_64_digest(head[: _FIELDS.size])
    )
    return int(size_bytes) if sound else None


def decode_map(found: bytes, version: CopyVersion) -> NDArray[np.uint64] | None:
    """Return the checksums of a map, ``[U]``, 0 for a missing unit; None if the map is not of ``version``."""
    if len(found) != map_bytes(version.num_units) or found[:HEADER_BYTES] != header_of(version):
        return None
    return np.frombuffer(found, "<u8", offset=HEADER_BYTES).astype(np.uint64)


def entry_of(unit: int) -> int:
    """Return the offset of a unit's checksum in a map."""
    return HEADER_BYTES + 8 * unit


def entry_bytes(checksum: int) -> bytes:
    """Return a checksum in the form of a map."""
    return checksum.to_bytes(8, "little")


def encode_marker() -> bytes:
    """Return the content of a directory's marker."""
    return orjson.dumps({"omnifs_disk_cache": VERSION}) + b"\n"


def check_marker(found: bytes, directory: str) -> None:
    """Check that a directory is a disk cache of this version.

    Raises:
        StateError: It is no disk cache, or of another version.
    """
    try:
        version = orjson.loads(found)["omnifs_disk_cache"]
    except (orjson.JSONDecodeError, KeyError, TypeError):
        version = None
    if version != VERSION:
        raise StateError(
            f"disk cache {directory!r} has version {version}, this code knows {VERSION}; "
            "remove the directory or give another: nothing in it is the only copy"
        )

"""EROFS, the kernel's read-only file system, as bytes: superblock, inodes, directories, attributes.

Only the subset that an image needs: blocks of 4 KiB, extended inodes, data that lies in other
files (*devices*), named by number. All numbers are little-endian.

Source:
    Linux, ``fs/erofs/erofs_fs.h`` (the on-disk format) and Documentation/filesystems/erofs.rst.
"""

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from omniload.base.errors import ConfigError

__all__ = [
    "BLOCK_BYTES",
    "CHUNK_BASED",
    "FLAT_INLINE",
    "FLAT_PLAIN",
    "HEAD_BYTES",
    "INODE_BYTES",
    "MAX_DEVICES",
    "NO_BLOCK",
    "SUPER_END",
    "SUPER_OFFSET",
    "Inode",
    "Named",
    "chunk_form",
    "chunk_index",
    "crc32c",
    "device_slot",
    "device_slots",
    "directory_block",
    "directory_bytes",
    "directory_groups",
    "encoded_device",
    "encoded_inode",
    "superblock",
    "xattr_body",
]

BLOCK_BYTES = 4096
SUPER_OFFSET = 1024
SUPER_END = SUPER_OFFSET + 128
"""Where the table of devices begins, and the inodes after it."""
INODE_BYTES = 64
"""Of an extended inode; a compact one has neither times nor large numbers."""
MAX_DEVICES = 512
HEAD_BYTES = SUPER_END + 128 * MAX_DEVICES
"""Superblock and table of devices, at most."""
NO_BLOCK = 0xFFFFFFFF
"""Address of a chunk that is a hole."""

FLAT_PLAIN, FLAT_INLINE, CHUNK_BASED = 0, 2, 4

_MAGIC = 0xE0F5E1E2
_HAS_CHECKSUM = 0x1
_HAS_CHUNKS, _HAS_DEVICES = 0x4, 0x8
_CHUNK_INDEXES = 0x20
_SLOT_BYTES = 128
_DIRENT = struct.Struct("<QHBx")
_SUPER = struct.Struct("<IIIBBHQQIIII16s16sIHHHBBIQB23x")
_INODE = struct.Struct("<HHHHQIIIIqII16x")
_XATTR_HEAD = struct.Struct("<IB7x")
_PREFIXES = (
    (b"user.", 1),
    (b"trusted.", 4),
    (b"security.", 6),
)
_ACLS = {b"system.posix_acl_access": 2, b"system.posix_acl_default": 3}
_MAX_XATTR_BODY = 12 + 4 * 0xFFFE


@dataclass(frozen=True, slots=True, kw_only=True)
class Inode:
    """What an inode says, its extended attributes and data left out."""

    mode: int
    """With the bits of its type."""
    uid: int
    gid: int
    mtime_ns: int
    size_bytes: int
    links: int
    number: int
    layout: int
    place: int
    """First block of its data, its device number, or its form of chunks."""
    xattr_bytes: int


@dataclass(frozen=True, slots=True)
class Named:
    """One name in a directory."""

    name: bytes
    nid: int
    """Where its inode is, in units of 32 bytes."""
    file_type: int
    """As the kernel's ``FT_``: 1 file, 2 directory, 3 character, 4 block, 5 fifo, 7 symlink."""


def _crc_table() -> tuple[int, ...]:
    table = []
    for byte in range(256):
        for _ in range(8):
            byte = byte >> 1 ^ (0x82F63B78 if byte & 1 else 0)  # noqa: PLW2901 -- shifted out
        table.append(byte)
    return tuple(table)


_CRC = _crc_table()


def crc32c(data: bytes, start: int = 0xFFFFFFFF) -> int:
    """Return the Castagnoli checksum as the kernel keeps it: without the last inversion."""
    for byte in data:
        start = start >> 8 ^ _CRC[(start ^ byte) & 0xFF]
    return start


def superblock(
    *, root_nid: int, inodes: int, blocks: int, devices: int, uuid: bytes, first_block: bytes
) -> bytes:
    """Return the first block of an image: ``first_block`` with its superblock, checksum and all.

    Args:
        root_nid: Of the root directory.
        inodes: How many there are.
        blocks: Of the metadata file.
        devices: Files that hold data.
        uuid: 16 bytes.
        first_block: 4096 bytes; what lies behind the superblock in it is kept.
    """

    def packed(checksum: int) -> bytes:
        return _SUPER.pack(
            _MAGIC,
            checksum,
            _HAS_CHECKSUM,
            BLOCK_BYTES.bit_length() - 1,
            0,
            root_nid,
            inodes,
            0,  # build time: an image depends on nothing but its layers
            0,
            blocks,
            0,  # inodes are counted from the start of the file
            0,
            uuid,
            b"omniload",
            _HAS_CHUNKS | (_HAS_DEVICES if devices else 0),
            0,
            devices,
            SUPER_END // _SLOT_BYTES,
            0,
            0,
            0,
            0,
            0,
        )

    rest = first_block[SUPER_OFFSET + _SUPER.size :]
    checksum = crc32c(packed(0) + rest)
    return first_block[:SUPER_OFFSET] + packed(checksum) + rest


def device_slot(tag: bytes, blocks: int) -> bytes:
    """Return the record of one file of data in the table of devices."""
    return struct.pack("<64sII56x", tag[:64], blocks, 0)


def device_slots(head: bytes) -> tuple[tuple[bytes, int], ...]:
    """Return the tag and the blocks of each file of data that an image of ours names.

    Args:
        head: Its first bytes, at least ``HEAD_BYTES`` if it has so many.

    Raises:
        ValueError: It is no such image.
    """
    if len(head) < SUPER_END or head[SUPER_OFFSET : SUPER_OFFSET + 4] != _MAGIC.to_bytes(
        4, "little"
    ):
        raise ValueError(f"{len(head)} bytes that begin no EROFS image")
    (devices,) = struct.unpack_from("<H", head, SUPER_OFFSET + 86)
    slots = range(SUPER_END, SUPER_END + _SLOT_BYTES * devices, _SLOT_BYTES)
    if len(head) < SUPER_END + _SLOT_BYTES * devices:
        raise ValueError(f"{len(head)} bytes for {devices} devices")
    found = (struct.unpack_from("<64sI", head, at) for at in slots)
    return tuple((tag.rstrip(b"\0"), blocks) for tag, blocks in found)


def encoded_inode(inode: Inode) -> bytes:
    """Return the 64 bytes of an extended inode."""
    seconds, nanoseconds = divmod(inode.mtime_ns, 10**9)
    count = (inode.xattr_bytes - 12) // 4 + 1 if inode.xattr_bytes else 0
    return _INODE.pack(
        1 | inode.layout << 1,
        count,
        inode.mode,
        0,
        inode.size_bytes,
        inode.place,
        inode.number,
        inode.uid,
        inode.gid,
        seconds,
        nanoseconds,
        inode.links,
    )


def encoded_device(major: int, minor: int) -> int:
    """Return the number of a device node as the kernel packs it.

    Raises:
        ConfigError: Linux has no such number.
    """
    if major >= 1 << 12 or minor >= 1 << 20:
        raise ConfigError(
            f"device {major}:{minor} is more than 4095:1048575, which EROFS cannot hold; mount the "
            "image through FUSE"
        )
    return (minor & 0xFF) | major << 8 | (minor & ~0xFF) << 12


def chunk_index(device: int, block: int) -> bytes:
    """Return the address of a chunk: a block of a device, counted from 1."""
    return struct.pack("<HHI", 0, device, block)


def chunk_form(order: int) -> int:
    """Return what the inode of a file in chunks of ``2**order`` blocks says."""
    return _CHUNK_INDEXES | order


def xattr_body(xattrs: Sequence[tuple[bytes, bytes]]) -> bytes:
    """Return the extended attributes that follow an inode; empty for none.

    Raises:
        ConfigError: The kernel would not show one of them, or together they are too large.
    """
    if not xattrs:
        return b""
    parts = [_XATTR_HEAD.pack(0, 0)]
    for name, value in xattrs:
        index, rest = _split(name)
        if (not rest and index not in _ACLS.values()) or len(rest) > 255 or len(value) > 0xFFFF:
            raise ConfigError(
                f"extended attribute {name[:80]!r} of {len(value)} bytes cannot be held by EROFS; "
                "mount the image through FUSE"
            )
        one = struct.pack("<BBH", len(rest), index, len(value)) + rest + value
        parts.append(one + bytes(-len(one) % 4))
    body = b"".join(parts)
    if len(body) > _MAX_XATTR_BODY:
        raise ConfigError(
            f"extended attributes of {len(body)} bytes, more than {_MAX_XATTR_BODY}, which EROFS "
            "cannot hold; mount the image through FUSE"
        )
    return body


def _split(name: bytes) -> tuple[int, bytes]:
    if (index := _ACLS.get(name)) is not None:
        return index, b""
    for prefix, index in _PREFIXES:
        if name.startswith(prefix):
            return index, name[len(prefix) :]
    return 0, b""


def directory_groups(names: Sequence[bytes]) -> Iterator[tuple[int, int]]:
    """Yield which names, from and to, share a block; sorted names of a directory, ``.`` too."""
    first, used = 0, 0
    for number, name in enumerate(names):
        size = _DIRENT.size + len(name)
        if used + size > BLOCK_BYTES:
            yield first, number
            first, used = number, 0
        used += size
    yield first, len(names)


def directory_bytes(names: Sequence[bytes]) -> int:
    """Return the size of a directory: full blocks, and what is used of the last."""
    groups = list(directory_groups(names))
    first, end = groups[-1]
    last = sum(_DIRENT.size + len(name) for name in names[first:end])
    return (len(groups) - 1) * BLOCK_BYTES + last


def directory_block(entries: Sequence[Named]) -> bytes:
    """Return one block of a directory: records, then the names, no fill."""
    at = _DIRENT.size * len(entries)
    records = []
    for entry in entries:
        records.append(_DIRENT.pack(entry.nid, at, entry.file_type))
        at += len(entry.name)
    return b"".join(records) + b"".join(entry.name for entry in entries)

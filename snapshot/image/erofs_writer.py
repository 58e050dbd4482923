"""A merged tree as an EROFS image of metadata: names, attributes, and where the data lies.

The image is written front to back and depends on nothing but the tree. Files' contents are
not in it; inodes point into *blobs* (``erofs_blobs``), one for each layer with data, which
are given to the kernel as devices in the order of ``MetadataPlan.layers``::

    0      1024         1152            ...
    zero   superblock   devices         inodes, each with attributes and small data   large data
"""

import os
import stat as stat_bits
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from omniload.base.errors import ConfigError
from snapshot.image.entries import Kind
from snapshot.image.erofs_blobs import BlobLayout
from snapshot.image.erofs_format import (
    BLOCK_BYTES,
    CHUNK_BASED,
    FLAT_INLINE,
    FLAT_PLAIN,
    INODE_BYTES,
    MAX_DEVICES,
    NO_BLOCK,
    SUPER_END,
    Inode,
    Named,
    chunk_form,
    chunk_index,
    device_slot,
    directory_block,
    directory_bytes,
    directory_groups,
    encoded_device,
    encoded_inode,
    superblock,
    xattr_body,
)
from snapshot.image.tree import ROOT, Node, Tree

__all__ = ["MetadataPlan", "plan_metadata", "write_metadata"]

_NID_BYTES = 32
_TYPES: dict[Kind, tuple[int, int]] = {
    "file": (stat_bits.S_IFREG, 1),
    "directory": (stat_bits.S_IFDIR, 2),
    "character": (stat_bits.S_IFCHR, 3),
    "block": (stat_bits.S_IFBLK, 4),
    "fifo": (stat_bits.S_IFIFO, 5),
    "symlink": (stat_bits.S_IFLNK, 7),
}


@dataclass(frozen=True, slots=True)
class _Place:
    """Where one inode goes, and its data."""

    offset: int
    layout: int
    xattr_bytes: int
    data_bytes: int
    """Of a directory or symbolic link; otherwise 0."""
    block: int
    """Where that data begins in the image, if it does not follow the inode; counted from the first large data."""


@dataclass(frozen=True, slots=True)
class MetadataPlan:
    """Where everything of an image goes."""

    tree: Tree
    blobs: tuple[BlobLayout, ...]
    """Of every layer, lowest first."""
    layers: tuple[int, ...]
    """Those with data, in the order in which the kernel wants their blobs."""
    places: tuple[_Place, ...]
    first_block: int
    """Of the large data."""
    blocks: int
    """Of the whole image."""


def plan_metadata(tree: Tree, blobs: Sequence[BlobLayout]) -> MetadataPlan:
    """Decide where inodes and directories go.

    Args:
        tree: The merged image.
        blobs: Of its layers, lowest first.

    Raises:
        ConfigError: EROFS cannot hold something of it.
    """
    layers = tuple(number for number, blob in enumerate(blobs) if blob.size_bytes)
    if len(layers) > MAX_DEVICES:
        raise ConfigError(
            f"{len(layers)} layers with data, more than {MAX_DEVICES}; mount the image through FUSE"
        )
    at = SUPER_END + 128 * len(layers)
    places: list[_Place] = []
    large = 0
    for node in tree.nodes:
        xattr_bytes = len(xattr_body(_xattrs(node)))
        data_bytes = _data_bytes(node)
        head = INODE_BYTES + xattr_bytes
        is_inline = data_bytes > 0 and head + data_bytes <= BLOCK_BYTES
        size = head + (data_bytes if is_inline else _index_bytes(node, blobs, head))
        if is_inline and at % BLOCK_BYTES + size > BLOCK_BYTES:
            at += -at % BLOCK_BYTES  # inline data must not cross into another block
        layout = FLAT_INLINE if is_inline else FLAT_PLAIN
        if node.kind == "file" and node.size_bytes:
            layout = CHUNK_BASED
        places.append(_Place(at, layout, xattr_bytes, data_bytes, large))
        if data_bytes and not is_inline:
            large += -(-data_bytes // BLOCK_BYTES)
        at += size + -size % _NID_BYTES
    first = -(-at // BLOCK_BYTES)
    return MetadataPlan(tree, tuple(blobs), layers, tuple(places), first, first + large)


def write_metadata(plan: MetadataPlan, *, uuid: bytes) -> Iterator[bytes]:
    """Yield the image, from its first byte to its last.

    Args:
        plan: Of it.
        uuid: 16 bytes, which ``blkid`` shows.
    """
    pieces = _pieces(plan)
    head = bytearray()
    for piece in pieces:
        head += piece
        if len(head) >= BLOCK_BYTES:
            break
    block = superblock(
        root_nid=plan.places[0].offset // _NID_BYTES,
        inodes=len(plan.places),
        blocks=plan.blocks,
        devices=len(plan.layers),
        uuid=uuid,
        first_block=bytes(head[:BLOCK_BYTES]),
    )
    yield block + bytes(head[BLOCK_BYTES:])
    yield from pieces


def _pieces(plan: MetadataPlan) -> Iterator[bytes]:
    """Yield the image with an empty superblock."""
    yield bytes(SUPER_END)
    for layer in plan.layers:
        blob = plan.blobs[layer]
        yield device_slot(blob.name.encode(), blob.size_bytes // BLOCK_BYTES)
    at = SUPER_END + 128 * len(plan.layers)
    for node, place in zip(plan.tree.nodes, plan.places, strict=True):
        yield bytes(place.offset - at)
        body = encoded_inode(_inode(plan, node, place)) + xattr_body(_xattrs(node))
        if place.layout == FLAT_INLINE:
            body += b"".join(_data(plan, node))
        elif place.layout == CHUNK_BASED:
            body += bytes(-len(body) % 8) + b"".join(_chunks(plan, node))
        yield body
        at = place.offset + len(body)
    yield bytes(plan.first_block * BLOCK_BYTES - at)
    for node, place in zip(plan.tree.nodes, plan.places, strict=True):
        if place.layout == FLAT_PLAIN and place.data_bytes:
            for block in _data(plan, node):
                yield block + bytes(-len(block) % BLOCK_BYTES)


def _inode(plan: MetadataPlan, node: Node, place: _Place) -> Inode:
    kind, _ = _TYPES[node.kind]
    where = 0
    if place.layout == CHUNK_BASED:
        where = chunk_form(_placed_order(plan.blobs, node))
    elif place.layout == FLAT_PLAIN:
        where = plan.first_block + place.block if place.data_bytes else NO_BLOCK
    if node.kind in {"character", "block"}:
        where = encoded_device(*node.device)
    elif node.kind == "fifo":
        where = 0
    return Inode(
        mode=kind | node.mode,
        uid=node.uid,
        gid=node.gid,
        mtime_ns=node.mtime_ns,
        size_bytes=place.data_bytes or (node.size_bytes if node.kind == "file" else 0),
        links=node.links,
        number=node.number,
        layout=place.layout,
        place=where,
        xattr_bytes=place.xattr_bytes,
    )


def _data_bytes(node: Node) -> int:
    if node.kind == "directory":
        return directory_bytes(_names(node))
    return len(os.fsencode(node.target)) if node.kind == "symlink" else 0


def _data(plan: MetadataPlan, node: Node) -> Iterator[bytes]:
    """Yield what a directory or symbolic link holds, block by block."""
    if node.kind == "symlink":
        yield os.fsencode(node.target)
        return
    numbers = {os.fsencode(name): number for name, number in node.children.items()}
    numbers |= {b".": node.number, b"..": node.parent}
    names = _names(node)
    for first, end in directory_groups(names):
        yield directory_block([_named(plan, name, numbers[name]) for name in names[first:end]])


def _named(plan: MetadataPlan, name: bytes, number: int) -> Named:
    kind = plan.tree.node(number).kind
    return Named(name, plan.places[number - ROOT].offset // _NID_BYTES, _TYPES[kind][1])


def _names(node: Node) -> list[bytes]:
    """Return the names of a directory as the kernel searches them: by their bytes."""
    return sorted([b".", b"..", *map(os.fsencode, node.children)])


def _xattrs(node: Node) -> list[tuple[bytes, bytes]]:
    return [(os.fsencode(name), value) for name, value in node.xattrs]


def _index_bytes(node: Node, blobs: Sequence[BlobLayout], head: int) -> int:
    """Return the size of a file's chunk addresses, with the fill before them."""
    if node.kind != "file" or not node.size_bytes:
        return 0
    order = _placed_order(blobs, node)
    return -head % 8 + 8 * -(-node.size_bytes // (BLOCK_BYTES << order))


def _chunks(plan: MetadataPlan, node: Node) -> Iterator[bytes]:
    if not _has_data(node):
        order = _placed_order(plan.blobs, node)
        yield chunk_index(0, NO_BLOCK) * -(-node.size_bytes // (BLOCK_BYTES << order))
        return
    device = plan.layers.index(node.layer) + 1
    for block in plan.blobs[node.layer].place(node.extents, node.size_bytes).blocks:
        yield chunk_index(0, NO_BLOCK) if block is None else chunk_index(device, block)


def _placed_order(blobs: Sequence[BlobLayout], node: Node) -> int:
    if _has_data(node):
        return blobs[node.layer].place(node.extents, node.size_bytes).order
    return (-(-node.size_bytes // BLOCK_BYTES) - 1).bit_length()  # one hole


def _has_data(node: Node) -> bool:
    return any(extent.size_bytes for extent in node.extents)

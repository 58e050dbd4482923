"""A merged image as a read-only file system, which a container can use before its image has arrived."""

import errno
import os
import stat as stat_bits
from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar

from typing_extensions import override

from fusefs.bridge.api.blocking import BlockingFileSystem
from fusefs.bridge.api.protocol import Data, Entry, Named, Opened, Space
from snapshot.image.block.loader import BlockLoader
from snapshot.image.layer.index import LayerIndex
from snapshot.image.tree.tree import Node, Tree

__all__ = ["ImageView"]

# An image never changes, so nothing need be asked again while a job starts; a day is as good as for ever.
FOREVER_S = 86400.0
BLOCK_BYTES = 4096
_TYPE_OF = {
    "file": stat_bits.S_IFREG,
    "directory": stat_bits.S_IFDIR,
    "symlink": stat_bits.S_IFLNK,
    "character": stat_bits.S_IFCHR,
    "block": stat_bits.S_IFBLK,
    "fifo": stat_bits.S_IFIFO,
}


class ImageView(BlockingFileSystem):
    """Answers requests from the tree and the blocks.

    ``note`` is called with every read: number of the file, offset and bytes.
    """

    inline: ClassVar[frozenset[str]] = frozenset(  # all but reads, which may wait for a registry
        ["lookup", "getattr", "listing", "readlink", "open", "release", "xattrs", "statfs"]
    )
    never_changes: ClassVar[bool] = True

    def __init__(
        self,
        tree: Tree,
        indexes: Sequence[LayerIndex],
        loader: BlockLoader,
        note: Callable[[int, int, int], None] | None = None,
    ) -> None:
        self._tree = tree
        self._indexes = indexes
        self._loader = loader
        self._note = note
        # This saves half of an overlay's requests, because it looks for its own attributes at every file.
        has_any = any(node.entry.xattrs for node in tree.nodes)
        self.unasked = frozenset(["open"] if has_any else ["open", "getxattr"])

    @override
    def lookup(self, parent: int, name: bytes) -> Entry:
        found = self._tree.child(parent, os.fsdecode(name))
        # Answer with inode 0, which the kernel remembers, because an image never gets new names.
        return Entry(0, entry_timeout_s=FOREVER_S) if found is None else _entry(found)

    @override
    def getattr(self, inode: int) -> Entry:
        return _entry(self._tree.node(inode))

    @override
    def listing(self, inode: int) -> Sequence[Named]:
        children = self._tree.node(inode).children
        return [
            Named(os.fsencode(name), _entry(self._tree.node(number)))
            for name, number in children.items()
        ]

    @override
    def readlink(self, inode: int) -> bytes:
        return os.fsencode(self._tree.node(inode).entry.target)

    @override
    def open(self, inode: int, flags: int) -> Opened:
        if flags & (os.O_ACCMODE | os.O_TRUNC) != os.O_RDONLY:
            raise OSError(errno.EROFS, "an image does not change; put an overlay over it")
        return Opened(inode, keep_cache=True)

    @override
    def release(self, handle: int) -> None:
        pass  # a handle is the number of its inode, so there is nothing to release

    @override
    def try_read(self, handle: int, offset: int, size_bytes: int) -> Data | None:
        return self._read(handle, offset, size_bytes, self._loader.cached)

    @override
    def read(self, handle: int, offset: int, size_bytes: int) -> Data:
        data = self._read(handle, offset, size_bytes, self._loader.block)
        assert data is not None, "a block that is waited for comes, or an error does"
        return data

    @override
    def xattrs(self, inode: int) -> Mapping[bytes, bytes]:
        entry = self._tree.node(inode).entry
        return {os.fsencode(name): value for name, value in entry.xattrs}

    @override
    def statfs(self) -> Space:
        used = sum(index.stream_bytes for index in self._indexes)
        blocks = -(-used // BLOCK_BYTES)
        return Space(block_bytes=BLOCK_BYTES, blocks=blocks, inodes=len(self._tree.nodes))

    def _read(
        self,
        number: int,
        offset: int,
        size_bytes: int,
        block: Callable[[LayerIndex, int], bytes | None],
    ) -> Data | None:
        node = self._tree.node(number)
        end = min(offset + size_bytes, node.entry.size_bytes)
        if offset >= end:
            return b""
        parts: list[Data] = []
        at = offset
        index = self._indexes[node.layer]
        for extent in node.entry.extents:
            start = max(at, extent.file_offset)
            stop = min(end, extent.file_offset + extent.size_bytes)
            if start >= stop:
                continue
            if start > at:
                parts.append(bytes(start - at))
            from_stream = extent.stream_offset + start - extent.file_offset
            for part in index.ranges(from_stream, stop - start):
                data = block(index, part.block)
                if data is None:
                    return None
                parts.append(memoryview(data)[part.offset : part.offset + part.size_bytes])
            at = stop
        if at < end:
            parts.append(bytes(end - at))
        if self._note is not None:
            self._note(number, offset, end - offset)
        return parts[0] if len(parts) == 1 else b"".join(parts)


def _entry(node: Node) -> Entry:
    said = node.entry
    return Entry(
        inode=node.number,
        mode=_TYPE_OF[said.kind] | said.mode,
        size_bytes=len(os.fsencode(said.target)) if said.kind == "symlink" else said.size_bytes,
        nlink=node.links,
        uid=said.uid,
        gid=said.gid,
        rdev=os.makedev(*said.device),
        mtime_ns=said.mtime_ns,
        entry_timeout_s=FOREVER_S,
        attr_timeout_s=FOREVER_S,
    )

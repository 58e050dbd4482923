"""Entries: what the kernel is answered about an inode."""

import errno
import stat as stat_bits
import time

from fusefs.bridge.api.protocol import Entry
from fusefs.tree.catalog import FileInfo
from fusefs.vfs.attribute_cache import TTL_S
from fusefs.vfs.file.open_file import OpenFile, mode_of
from fusefs.vfs.inode_table import ROOT, Node
from fusefs.vfs.session import STATS_INODE, Session, stale

__all__ = ["Entries", "body_of"]

_TYPES = {
    "file": stat_bits.S_IFREG,
    "directory": stat_bits.S_IFDIR,
    "symlink": stat_bits.S_IFLNK,
}


class Entries:
    """Describes inodes, open ones as they are here, others as the store says."""

    def __init__(self, session: Session) -> None:
        self._session = session

    async def of(self, node: Node) -> Entry:
        """Describe an inode, and count its size among those that went to the kernel.

        Raises:
            OSError: ``ESTALE`` where its name leads to it no more.
        """
        entry = await self._described_now(node)
        node.advertise(entry.size_bytes)
        return entry._replace(attr_timeout_s=0) if node.resizes else entry

    def of_body(self, node: Node) -> Entry:
        """Describe an open file as it is here."""
        body = node.body
        assert body is not None
        mode = stat_bits.S_IFREG | mode_of(body)
        entry = self._attributes(node.number, mode, body.size_bytes, body.pending.mtime_ns)
        # As fstat of any file system says of what was removed, or replaced.
        return entry if node.is_attached else entry._replace(nlink=0)

    def of_info(self, number: int, info: FileInfo) -> Entry:
        """Describe an inode as the store says."""
        mode = _TYPES[info.kind] | info.mode
        return self._attributes(number, mode, info.size_bytes, info.mtime_ns)

    def of_own_directory(self, number: int) -> Entry:
        """Describe the folder that shows the mount's own numbers."""
        return self._attributes(number, stat_bits.S_IFDIR | 0o555, 0, 0)

    def of_statistics(self, name: bytes) -> Entry:
        """Describe the file that shows the mount's own numbers."""
        if name != b"stats.json":
            raise FileNotFoundError(errno.ENOENT, "only stats.json is here")
        size = len(self._session.statistics.as_json())
        entry = self._attributes(STATS_INODE, stat_bits.S_IFREG | 0o444, size, time.time_ns())
        return entry._replace(attr_timeout_s=0)

    async def _described_now(self, node: Node) -> Entry:
        session = self._session
        if node.body is not None:
            return self.of_body(node)
        if node.number == ROOT:
            return self.of_info(ROOT, await session.info(""))
        try:
            info = await session.info(node.path())
        except FileNotFoundError as error:
            # Where another mount removed it: O_CREAT must learn that from a look-up, and not fail here.
            raise stale() from error
        if body_of(node) is not None:
            return self.of_body(node)  # opened meanwhile, and perhaps as another version
        # The kernel takes an inode that changes its kind for broken, and answers EIO from then on.
        if node.kind not in {None, info.kind}:
            raise OSError(errno.ESTALE, f"a {info.kind} is there by now")
        node.kind = info.kind
        return self.of_info(node.number, info)

    def _attributes(self, number: int, mode: int, size_bytes: int, mtime_ns: int) -> Entry:
        uid, gid = self._session.owner
        return Entry(
            inode=number,
            mode=mode,
            size_bytes=size_bytes,
            nlink=2 if stat_bits.S_ISDIR(mode) else 1,
            uid=uid,
            gid=gid,
            # Before 1970 the kernel's unsigned seconds would end far in the future.
            mtime_ns=max(0, mtime_ns),
            block_bytes=self._session.files.config.striping.unit,
            entry_timeout_s=TTL_S,
            attr_timeout_s=TTL_S,
        )


def body_of(node: Node) -> OpenFile | None:
    """Return the body of a node that may have got one while a handler waited."""
    return node.body

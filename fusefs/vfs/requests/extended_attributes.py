"""Requests about extended attributes: those of users, and two that show and drop what a mount holds of a file."""

import errno
import os

from fusefs.format.attributes import Attributes
from fusefs.tools.statistics import drop_json, layout_json
from fusefs.tree.file_attributes import xattrs_at
from fusefs.vfs.file.open_file import xattrs_of
from fusefs.vfs.inode_table import Node
from fusefs.vfs.opening import Opening
from fusefs.vfs.requests.attributes import AttributeRequests
from fusefs.vfs.session import STATS_DIRECTORY_INODE, STATS_INODE, Session

LAYOUT_XATTR = "user.omnifs.layout"
DROP_XATTR = "user.omnifs.drop"
"""Reading it forgets what is cached of a path: no other call of a path reaches a read-only mount."""

__all__ = ["ExtendedAttributeRequests"]


class ExtendedAttributeRequests:
    """How extended attributes are read and set."""

    def __init__(self, session: Session, opening: Opening, attributes: AttributeRequests) -> None:
        self._session = session
        self._opening = opening
        self._attributes = attributes

    async def getxattr(self, inode: int, name: bytes) -> bytes:
        """Return an extended attribute; ``user.omnifs.layout`` shows how a file is stored."""
        text = os.fsdecode(name)
        if not text.startswith("user.") or inode in {STATS_INODE, STATS_DIRECTORY_INODE}:
            # Asked for at every write (security.capability): answered without the store.
            raise OSError(errno.ENODATA, "only user attributes are kept")
        node = self._session.inodes.node(inode)
        if text == LAYOUT_XATTR:
            path = node.path()
            return await self._session.wait(layout_json, self._session.files, path)
        if text == DROP_XATTR:
            return await self._drop(node)
        found = (await self._xattrs(node)).get(text)
        if found is None:
            raise OSError(errno.ENODATA, "no such attribute", text)
        return found

    async def listxattr(self, inode: int) -> list[bytes]:
        """Name the extended attributes."""
        if inode in {STATS_INODE, STATS_DIRECTORY_INODE}:
            return []
        found = await self._xattrs(self._session.inodes.node(inode))
        return [os.fsencode(name) for name in found]

    async def setxattr(self, inode: int, name: bytes, value: bytes) -> None:
        """Set an extended attribute of a file or directory."""
        node, text = self._session.changeable(inode), os.fsdecode(name)
        if not text.startswith("user.") or text in {LAYOUT_XATTR, DROP_XATTR}:
            raise OSError(errno.EOPNOTSUPP, "only user attributes are kept", text)
        known = await self._xattrs(node)
        await self._attributes.set(node, Attributes(xattrs={**known, text: value}))

    async def removexattr(self, inode: int, name: bytes) -> None:
        """Remove an extended attribute."""
        node, text = self._session.changeable(inode), os.fsdecode(name)
        known = await self._xattrs(node)
        if known.pop(text, None) is None:
            raise OSError(errno.ENODATA, "no such attribute", text)
        await self._attributes.set(node, Attributes(xattrs=known))

    async def _drop(self, node: Node) -> bytes:
        path = node.path()
        self._session.attributes.forget_all()
        below = [node]
        while below:
            known = below.pop()
            known.cached_version = None
            below += known.children.values()
        return await self._session.wait(drop_json, self._session.files, path)

    async def _xattrs(self, node: Node) -> dict[str, bytes]:
        if node.body is not None:
            return xattrs_of(node.body)
        path = self._opening.path_of_named(node)
        info = await self._session.info(path)
        if info.stored == "plain":
            return {}
        return await self._session.wait(xattrs_at, self._session.files, path)

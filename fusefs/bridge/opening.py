"""Opening and closing: which version an open shows, and who may read it without us.

*The page cache.* What the kernel holds of a file stays over an open exactly when the
version opened is the one it holds; a version has a name that is never used again (the
segments of a striped file; a plain file by its settled time stamp), so close-to-open holds.

*Local copies.* A version that lies whole on the local disk is handed to the kernel, which
reads it by itself. While it does, the inode can be opened in no other way. So whoever wants
to write, or finds a newer version, gets a new inode: the old one loses its name, the open
answers ESTALE, and the kernel looks the name up again by itself (it does so once for every
path, before any program hears of it). Readers keep the version they opened, as they keep
one that was renamed over.
"""

import errno
import os
import time
from collections.abc import Callable, Hashable

from fusefs.body import Body
from fusefs.bridge.protocol import Opened
from fusefs.bridge.session import Handle, Session
from fusefs.catalog import SETTLED_NS
from fusefs.namespace import OpenedFile
from fusefs.tree import Node

__all__ = ["Opening"]


class Opening(Session):
    """How files are opened, flushed and closed."""

    async def _open(self, node: Node, flags: int) -> Opened:
        reads_only = flags & (os.O_ACCMODE | os.O_TRUNC) == os.O_RDONLY
        if self._kernel is not None and self._kernel.passes_through(node.number):
            return await self._open_passed_through(node, flags, reads_only=reads_only)
        known = node.body is not None
        if not known:
            path = self._tree.path(node)
            opened = await self._wait(self._files.open, path)
            # Another open may have been faster while this one waited.
            if self._body_of(node) is None:
                node.body = Body(self._files, self._place, path, opened)
            else:
                opened.close()
        answer = self._handle(node, flags)
        body = self._handles[answer.handle].body
        try:
            if known:
                await self._wait(body.refresh)
            if flags & os.O_TRUNC:
                await self._wait(body.truncate, 0)
        except BaseException:
            await self._release(answer.handle)
            raise
        version = body.reader_if_clean() if reads_only else None
        token = _token(version) if version is not None else None
        keep = token is not None and token == node.cached_version
        node.cached_version = token
        return answer._replace(keep_cache=keep, local_fd=self._local_copy(node, version))

    def _local_copy(self, node: Node, version: OpenedFile | None) -> int | None:
        """Return a descriptor of a local copy, if the kernel can use one for this open."""
        kernel = self._kernel
        if version is None or kernel is None or not kernel.can_pass_through or node.opens > 1:
            return None
        local_copy: Callable[[], int | None] | None = getattr(version, "local_copy", None)
        return local_copy() if local_copy is not None else None

    async def _open_passed_through(self, node: Node, flags: int, *, reads_only: bool) -> Opened:
        body = node.body
        assert body is not None, "the kernel has it open"
        version = body.reader_if_clean()
        if reads_only and version is not None:
            try:
                found = await self._wait(self._files.stat, self._tree.path(node))
            except FileNotFoundError:
                return self._handle(node, flags)  # unlinked: there is no newer version
            if found.entry == version.info.entry:
                return self._handle(node, flags)
        self._part_from_name(node)
        raise OSError(errno.ESTALE, "another inode has this name now")

    def _part_from_name(self, node: Node) -> None:
        """Leave a version to those who have it open; its name leads to a new inode from now on.

        Raises:
            OSError: ``ETXTBSY``: it has no name any more, so this inode is all there is of it.
        """
        if node.parent is None:
            raise OSError(errno.ETXTBSY, "unlinked, and read from its local copy")
        if node.body is not None:
            node.body.path = None
        self._tree.detach(node.parent, node.name)

    @staticmethod
    def _body_of(node: Node) -> Body | None:
        return node.body

    async def _flush(self, handle: Handle, *, last: bool) -> None:
        body = handle.body
        if body.dirty and body.path is not None:
            await self._wait(body.flush, last=last)
            if body.path is not None:
                self._infos.pop(body.path, None)

    async def _release(self, number: int) -> None:
        handle = self._handles.pop(number)
        try:
            if handle.node.opens == 1:
                await self._flush(handle, last=True)
        finally:
            # Whatever the flush said: the kernel never asks for this handle again.
            self._tree.closed(handle.node)
            if handle.node.body is not handle.body:
                await self._wait(handle.body.close)


def _token(version: OpenedFile) -> Hashable | None:
    """Return what names the bytes of a version for ever, or None where nothing does yet."""
    manifest, entry = version.manifest, version.info.entry
    if manifest is not None and manifest.segments and not manifest.inline:
        return tuple((s.segment_id, s.before_bytes, s.size_bytes) for s in manifest.segments)
    if entry.mtime_ns and time.time_ns() - entry.mtime_ns > SETTLED_NS:
        return entry
    return None

"""Opening and closing: which version an open shows, and when the kernel may read it by itself.

*The page cache.* What the kernel holds of a file stays over an open exactly when the
version opened is the one it holds; a version has a name that is never used again (the
segments of a striped file; a plain file by its settled time stamp), so close-to-open holds.

*Versions.* An inode that somebody reads shows one version, and what this mount makes of it
(``leading``). An open of it when its path shows another one gets ESTALE: the name leads to
another inode by then, and the kernel looks it up again by itself (it does so once for every
path, before any program hears of it). Readers keep the version they opened, as they keep
one that was renamed over.

*Local copies.* A version that lies whole on the local disk is handed to the kernel, which
reads it by itself. While it does, the inode can be opened in no other way: so a caller that wants
to write gets a new inode, too.
"""

import errno
import os
import time
from collections.abc import Callable, Hashable
from contextlib import suppress
from functools import partial
from typing import NoReturn

from fusefs.bridge.api.protocol import Opened
from fusefs.tree.manifest_cache import is_settled
from fusefs.tree.namespace import OpenVersion
from fusefs.tree.version_identity import content_name
from fusefs.vfs.inode_table import Node
from fusefs.vfs.lookup import Lookup, stale
from fusefs.vfs.open_file import OpenFile
from fusefs.vfs.session import Handle
from omniload.base.errors import UnavailableError

__all__ = ["Opening"]


class Opening(Lookup):
    """How files are opened, flushed and closed."""

    async def _open(self, node: Node, flags: int) -> Opened:
        looks = True
        while node.body is None:
            looks = False
            brings = not flags & os.O_TRUNC
            await self._asked.call(node, partial(self._open_or_look, node, brings=brings))
        # Or it was closed by its last handle while this one waited: then all began anew.
        return await self._opened(node, flags, looks=looks)

    async def _open_or_look(self, node: Node, *, brings: bool) -> None:
        """Find out what a file is now, and hold that version open until somebody has a handle.

        Raises:
            OSError: ``ESTALE``: its name leads elsewhere by now; the kernel looks it up again.
        """
        if node.body is None:
            opened = await self._open_at_name(node, brings=brings)
            if self._body_of(node) is None:
                node.body = await self._fresh_body(node, opened)
                return
            opened.close()  # created meanwhile
        await self._look(node)

    async def _open_at_name(self, node: Node, *, brings: bool) -> OpenVersion:
        path = self._path_of_named(node)
        expected = self._known_info(path)
        try:
            return await self._wait(self._files.open, path, expected=expected, brings=brings)
        except FileNotFoundError as error:
            # Removed elsewhere: O_CREAT must learn that from the lookup.
            self._forget_info(path)
            raise stale() from error

    async def _opened(self, node: Node, flags: int, *, looks: bool) -> Opened:
        reads_only = flags & (os.O_ACCMODE | os.O_TRUNC) == os.O_RDONLY
        answer = self._handle(node, flags)  # it keeps the body while this one asks
        body = self._handles[answer.handle].body
        try:
            if looks:
                await self._asked.call(node, partial(self._look, node))
            if self._passes_through(node) and not reads_only:
                self._leave_to_readers(node)
            if flags & os.O_TRUNC:
                await self._wait(body.truncate, 0)
                node.kernel_size = 0
        except Exception:
            await self._release(answer.handle)
            raise
        if self._passes_through(node):
            return answer
        self._tell_size(node, body)
        version = body.reader_if_clean() if reads_only else None
        token = _token(version) if version is not None else None
        keep = token is not None and token == node.cached_version
        node.cached_version = token
        return answer._replace(keep_cache=keep, local_fd=self._local_copy(node, version))

    def _path_of_named(self, node: Node) -> str:
        """Return the path of a node that is to be opened by its name.

        Raises:
            OSError: ``ESTALE``: it lost its name meanwhile; the kernel looks it up again.
        """
        try:
            return self._tree.path(node)
        except FileNotFoundError as error:
            raise stale() from error

    async def _fresh_body(self, node: Node, opened: OpenVersion) -> OpenFile:
        """Return a body of a version that was just opened, at the path its node has by now."""
        try:
            while (path := self._path_of_named(node)) != opened.path:
                await self._wait(opened.moved, path)
        except OSError:
            opened.close()
            raise
        return OpenFile(self._files, self._place, path, opened)

    def _tell_size(self, node: Node, body: OpenFile) -> None:
        """Have the kernel ask for attributes again that this open has found outdated.

        The kernel keeps a size for a second, and reads no further: of a file that another mount
        has replaced by a longer one it would read the beginning.
        """
        if body.path is not None and (known := self._infos.peek(body.path)) is not None:
            version = body.reader_if_clean()
            if version is None or version.info.entry != known[1].entry:
                self._infos.pop(body.path)
        if node.advertised_size not in {None, body.size_bytes} and self._kernel is not None:
            self._kernel.outdated(node.number)
            node.advertised_size = None

    def _local_copy(self, node: Node, version: OpenVersion | None) -> int | None:
        """Return a descriptor of a local copy, if the kernel can use one for this open."""
        kernel = self._kernel
        if version is None or kernel is None or not kernel.can_pass_through or node.opens > 1:
            return None
        local_copy: Callable[[], int | None] | None = getattr(version, "local_copy", None)
        return local_copy() if local_copy is not None else None

    def _leave_to_readers(self, node: Node) -> NoReturn:
        """Leave a version to the kernel, which reads it by itself; its name leads to a new inode from now on.

        Raises:
            OSError: ``ESTALE``; ``ETXTBSY`` where it has no name any more, so that this inode is all there is of it.
        """
        if node.parent is None and (node.body is None or not node.body.replaced):
            raise OSError(errno.ETXTBSY, "unlinked, and read from its local copy")
        self._part(node, node.body)
        raise stale()

    async def _flush(self, handle: Handle, *, last: bool) -> None:
        body = handle.body
        if body.dirty and (body.path is not None or body.replaced):
            try:
                # While nobody looks what its path shows: that would be taken for another mount's.
                publish = partial(self._publish, body, last=last)
                await self._asked.exclusive(handle.node, publish)
            finally:
                if body.replaced and handle.node.body is body:
                    self._part(handle.node, body)
            if body.path is not None:
                self._file_changed(handle.node, body.path)

    async def _publish(self, body: OpenFile, *, last: bool) -> None:
        if not self._published_now(body, last=last):
            await self._wait(body.flush, last=last)

    def _published_now(self, body: OpenFile, *, last: bool) -> bool:
        """Publish a small new file where the store takes it at once; return whether it was done."""
        if not self._inline.may_run or not body.lock.acquire(blocking=False):
            return False
        try:
            if body.flushes_briefly:
                with suppress(UnavailableError):
                    self._inline.run(partial(body.flush, last=last))
                    return True
        finally:
            body.lock.release()
        return False

    async def _release(self, number: int) -> None:
        handle = self._handles.pop(number)
        if (version := handle.body.reader_if_clean()) is not None:
            version.reader.left(number)
        try:
            if handle.node.opens == 1:
                await self._flush(handle, last=True)
        except GeneratorExit:
            self._handles[number] = handle  # the mount ends: what is left open is published then
            raise
        except BaseException:
            # Whatever the flush said: the kernel never asks for this handle again.
            await self._closed(handle)
            raise
        await self._closed(handle)

    async def _closed(self, handle: Handle) -> None:
        self._tree.closed(handle.node, reads=handle.reads)
        if handle.node.body is not handle.body and not _closed_now(handle.body):
            await self._wait(handle.body.close)


def _closed_now(body: OpenFile) -> bool:
    """Close a body that asks nothing of the store for it; return whether it was done."""
    if not body.lock.acquire(blocking=False):
        return False
    try:
        version = body.reader_if_clean()
        if version is not None and version.closes_now:
            body.close()
            return True
        return False
    finally:
        body.lock.release()


def _token(version: OpenVersion) -> Hashable:
    """Return what names the bytes of a version for ever, or for as long as it is open where nothing else does yet."""
    manifest, entry = version.manifest, version.info.entry
    if manifest is not None and manifest.segments and not manifest.inline:
        return content_name(manifest)
    if is_settled(entry, time.time_ns()):
        return entry
    return version.mark

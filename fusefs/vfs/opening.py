"""Opening: the version that an open shows, when the kernel may read it by itself, and requests through a handle.

*The page cache.* The kernel's pages of a file survive an open exactly when the opened
version is the one that they belong to. The name of a version is never used again (the
segments of a striped file; the settled time stamp of a plain file), so this keeps close-to-open consistency.

*Versions.* An inode with readers shows one version, and the changes of this mount to it
(the table of ``shown_version``). If its path shows another version, an open of the inode gets ESTALE: the name then
leads to another inode, and the kernel looks it up again by itself (it does so once for every
path, before any program sees the error). Readers keep the version they opened, just as they keep
a file that was renamed over.

*Local copies.* If the whole version is on the local disk, its copy is handed to the kernel, which
reads it by itself. Meanwhile the inode cannot be opened in any other way, so a caller that wants
to write gets a new inode, too.
"""

import errno
import os
import time
from collections.abc import Hashable
from contextlib import suppress
from functools import partial
from typing import NoReturn

from fusefs.bridge.api.protocol import Data, Opened, only_reads
from fusefs.bridge.api.waiting import all_done
from fusefs.tree.manifests import is_settled
from fusefs.tree.namespace import OpenVersion
from fusefs.tree.version_identity import content_name
from fusefs.vfs.closing import Closing
from fusefs.vfs.file.open_file import OpenFile
from fusefs.vfs.inode_table import Node, body_of
from fusefs.vfs.session import STATS_INODE, Session, stale
from fusefs.vfs.shown_version import Lookup

__all__ = ["ContentRequests", "Opening"]


class Opening:
    """Opens files."""

    def __init__(self, session: Session, names: Lookup, closing: Closing) -> None:
        self._session = session
        self._names = names
        self._closing = closing

    async def open(self, node: Node, flags: int) -> Opened:
        """Open a file in its present version in the store, or as it is being written here.

        Raises:
            OSError: ``ESTALE``: its name now leads elsewhere; the kernel looks it up again.
        """
        looks = True
        while node.body is None:
            looks = False
            # Nobody reads bytes that are truncated at once.
            brings = not flags & os.O_TRUNC
            await self._session.rounds.call(node, partial(self._open_or_look, node, brings=brings))
        # The last handle may have closed the file while this request waited; then everything starts again.
        return await self._opened(node, flags, looks=looks)

    def path_of_named(self, node: Node) -> str:
        """Return the path of a node that is to be opened by its name.

        Raises:
            OSError: ``ESTALE``: it lost its name meanwhile; the kernel looks it up again.
        """
        try:
            return node.path()
        except FileNotFoundError as error:
            raise stale() from error

    async def _open_or_look(self, node: Node, *, brings: bool) -> None:
        """Find out the present version of a file, and keep it open until somebody has a handle.

        Raises:
            OSError: ``ESTALE``: its name now leads elsewhere; the kernel looks it up again.
        """
        if node.body is None:
            opened = await self._open_at_name(node, brings=brings)
            if body_of(node) is None:
                node.body = await self._fresh_body(node, opened)
                return
            opened.close()  # created meanwhile
        await self._names.look(node)

    async def _open_at_name(self, node: Node, *, brings: bool) -> OpenVersion:
        path = self.path_of_named(node)
        # The look-up just before usually knows the entry: a small plain file then opens by its bytes and one more look.
        expected = self._session.attributes.known(path)
        try:
            return await self._session.wait(
                self._session.files.open, path, expected=expected, brings=brings
            )
        except FileNotFoundError as error:
            # Another mount removed the file: O_CREAT must learn that from the look-up.
            self._session.attributes.forget(path)
            raise stale() from error

    async def _opened(self, node: Node, flags: int, *, looks: bool) -> Opened:
        reads_only = only_reads(flags)
        answer = self._session.handles.open(node, flags)  # keeps the body during the questions
        body = self._session.handles.files[answer.handle].body
        try:
            if looks:
                await self._session.rounds.call(node, partial(self._names.look, node))
            if self._session.passes_through(node) and not reads_only:
                self._leave_to_readers(node)
            if flags & os.O_TRUNC:
                await self._session.wait(body.truncate, 0)
                node.kernel_size = 0
        except Exception:
            await self._closing.release(answer.handle)
            raise
        if self._session.passes_through(node):
            return answer
        self._tell_size(node, body)
        version = body.content.bytes.version if reads_only else None
        token = _token(version) if version is not None else None
        keep = token is not None and token == node.cached_version
        node.cached_version = token
        return answer._replace(keep_cache=keep, local_fd=self._local_copy(node, version))

    async def _fresh_body(self, node: Node, opened: OpenVersion) -> OpenFile:
        """Return a body of a version that was just opened, at the present path of its node."""
        try:
            while (path := self.path_of_named(node)) != opened.path:
                await self._session.wait(opened.moved, path)
        except OSError:
            opened.close()
            raise
        return OpenFile(self._session.files, self._session.place, path, opened)

    def _tell_size(self, node: Node, body: OpenFile) -> None:
        """Make the kernel ask again for attributes that this open has found outdated.

        The kernel keeps a size for a second, and does not read past it. If another mount
        has replaced a file by a longer one, it would read only the beginning.
        """
        version, kernel = body.content.bytes.version, self._session.kernel
        if body.pending.path is not None:
            info = version.info if version is not None else None
            self._session.attributes.drop_unlike(body.pending.path, info)
        if node.advertised_size not in {None, body.size_bytes} and kernel is not None:
            kernel.outdated(node.number)
            node.advertised_size = None

    def _local_copy(self, node: Node, version: OpenVersion | None) -> int | None:
        """Return a descriptor of a local copy, if the kernel can use one for this open."""
        kernel = self._session.kernel
        # A second open of the inode would read through the page cache, and all opens must be alike.
        if version is None or kernel is None or not kernel.can_pass_through or node.opens > 1:
            return None
        return version.local_copy()

    def _leave_to_readers(self, node: Node) -> NoReturn:
        """Leave a version to the kernel, which reads it by itself; its name leads to a new inode from now on.

        Raises:
            OSError: ``ESTALE``; or ``ETXTBSY`` if the file has lost its name, so that there can be no other inode.
        """
        if node.parent is None and (node.body is None or not node.body.pending.replaced):
            raise OSError(errno.ETXTBSY, "unlinked, and read from its local copy")
        self._names.part(node, node.body)
        raise stale()


def _token(version: OpenVersion) -> Hashable:
    """Return a unique name for the bytes of a version, valid for ever, or else for as long as the version is open."""
    manifest, entry = version.manifest, version.info.entry
    if manifest is not None and manifest.segments and not manifest.inline:
        return content_name(manifest)
    if is_settled(entry, time.time_ns()):
        return entry
    return version.mark


class ContentRequests:
    """Requests that open, read, write and release files."""

    def __init__(self, session: Session, opening: Opening, closing: Closing) -> None:
        self._session = session
        self._opening = opening
        self._closing = closing

    async def open(self, inode: int, flags: int) -> Opened:
        """Open a file in its present version in the store, or as it is being written here."""
        if inode == STATS_INODE:
            if not only_reads(flags):
                raise PermissionError(errno.EPERM, "statistics are only read")
            # Bypass the page cache, whose pages would be the numbers of an earlier open.
            return Opened(self._open_statistics(), direct_io=True)
        return await self._opening.open(self._session.inodes.node(inode), flags)

    def _open_statistics(self) -> int:
        handle, statistics = self._session.handles.new_number(), self._session.statistics
        statistics.open_views[handle] = statistics.as_json()
        return handle

    async def read(self, handle: int, offset: int, size_bytes: int) -> Data:
        """Read a range: from memory at once, else when the blocks have arrived."""
        if (text := self._session.statistics.open_views.get(handle)) is not None:
            return text[offset : offset + size_bytes]
        opened = self._session.handles.files[handle]
        body = opened.body
        # Only try the lock: a flush holds it during store calls, and the loop must answer other requests.
        if body.lock.acquire(blocking=False):
            try:
                data = body.content.bytes.try_read(offset, size_bytes, handle)
                version = body.content.bytes.version
            finally:
                body.lock.release()
            if data is None and version is not None:
                data = await _read_when_here(version, offset, size_bytes, handle)
            if data is not None:
                if version is not None and opened.kept:
                    # Only bytes that go through the page cache stay in the kernel: O_DIRECT leaves nothing there.
                    version.reader.served(offset, len(data))
                return data
        return await self._session.wait(body.read, offset, size_bytes, handle)

    async def write(self, handle: int, offset: int, data: Data) -> int:
        """Write bytes: at once if the window has room, else in a thread that waits for it."""
        opened = self._session.handles.files[handle]
        body = opened.body
        opened.node.written()
        if body.lock.acquire(blocking=False):
            try:
                # Read the size under the lock, because a flush for another handle may change the size on the way.
                offset = body.size_bytes if opened.appends else offset
                path = body.pending.path or ""
                if body.content.bytes.writes_now(path, offset, len(data)):
                    body.write(offset, data)
                    opened.node.kernel_size = body.size_bytes
                    return len(data)
            finally:
                body.lock.release()
        # Copy the bytes, because the next request overwrites their buffer.
        await self._session.wait(body.write, None if opened.appends else offset, bytes(data))
        opened.node.kernel_size = body.size_bytes
        return len(data)

    async def flush(self, handle: int) -> None:
        """Publish at the close of a handle that writes, so that the next open of the file sees all its bytes."""
        opened = self._session.handles.files.get(handle)
        # FLUSH carries no mode. A reader must neither publish another handle's writes nor get their error.
        if opened is not None and opened.writes:
            await self._closing.flush(opened, last=True)

    async def fsync(self, handle: int) -> None:
        """Make all bytes written so far durable and visible."""
        if (opened := self._session.handles.files.get(handle)) is not None:
            await self._closing.flush(opened, last=False)
            # Include bytes that were published before, because they may not be durable yet.
            if (path := opened.body.pending.path) is not None and opened.body.pending.published:
                with suppress(FileNotFoundError):  # removed or renamed meanwhile
                    await self._session.wait(self._session.files.store.sync, path)

    async def fsyncdir(self, handle: int) -> None:
        """Make the names in a directory durable."""
        listing = self._session.handles.listings.get(handle)
        node = listing.directory if listing is not None else None
        if node is not None and node.is_attached:
            await self._session.wait(self._session.files.store.sync, node.path())

    async def release(self, handle: int) -> None:
        """Drop a handle; flush has already published, unless it failed and reported an error."""
        if self._session.statistics.open_views.pop(handle, None) is not None:
            return
        await self._closing.release(handle)


async def _read_when_here(version: OpenVersion, offset: int, size_bytes: int, handle: int) -> Data:
    waiting = version.reader.start(offset, size_bytes, process=handle)
    await all_done(waiting)
    return version.reader.finish(offset, size_bytes, waiting)

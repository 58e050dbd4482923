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
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

from fusefs.body import Body
from fusefs.bridge.protocol import Opened
from fusefs.bridge.session import Handle, Session
from fusefs.known import is_settled
from fusefs.namespace import OpenedFile
from fusefs.tree import Node

__all__ = ["Opening"]


@dataclass(frozen=True, slots=True)
class _Found:
    """What a look at the store said of a node."""

    body: Body
    is_current: bool
    """Whether the body shows the version that was at its path."""


class Opening(Session):
    """How files are opened, flushed and closed."""

    async def _open(self, node: Node, flags: int) -> Opened:
        reads_only = flags & (os.O_ACCMODE | os.O_TRUNC) == os.O_RDONLY
        while True:
            if self._passes_through(node):
                if not reads_only:
                    self._part_from_name(node)
                    raise _stale()
            elif node.body is not None:
                # The handle keeps the body while this one asks.
                return await self._opened(node, flags, refreshes=True, reads_only=reads_only)
            brings = not flags & os.O_TRUNC
            found = await self._asked.ask(node, partial(self._look, node, brings=brings))
            if node.body is not found.body:
                continue  # closed by the last who had it while this one waited
            if not self._passes_through(node):
                return await self._opened(node, flags, refreshes=False, reads_only=reads_only)
            # Meanwhile another open may have been faster, and have brought a local copy.
            if not (reads_only and found.is_current):
                self._part_from_name(node)
                raise _stale()
            return self._handle(node, flags)

    async def _look(self, node: Node, *, brings: bool = True) -> _Found:
        """Find out what a file is now: open it, or bring what is open of it up to date.

        Raises:
            OSError: ``ESTALE``: its name leads elsewhere by now; the kernel looks it up again.
        """
        body = node.body
        if body is None:
            opened = await self._open_at_name(node, brings=brings)
            if (made := self._body_of(node)) is None:
                node.body = self._fresh_body(node, opened)
                return _Found(node.body, is_current=True)
            opened.close()  # created meanwhile
            body = made
        if not self._passes_through(node):
            await self._wait(body.refresh)
            return _Found(body, is_current=True)
        version, found = body.reader_if_clean(), None
        with suppress(FileNotFoundError):  # unlinked: there is no newer version
            found = await self._wait(self._files.stat, self._tree.path(node))
        is_newest = found is None or (version is not None and found.entry == version.info.entry)
        return _Found(body, is_current=version is not None and is_newest)

    async def _open_at_name(self, node: Node, *, brings: bool) -> OpenedFile:
        path = self._path_of_named(node)
        believed = self._known_info(path)
        try:
            return await self._wait(self._files.open, path, believed=believed, brings=brings)
        except FileNotFoundError as error:
            # Removed elsewhere: who creates it if it is not there must hear so from the lookup.
            self._forget_info(path)
            raise _stale() from error

    async def _opened(self, node: Node, flags: int, *, refreshes: bool, reads_only: bool) -> Opened:
        answer = self._handle(node, flags)
        body = self._handles[answer.handle].body
        try:
            if refreshes:
                await self._asked.ask(node, partial(self._look, node))
            if flags & os.O_TRUNC:
                await self._wait(body.truncate, 0)
        except Exception:
            await self._release(answer.handle)
            raise
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
            raise _stale() from error

    def _fresh_body(self, node: Node, opened: OpenedFile) -> Body:
        """Return a body of a version that was just opened, at the path its node has by now."""
        try:
            path = self._path_of_named(node)
        except OSError:
            opened.close()
            raise
        opened.moved(path)
        return Body(self._files, self._place, path, opened)

    def _tell_size(self, node: Node, body: Body) -> None:
        """Have the kernel ask for attributes again that this open has found outdated.

        It believes a size for a second, and reads no further: of a file that another mount
        has replaced by a longer one it would read the beginning.
        """
        if body.path is not None and (known := self._infos.get(body.path)) is not None:
            version = body.reader_if_clean()
            if version is None or version.info.entry != known[1].entry:
                del self._infos[body.path]
        if node.told_bytes not in {None, body.size_bytes} and self._kernel is not None:
            self._kernel.outdated(node.number)
            node.told_bytes = None

    def _passes_through(self, node: Node) -> bool:
        return self._kernel is not None and self._kernel.passes_through(node.number)

    def _local_copy(self, node: Node, version: OpenedFile | None) -> int | None:
        """Return a descriptor of a local copy, if the kernel can use one for this open."""
        kernel = self._kernel
        if version is None or kernel is None or not kernel.can_pass_through or node.opens > 1:
            return None
        local_copy: Callable[[], int | None] | None = getattr(version, "local_copy", None)
        return local_copy() if local_copy is not None else None

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
                self._file_changed(handle.node, body.path)

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
        self._tree.closed(handle.node)
        if handle.node.body is not handle.body:
            await self._wait(handle.body.close)


def _stale() -> OSError:
    return OSError(errno.ESTALE, "another inode has this name now, or none")


def _token(version: OpenedFile) -> Hashable | None:
    """Return what names the bytes of a version for ever, or None where nothing does yet."""
    manifest, entry = version.manifest, version.info.entry
    if manifest is not None and manifest.segments and not manifest.inline:
        return tuple((s.segment_id, s.before_bytes, s.size_bytes) for s in manifest.segments)
    if is_settled(entry, time.time_ns()):
        return entry
    return None

"""What all handlers of one mount share: nodes, handles, and attributes known for a moment."""

import errno
import os
import stat as stat_bits
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import ParamSpec, TypeVar

from typing_extensions import override

from fusefs.bridge.api.protocol import Entry, FileSystem, Kernel, Opened
from fusefs.bridge.api.waiting import in_thread
from fusefs.stores.protocol import MAX_NAME_BYTES, RESERVED
from fusefs.tools.statistics import Statistics
from fusefs.tree.catalog import FileInfo
from fusefs.tree.namespace import StripedFiles
from fusefs.vfs.flush_all import flush_all
from fusefs.vfs.fresh_single_flight import FreshSingleFlight
from fusefs.vfs.inline_calls import InlineCalls
from fusefs.vfs.inode_table import ROOT, InodeTable, Node
from fusefs.vfs.open_file import OpenFile, SpoolPlace
from omniload.base.errors import UnavailableError
from omniload.base.lru import Lru

__all__ = ["STATS_DIRECTORY_INODE", "STATS_INODE", "TTL_S", "Handle", "Listed", "Session"]

TTL_S = 1.0
"""How long attributes are kept, here and in the kernel: what another mount changes shows then."""
STATS_INODE = 2**63 - 1
STATS_DIRECTORY_INODE = 2**63 - 2
_MISSED_S = 0.1
"""As long as a file may be made where a look-up found nothing: the kernel asks for it right behind that."""
_MOST_MISSED = 1000
_MOST_INFOS = 200_000
_LAST_PUBLISH_S = 45.0
"""For files that are open when the mount is asked to end: within what systemd and ``mount`` wait."""
_CALLS_WAITING = 64
"""Calls that wait for the store at a time, each in a thread."""
Result = TypeVar("Result")
Arguments = ParamSpec("Arguments")


Listed = tuple[str, Entry, Node | None]
"""One line of a listing."""


@dataclass(slots=True)
class Handle:
    """One open of a file."""

    node: Node
    body: OpenFile
    appends: bool
    reads: bool
    kept: bool
    """Whether what is read through it stays in the kernel's page cache."""


class Session(FileSystem):
    """State of one mount, touched on its loop only."""

    def __init__(self, files: StripedFiles, place: SpoolPlace) -> None:
        self._files = files
        self._place = place
        self._tree = InodeTable()
        self._handles: dict[int, Handle] = {}
        self._listings: dict[int, list[Listed]] = {}
        self._listed_at: dict[int, int] = {}
        """How many changes the mount had seen when a listing was asked for."""
        self._directories: dict[int, Node] = {}
        """By handle of a listing."""
        self._next_handle = 1
        self._line_bytes = 0
        """Size in the line of a listing that was read last."""
        self._infos: Lru[str, tuple[float, FileInfo]] = Lru(_MOST_INFOS)
        self._missed: Lru[str, float] = Lru(_MOST_MISSED)
        """Paths of which the kernel has just heard that nothing is there."""
        self._asked = FreshSingleFlight()
        """By path: what is there. By node: which version an open shows."""
        self._num_changes = 0
        """Of paths, so that what was asked before a change is not remembered after it."""
        self._owner = (os.getuid(), os.getgid())
        self._pool = ThreadPoolExecutor(_CALLS_WAITING, "fusefs-call")
        self._inline = InlineCalls(answers_at_once=files.store.answers_at_once)
        self._kernel: Kernel | None = None
        self.statistics = Statistics(files)

    def close(self) -> list[str]:
        """Publish what was left open and end the threads; nothing may be under way.

        Returns:
            Paths of files that could not be published.
        """
        bodies = [handle.body for handle in self._handles.values()]
        lost = flush_all(bodies, within_s=_LAST_PUBLISH_S)
        self._pool.shutdown()
        return lost

    @override
    def connected(self, kernel: Kernel) -> None:
        self._kernel = kernel

    async def _wait(
        self,
        call: Callable[Arguments, Result],
        *arguments: Arguments.args,
        **named: Arguments.kwargs,
    ) -> Result:
        """Run a call that may wait for the store in a thread."""
        return await in_thread(self._pool, call, *arguments, **named)

    def _place_for(self, parent_inode: int, name: bytes) -> tuple[Node, str]:
        """Return directory and name of something to be changed, which the store's own is not."""
        if parent_inode in {STATS_INODE, STATS_DIRECTORY_INODE} or (
            parent_inode == ROOT and name == RESERVED.encode()
        ):
            raise PermissionError(errno.EPERM, f"{RESERVED} belongs to the store")
        self._check_name(name)
        return self._tree.node(parent_inode), os.fsdecode(name)

    @staticmethod
    def _check_name(name: bytes) -> None:
        if len(name) > MAX_NAME_BYTES:
            raise OSError(errno.ENAMETOOLONG, f"a name has at most {MAX_NAME_BYTES} bytes")

    def _new_handle(self) -> int:
        self._next_handle += 1
        return self._next_handle

    def _new_stats_handle(self) -> int:
        handle = self._new_handle()
        self.statistics.open_views[handle] = self.statistics.as_json()
        return handle

    def _handle(self, node: Node, flags: int) -> Opened:
        assert node.body is not None
        number = self._new_handle()
        reads = flags & os.O_ACCMODE != os.O_WRONLY
        node.opens += 1
        node.readers += reads
        self._handles[number] = Handle(
            node, node.body, bool(flags & os.O_APPEND), reads, not flags & os.O_DIRECT
        )
        return Opened(number)

    @staticmethod
    def _is_open(parent: Node, name: str) -> bool:
        node = parent.children.get(name)
        return node is not None and node.body is not None

    def _miss(self, path: str) -> None:
        """Note the answer that nothing is at a path: what it asks to make there comes next."""
        self._missed.put(path, time.monotonic() + _MISSED_S)

    def _was_just_missed(self, path: str) -> bool:
        """Return whether a path was looked up in vain a moment ago; once for each look-up."""
        return (self._missed.pop(path) or 0.0) > time.monotonic()

    async def _info(self, path: str) -> FileInfo:
        """Describe a path from what is known for less than ``TTL_S``, else from the store."""
        if (known := self._known_info(path)) is not None:
            return known
        return await self._asked.call(path, partial(self._ask_info, path))

    def _known_info(self, path: str) -> FileInfo | None:
        known = self._infos.peek(path)
        return known[1] if known is not None and known[0] > time.monotonic() else None

    async def _ask_info(self, path: str) -> FileInfo:
        # What the round before has just brought serves all requests that come now, so also those that
        # asked a moment ago too: only where nothing was there, or it changed here, is it asked again.
        if (known := self._known_info(path)) is not None:
            return known
        before = self._num_changes
        info = self._described_here(path)
        if info is None:
            info = await self._wait(self._files.stat, path)
        if self._num_changes == before:
            self._remember(path, info)
        return info

    def _described_here(self, path: str) -> FileInfo | None:
        """Describe a path by asking on the loop; None where it must be asked in a thread."""
        if self._inline.may_run:
            with suppress(UnavailableError):
                return self._inline.run(partial(self._files.stat, path))
        return None

    def _remember(self, path: str, info: FileInfo) -> None:
        self._infos.put(path, (time.monotonic() + TTL_S, info))

    def _forget_info(self, path: str) -> None:
        self._num_changes += 1
        self._infos.pop(path)
        self._missed.pop(path)

    def _names_changed(self, path: str) -> None:
        """Note that names in a directory changed: its time moves, here at once."""
        known = self._infos.peek(path)
        if known is not None:
            until, info = known
            now_ns = time.time_ns()
            entry = replace(info.entry, mtime_ns=now_ns)
            self._infos.put(path, (until, replace(info, mtime_ns=now_ns, entry=entry)))

    def _file_changed(self, node: Node, path: str) -> None:
        """Forget what is known of a file, also in listings that are being read."""
        self._forget_info(path)
        node.changed_at = self._num_changes

    def _forget_infos(self, *paths: str) -> None:
        self._num_changes += 1
        self._missed.clear()
        for path in paths:
            self._infos.pop_where(partial(_is_at_or_below, path))

    async def _entry(self, node: Node) -> Entry:
        entry = await self._described_now(node)
        node.advertise(entry.size_bytes)
        return entry._replace(attr_timeout_s=0) if node.resizes else entry

    async def _described_now(self, node: Node) -> Entry:
        if node.body is not None:
            return self._body_entry(node)
        if node.number == ROOT:
            return self._described(ROOT, await self._info(""))
        try:
            info = await self._info(self._tree.path(node))
        except FileNotFoundError as error:
            if not node.is_attached:
                raise OSError(errno.ESTALE, "unlinked and not open") from error
            raise
        if self._body_of(node) is not None:
            return self._body_entry(node)  # opened meanwhile, and perhaps as another version
        if node.kind not in {None, info.kind}:
            raise OSError(errno.ESTALE, f"a {info.kind} is there by now")
        node.kind = info.kind
        return self._described(node.number, info)

    @staticmethod
    def _body_of(node: Node) -> OpenFile | None:
        """Return the body of a node that may have got one while a handler waited."""
        return node.body

    def _body_entry(self, node: Node) -> Entry:
        body = node.body
        assert body is not None
        mode = stat_bits.S_IFREG | body.mode
        entry = self._attributes(node.number, mode, body.size_bytes, body.mtime_ns)
        return entry if node.is_attached else entry._replace(nlink=0)

    def _described(self, number: int, info: FileInfo) -> Entry:
        kind = {
            "file": stat_bits.S_IFREG,
            "directory": stat_bits.S_IFDIR,
            "symlink": stat_bits.S_IFLNK,
        }[info.kind]
        return self._attributes(number, kind | info.mode, info.size_bytes, info.mtime_ns)

    def _directory_entry(self, number: int) -> Entry:
        return self._attributes(number, stat_bits.S_IFDIR | 0o555, 0, 0)

    def _stats_entry(self, name: bytes) -> Entry:
        if name != b"stats.json":
            raise FileNotFoundError(errno.ENOENT, "only stats.json is here")
        size = len(self.statistics.as_json())
        entry = self._attributes(STATS_INODE, stat_bits.S_IFREG | 0o444, size, time.time_ns())
        return entry._replace(attr_timeout_s=0)

    def _attributes(self, number: int, mode: int, size_bytes: int, mtime_ns: int) -> Entry:
        return Entry(
            inode=number,
            mode=mode,
            size_bytes=size_bytes,
            nlink=2 if stat_bits.S_ISDIR(mode) else 1,
            uid=self._owner[0],
            gid=self._owner[1],
            # Before 1970 the kernel's unsigned seconds would end far in the future.
            mtime_ns=max(0, mtime_ns),
            block_bytes=self._files.config.striping.unit,
            entry_timeout_s=TTL_S,
            attr_timeout_s=TTL_S,
        )


def _is_at_or_below(top: str, path: str) -> bool:
    return path == top or path.startswith(f"{top}/")

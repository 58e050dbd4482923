"""State that the requests of one mount share: its inodes, its handles, recent answers about paths, and the store.

::

    Session --- inodes, handles, attributes: state, which makes no requests
       |------- rounds, inline: how concurrent requests share a call, and which thread makes it
       v
    Lookup, Closing, Opening, Entries: the rules for a name, a handle, an open, an inode
       v
    names, attributes, opening: one class for each kind of request

A local disk answers in microseconds what is at a path, and takes a small new file in a few more. To wake a
thread for such a call, which then wakes the loop again, costs ten times as much. But the loop answers nobody
during a call, and a busy disk answers late. So after a call that waited long, threads make the calls
for a while. A call that only lost its core to another program did not wait for a disk, and a thread would
have lost the core as well.
"""

import errno
import os
import resource
import time
from collections.abc import Awaitable, Callable, Hashable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ParamSpec, TypeVar

from fusefs.base.thread_pools import CallPool
from fusefs.bridge.api.protocol import Kernel
from fusefs.bridge.api.waiting import all_done, in_thread
from fusefs.stores.deadlines import within
from fusefs.stores.protocol import MAX_NAME_BYTES, RESERVED
from fusefs.tools.statistics import Statistics
from fusefs.tree.catalog import FileInfo
from fusefs.tree.namespace import StripedFiles
from fusefs.vfs.attribute_cache import AttributeCache
from fusefs.vfs.file.open_file import SpoolPlace, flush_all
from fusefs.vfs.file.rename_open import LeavingPaths
from fusefs.vfs.handle_table import HandleTable
from fusefs.vfs.inode_table import ROOT, InodeTable, Node
from omniload.base.errors import UnavailableError

__all__ = [
    "STATS_DIRECTORY_INODE",
    "STATS_INODE",
    "FreshSingleFlight",
    "InlineCalls",
    "Session",
    "checked_name",
    "stale",
]

_QUICK_S = 0.005
"""Seconds of a call that delays other requests no more than a large read does."""
_REST = 10
"""Rest after a longer call, in multiples of its length: slow calls take at most a tenth of the loop's time."""
# Larger than all numbers that names are hashed to (52 bits).
STATS_INODE = 2**63 - 1
STATS_DIRECTORY_INODE = 2**63 - 2
_LAST_PUBLISH_S = 45.0
"""Seconds for files that are open when the mount is asked to end; systemd and ``mount`` wait longer."""
_CALLS_WAITING = 64
"""Most calls that wait for the store at a time, each in a thread."""
Result = TypeVar("Result")
Arguments = ParamSpec("Arguments")


def _waits_of_thread() -> int:
    """Return how often this thread gave up its core voluntarily, to wait for something."""
    return resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw


class InlineCalls:
    """Lets calls run on the loop while the store answers quickly. Used on one thread.

    Args:
        answers_at_once: Whether the store is of a kind that answers quickly.
        clock: Seconds.
        waits: Returns how often this thread has waited so far.
    """

    def __init__(
        self,
        *,
        answers_at_once: bool,
        clock: Callable[[], float] = time.monotonic,
        waits: Callable[[], int] = _waits_of_thread,
    ) -> None:
        self._answers_at_once = answers_at_once
        self._clock, self._waits = clock, waits
        self._not_before = float("-inf")

    @property
    def may_run(self) -> bool:
        """Whether the next call may be made on the loop."""
        return self._answers_at_once and self._clock() >= self._not_before

    def run(self, call: Callable[[], Result]) -> Result:
        """Make a call, and note how long it took. The loop must not wait for the end of an outage.

        Raises:
            UnavailableError: The store did not answer the first attempt; the call may be made again in a thread.
        """
        begun, waits = self._clock(), self._waits()
        try:
            # Only one attempt: the waits between attempts would hold up every request of the mount.
            with within(0.0):
                return call()
        finally:
            now = self._clock()
            # Losing the core to another program says nothing about the disk: a thread gives it up voluntarily only to
            # wait.
            if (took := now - begun) > _QUICK_S and self._waits() != waits:
                self._not_before = now + _REST * took


@dataclass(slots=True, eq=False)
class _Round:
    """One call of the function: callers before its beginning share its answer."""

    has_begun: bool
    """Whether the round has begun; True from the start for a change, which is not shared."""
    answer: "Future[Any]" = field(default_factory=Future)
    """Answer of the round; cancelled if the task that ran the function was stopped, and then callers start anew."""


class FreshSingleFlight:
    """Rounds of calls, one after the other for each key: no caller gets an answer that was asked for before it called.

    The processes of a node open one checkpoint in the same moment, and each must learn what the
    store holds *now*, including files that were closed elsewhere before it asked. So no caller may take the answer
    of a round that was under way when it called. All callers that arrive during a round wait together for
    the next round, and share its answer::

        calls     a     b c       d
        round     |--1--|---2---|---3---|
        answered        a       b c     d

    However many callers there are at once, the store is asked twice in a row. A change of the same key has a
    round of its own, which no caller shares.

    Used on one thread, that of the mount's loop. The first caller of a round runs the function itself; an exception
    of the function reaches all callers that share the round. A function must not call with its own key, because it
    would wait for itself.
    """

    def __init__(self) -> None:
        self._rounds: dict[Hashable, _Round] = {}
        """Youngest round of each key; rounds that have ended are removed."""

    async def call(self, key: Hashable, fn: Callable[[], Awaitable[Result]]) -> Result:
        """Return the result of a run of ``fn`` that began after this call.

        Args:
            key: Calls with the same key may share a run.
            fn: Function to run, unless another call of the same round runs its own.

        Raises:
            Exception: The error of the run.
        """
        while True:
            youngest = self._rounds.get(key)
            if youngest is None or youngest.has_begun:
                return await self._run(key, fn, youngest)
            await all_done((youngest.answer,))
            if not youngest.answer.cancelled():
                answer: Result = youngest.answer.result()
                return answer

    async def exclusive(self, key: Hashable, change: Callable[[], Awaitable[Result]]) -> Result:
        """Run a change of ``key`` while no other run of it is under way."""
        return await self._run(key, change, self._rounds.get(key), is_shared=False)

    async def _run(
        self,
        key: Hashable,
        fn: Callable[[], Awaitable[Result]],
        before: _Round | None,
        *,
        is_shared: bool = True,
    ) -> Result:
        # Register the round before it waits for its turn, so that calls that arrive meanwhile can share it.
        mine = self._rounds[key] = _Round(has_begun=not is_shared)
        try:
            if before is not None:
                await all_done((before.answer,))
            mine.has_begun = True
            answer = await fn()
        except GeneratorExit:
            self._end(key, mine, before)
            mine.answer.cancel()
            raise
        except BaseException as error:
            self._end(key, mine, before)
            mine.answer.set_exception(error)
            raise
        else:
            self._end(key, mine, before)
            mine.answer.set_result(answer)
            return answer
        finally:
            # otherwise an error, its traceback and the round would form a cycle of references
            del mine

    def _end(self, key: Hashable, ended: _Round, before: _Round | None) -> None:
        # Otherwise the entry is a younger round, which itself waits for this one.
        if self._rounds[key] is ended:
            if before is not None and not before.answer.done():
                self._rounds[key] = before  # stopped while it waited for its turn
            else:
                del self._rounds[key]


class Session:
    """State of one mount, touched on its loop only.

    Args:
        files: The store's files.
        place: Place of random writes.
    """

    def __init__(self, files: StripedFiles, place: SpoolPlace) -> None:
        self.files = files
        self.place = place
        self.inodes = InodeTable()
        self.handles = HandleTable()
        self.attributes = AttributeCache()
        self.rounds = FreshSingleFlight()
        """Rounds by path: the file that is there. Rounds by node: the version that an open shows."""
        self.leaving = LeavingPaths()
        self.owner = (os.getuid(), os.getgid())
        self.inline = InlineCalls(answers_at_once=files.store.answers_at_once)
        self.kernel: Kernel | None = None
        self.statistics = Statistics(files)
        self._pool = CallPool(_CALLS_WAITING, "fusefs-call")

    def close(self) -> list[str]:
        """Publish files that are still open and end the threads; call it when no request is under way.

        Returns:
            Paths of files that could not be published.
        """
        # Nobody waits for calls that have not begun, and there may be hundreds of them if the store hangs.
        self._pool.shutdown(wait=False, cancel_futures=True)
        bodies = [handle.body for handle in self.handles.files.values()]
        lost = flush_all(bodies, within_s=_LAST_PUBLISH_S)
        self._pool.shutdown()
        return lost

    async def wait(
        self,
        call: Callable[Arguments, Result],
        *arguments: Arguments.args,
        **named: Arguments.kwargs,
    ) -> Result:
        """Run a call that may wait for the store in a thread."""
        return await in_thread(self._pool, call, *arguments, **named)

    async def info(self, path: str) -> FileInfo:
        """Describe a path from an answer younger than ``TTL_S``, else from the store."""
        if (known := self.attributes.known(path)) is not None:
            return known
        return await self.rounds.call(path, partial(self._ask_info, path))

    def place_for(self, parent_inode: int, name: bytes) -> tuple[Node, str]:
        """Return directory and name of an entry to be changed; the mount's own entries are refused."""
        if parent_inode in {STATS_INODE, STATS_DIRECTORY_INODE} or (
            parent_inode == ROOT and name == RESERVED.encode()
        ):
            raise PermissionError(errno.EPERM, f"{RESERVED} belongs to the store")
        return self.inodes.node(parent_inode), checked_name(name)

    def changeable(self, inode: int) -> Node:
        """Return an inode whose attributes are to be changed; the mount's own inodes are refused."""
        if inode in {STATS_INODE, STATS_DIRECTORY_INODE}:
            raise PermissionError(errno.EPERM, "the store's own files do not change")
        return self.inodes.node(inode)

    def file_changed(self, node: Node, path: str) -> None:
        """Forget the cached attributes of a file, also in listings that are being read."""
        self.attributes.forget(path)
        node.changed_at = self.attributes.num_changes

    def passes_through(self, node: Node) -> bool:
        """Return whether the kernel reads a node from its local copy now."""
        return self.kernel is not None and self.kernel.passes_through(node.number)

    async def _ask_info(self, path: str) -> FileInfo:
        # The answer of the previous round serves all requests that come now, including requests that asked a moment
        # ago. The store is asked again only if nothing was there, or if the path changed here.
        if (known := self.attributes.known(path)) is not None:
            return known
        before = self.attributes.num_changes
        info = self._info_inline(path)
        if info is None:
            info = await self.wait(self.files.stat, path)
        if self.attributes.num_changes == before:
            self.attributes.remember(path, info)
        return info

    def _info_inline(self, path: str) -> FileInfo | None:
        """Describe a path by a call on the loop; return None if a thread must make the call."""
        if self.inline.may_run:
            with suppress(UnavailableError):
                return self.inline.run(partial(self.files.stat, path))
        return None


def checked_name(name: bytes) -> str:
    """Return a name as text.

    Raises:
        OSError: ``ENAMETOOLONG``.
    """
    if len(name) > MAX_NAME_BYTES:
        raise OSError(errno.ENAMETOOLONG, f"a name has at most {MAX_NAME_BYTES} bytes")
    return os.fsdecode(name)


def stale() -> OSError:
    """Return the error that makes the kernel look a name up again."""
    return OSError(errno.ESTALE, "another inode has this name now, or none")

"""The loop of one mount: takes requests from /dev/fuse, runs their handlers, writes the replies.

One thread runs all handlers. A handler that does not wait is answered at once: one ``poll``, one
``readv``, one ``writev`` of the memory that holds its bytes. A handler that waits is put aside with
its future; the thread that finishes the future wakes the loop through an eventfd.

When a caller is being killed while its request waits, the kernel sends INTERRUPT. The request is then
answered with EINTR at once, and the later result of its handler is dropped. This is done only for
requests that change nothing, and only for callers that will die, because programs seldom expect
EINTR from a read.

Writing a large reply is a copy by the kernel, which does not need the interpreter. While the only
reader waits for the reply there is nothing else to do, so the loop writes it itself. When another
request already waits, a thread makes the copy and the loop continues. With two readers and
two cores, this reads 1.4 to 2.6 times as much (1 MiB, from memory); a single reader reads as much as before.
"""

import errno
import os
import queue
import select
import threading
import time
from collections import deque
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fusefs.bridge.api.errno_answers import errno_answered
from fusefs.bridge.api.protocol import Data, FileSystem
from fusefs.bridge.device.requests import Answering, Requests
from fusefs.bridge.device.wire import ENTRY_BYTES, IN_HEADER, OUT_HEADER, Opcode, batch_forgets
from fusefs.bridge.process.poller import Poller
from omniload.base.linux.cores import cores_here
from omniload.base.log import get_logger

__all__ = ["REQUEST_BYTES", "Loop", "Replies"]

_LOG = get_logger(__name__)
_LARGE_BYTES = 128 << 10
"""Size from which the copy takes longer than passing it to a thread."""
_Reply = tuple[int, Data]
_HEADER = IN_HEADER.size
REQUEST_BYTES = (1 << 20) + 4096
"""Size of the largest request that this binding agrees to: the data of a write, and its headers."""
_LET_GO = frozenset(
    {
        Opcode.LOOKUP,
        Opcode.GETATTR,
        Opcode.READLINK,
        Opcode.READ,
        Opcode.STATFS,
        Opcode.GETXATTR,
        Opcode.LISTXATTR,
    }
)
_LOOK_AGAIN_MS = 500
_MOST_COPIES = 4
_SIGKILL_BIT = 1 << 8


class Replies:
    """Writes the replies of one connection. Used by its loop only.

    Args:
        device: /dev/fuse.
        num_threads: Threads that write replies in addition to the loop; they start when first needed.
    """

    def __init__(self, device: int, num_threads: int) -> None:
        self._device = device
        self._num_threads = num_threads
        self._requests = select.poll()
        self._requests.register(device, select.POLLIN)
        self._aside: queue.SimpleQueue[_Reply | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._written = threading.Condition()
        self._left = 0

    def write(self, unique: int, number: int, data: Data = b"") -> None:
        """Answer a request.

        Args:
            unique: Number of the request.
            number: Errno, or 0.
            data: Body of the reply; must not change before it is written.
        """
        size = 0 if number else len(data)
        # Use a thread only if another request waits: otherwise there is nothing else to do, and a thread costs time.
        if size >= _LARGE_BYTES and self._num_threads and self._requests.poll(0):
            self._write_aside(unique, data)
        elif size:
            self._write((OUT_HEADER.pack(16 + size, 0, unique), data), unique)
        else:
            self._write((OUT_HEADER.pack(16, -number, unique),), unique)

    def finish(self, within_s: float) -> bool:
        """Wait until every reply is sent; return whether all were sent in time."""
        until = time.monotonic() + within_s
        with self._written:
            while self._left and (left_s := until - time.monotonic()) > 0:
                self._written.wait(left_s)
            return not self._left

    def close(self) -> None:
        """End the threads; when this returns, their replies are written or refused."""
        for _ in self._threads:
            self._aside.put(None)
        for thread in self._threads:
            thread.join()
        self._threads.clear()

    def _write_aside(self, unique: int, data: Data) -> None:
        if len(self._threads) < self._num_threads:
            thread = threading.Thread(target=self._write_all, name="bridge-reply", daemon=True)
            try:
                thread.start()
            except RuntimeError as error:
                # The system refuses another thread. The mount must not end for this; existing threads may take the
                # reply.
                _LOG.debug("no further thread writes replies: %s", error)
            else:
                self._threads.append(thread)
        if not self._threads:
            self._write((OUT_HEADER.pack(16 + len(data), 0, unique), data), unique)
            return
        with self._written:
            self._left += 1
        self._aside.put((unique, data))

    def _write_all(self) -> None:
        while (reply := self._aside.get()) is not None:
            unique, data = reply
            try:
                self._write((OUT_HEADER.pack(16 + len(data), 0, unique), data), unique)
            finally:
                with self._written:
                    self._left -= 1
                    self._written.notify_all()
            del reply, data  # the cache may free the block in the meantime

    def _write(self, parts: tuple[Data, ...], unique: int) -> None:
        try:
            os.writev(self._device, parts)
        except OSError as error:
            # ENOENT, ENODEV: the caller no longer waits for the reply, or the mount is gone.
            if error.errno not in {errno.ENOENT, errno.ENODEV}:
                _LOG.error("a reply of %s bytes was refused: %s", sum(map(len, parts)), error)
                self._refuse(unique)

    def _refuse(self, unique: int) -> None:
        """Answer EIO in place of a reply that the kernel refuses, because its caller must not wait for ever."""
        try:
            os.writev(self._device, (OUT_HEADER.pack(16, -errno.EIO, unique),))
        except OSError as error:
            _LOG.debug("nor was the error: %s", error)


@dataclass(slots=True, eq=False)
class _Task:
    """A request whose handler waits."""

    unique: int
    opcode: int
    pid: int
    handling: Answering
    is_released: bool = False
    """Whether the request was answered already; the handler's result is then dropped."""


class Loop:
    """Serves one connection until it ends.

    Args:
        device: /dev/fuse, mounted, with features agreed on; does not block.
        filesystem: File system that is told of forgotten inodes.
        requests: Handlers of all other requests.
        request_bytes: Size of the largest request that was agreed on; the kernel rejects a smaller buffer.
    """

    def __init__(
        self,
        device: int,
        filesystem: FileSystem,
        requests: Requests,
        request_bytes: int = REQUEST_BYTES,
    ) -> None:
        self.request_bytes = request_bytes
        self._device = device
        self._filesystem = filesystem
        self._requests = requests
        self._replies = Replies(device, min(_MOST_COPIES, cores_here()))
        self._tasks = _Tasks(self._replies, filesystem)
        self._poller = self._tasks.poller
        self.watch, self.unwatch = self._poller.watch, self._poller.unwatch
        self._buffer = bytearray(request_bytes)
        self._view = memoryview(self._buffer)
        self._ending = False
        self.connected = True
        """Whether the mount still exists; False after an unmount."""

    # From other threads and signal handlers

    def end(self) -> None:
        """Make ``run`` return."""
        self._ending = True
        self._poller.wake()

    # On the loop's thread

    def run(self) -> None:
        """Serve until unmounted or asked to end."""
        self.take_requests(on=True)
        while self.connected and not self._ending:
            # The kernel interrupts a request only at the first signal; a fatal signal that follows makes no event.
            self.once(_LOOK_AGAIN_MS if self._tasks.interrupted else None)

    def finish_tasks(self, within_s: float) -> bool:
        """Run without new requests until no handler waits; return whether all finished in time."""
        until = time.monotonic() + within_s
        while self._tasks.waiting and (left := until - time.monotonic()) > 0:
            self.once(min(left * 1000, _LOOK_AGAIN_MS))
        # A reply that a thread still copies counts as a request under way, too.
        return not self._tasks.waiting and self._replies.finish(max(0.0, until - time.monotonic()))

    def once(self, timeout_ms: float | None) -> None:
        """Wait at most ``timeout_ms`` milliseconds for events, and act on them."""
        self._poller.wait(timeout_ms)
        if self._tasks.interrupted:
            self._tasks.release_dying()

    def close(self) -> None:
        """Drop waiting requests. Their callers get an error once the connection is gone."""
        self._tasks.close()
        self._replies.close()

    def take_requests(self, *, on: bool) -> None:
        """Start or stop reading new requests; while stopped, requests stay in the kernel."""
        if on:
            self.watch(self._device, self._take)
        else:
            self.unwatch(self._device)

    def _take(self) -> None:
        """Read one request and answer it, or put it aside."""
        try:
            size = os.readv(self._device, [self._buffer])
        except OSError as error:
            if error.errno == errno.ENODEV:
                self.connected = False
            # ENOENT: the caller was interrupted before its request was read.
            elif error.errno not in {errno.ENOENT, errno.EAGAIN, errno.EINTR}:
                raise
            return
        _, opcode, unique, inode, _, _, pid, _, _ = IN_HEADER.unpack_from(self._buffer)
        body = self._view[_HEADER:size]
        handler = self._requests.of_opcode.get(opcode)
        if handler is not None:
            self._tasks.run(_Task(unique, opcode, pid, handler(inode, body)))
        elif opcode == Opcode.FORGET:
            _forget(self._filesystem, inode, int.from_bytes(body[:8], "little"))
        elif opcode == Opcode.BATCH_FORGET:
            for forgotten, lookups in batch_forgets(body):
                _forget(self._filesystem, forgotten, lookups)
        elif opcode == Opcode.INTERRUPT:
            self._tasks.interrupt(int.from_bytes(body[:8], "little"))
        else:
            self._replies.write(unique, 0 if opcode == Opcode.DESTROY else errno.ENOSYS)


class _Tasks:
    """Runs handlers, puts them aside while they wait, and answers when they end. Used on the loop's thread.

    Args:
        replies: Replies of the connection.
        filesystem: Is told to forget inodes that were found too late for the kernel.
    """

    def __init__(self, replies: Replies, filesystem: FileSystem) -> None:
        self._replies = replies
        self._filesystem = filesystem
        self.poller = Poller(self._resume)
        self.waiting: dict[int, _Task] = {}
        """Handlers that wait, by the number of their request."""
        self.interrupted: set[int] = set()
        """Numbers of waiting requests whose caller may be about to die."""
        self._ready: deque[_Task] = deque()

    def run(self, task: _Task) -> None:
        """Run a handler until it waits or ends."""
        try:
            future = task.handling.send(None)
        except StopIteration as stop:
            self._answer(task, 0, stop.value)
        # The outermost loop, because the mount must outlive a defect of ours.
        except Exception as error:  # noqa: BLE001
            self._answer(task, errno_answered(Opcode(task.opcode).name.lower(), error), b"")
        else:
            self.waiting[task.unique] = task
            self._wait(task, future)

    def interrupt(self, unique: int) -> None:
        """Note that the caller of a request got a signal."""
        task = self.waiting.get(unique)
        if task is not None and task.opcode in _LET_GO:
            self.interrupted.add(unique)

    def release_dying(self) -> None:
        """Answer EINTR to callers with a pending SIGKILL, which wait only for this answer before they die."""
        for unique in [u for u in self.interrupted if _is_dying(self.waiting[u].pid)]:
            self.interrupted.discard(unique)
            task = self.waiting[unique]
            task.is_released = True
            self._replies.write(unique, errno.EINTR)

    def close(self) -> None:
        """Drop waiting requests."""
        for task in self.waiting.values():
            task.handling.close()
        self.waiting.clear()
        self.poller.close()

    def _wait(self, task: _Task, future: "Future[Any]") -> None:
        def wake(_: object) -> None:
            self._ready.append(task)
            self.poller.wake()

        future.add_done_callback(wake)

    def _resume(self) -> None:
        while self._ready:
            task = self._ready.popleft()
            self.waiting.pop(task.unique, None)
            self.run(task)

    def _answer(self, task: _Task, number: int, data: Data) -> None:
        self.interrupted.discard(task.unique)
        if task.is_released:
            if task.opcode == Opcode.LOOKUP and not number:
                inode = int.from_bytes(data[:8], "little")
                _forget(self._filesystem, inode, 1)  # the kernel never got the inode
        else:
            self._replies.write(task.unique, number, data)


def _forget(filesystem: FileSystem, inode: int, lookups: int) -> None:
    try:
        filesystem.forget(inode, lookups)
    # The outermost loop, as above; a FORGET has no answer.
    except Exception as error:  # noqa: BLE001
        errno_answered("forget", error)


def _is_dying(thread: int) -> bool:
    """Return whether a thread is gone or has SIGKILL pending, which every fatal signal becomes."""
    if not thread:
        return False  # the thread is in another PID namespace, so nothing is known of it
    try:
        lines = Path(f"/proc/{thread}/status").read_text(encoding="utf-8").splitlines()
    except OSError:
        # The thread is gone, so nobody will take the answer.
        return True
    pending = [int(line.split()[1], 16) for line in lines if line.startswith(("SigPnd", "ShdPnd"))]
    return any(mask & _SIGKILL_BIT for mask in pending)


assert ENTRY_BYTES == 128, "an answer to LOOKUP begins with the inode"

"""Replies on their way to the kernel: in place, or beside each other where that pays.

Writing a large reply is a copy by the kernel, which needs no interpreter. While the only
reader waits for it there is nothing else to do, so it is done in place. When another
request waits already, the copy goes to a thread and the loop goes on: with two readers and
two cores that reads 1.4 to 2.6 times as much (1 MiB, from memory), and one reader as much as before.
"""

import errno
import os
import queue
import select
import threading
import time

from fusefs.bridge.api.protocol import Data
from fusefs.bridge.device.wire import OUT_HEADER
from omniload.base.log import get_logger

__all__ = ["Replies"]

_LOG = get_logger(__name__)
_LARGE_BYTES = 128 << 10
"""From here on the copy takes longer than handing it over."""
_Reply = tuple[int, Data]


class Replies:
    """Writes the replies of one connection. Used by its loop only.

    Args:
        device: /dev/fuse.
        num_threads: Copies beside the loop's own; threads start when first needed.
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
            unique: Names the request.
            number: Errno, or 0.
            data: Body of the reply; not changed before it is written.
        """
        size = 0 if number else len(data)
        if size >= _LARGE_BYTES and self._num_threads and self._requests.poll(0):
            self._write_aside(unique, data)
        elif size:
            self._write((OUT_HEADER.pack(16 + size, 0, unique), data), unique)
        else:
            self._write((OUT_HEADER.pack(16, -number, unique),), unique)

    def finish(self, within_s: float) -> bool:
        """Wait until every reply is out; return whether it came to that."""
        until = time.monotonic() + within_s
        with self._written:
            while self._left and (left_s := until - time.monotonic()) > 0:
                self._written.wait(left_s)
            return not self._left

    def close(self) -> None:
        """End the threads; what they had is written or refused when this returns."""
        for _ in self._threads:
            self._aside.put(None)
        for thread in self._threads:
            thread.join()
        self._threads.clear()

    def _write_aside(self, unique: int, data: Data) -> None:
        if len(self._threads) < self._num_threads:
            thread = threading.Thread(target=self._write_all, name="bridge-reply", daemon=True)
            self._threads.append(thread)
            thread.start()
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
            del reply, data  # a block of the cache may go meanwhile

    def _write(self, parts: tuple[Data, ...], unique: int) -> None:
        try:
            os.writev(self._device, parts)
        except OSError as error:
            # ENOENT, ENODEV: nobody waits for it any more, or the mount is gone.
            if error.errno not in {errno.ENOENT, errno.ENODEV}:
                _LOG.error("a reply of %s bytes was refused: %s", sum(map(len, parts)), error)
                self._refuse(unique)

    def _refuse(self, unique: int) -> None:
        """Answer EIO in place of a reply the kernel does not take: its caller must not wait for ever."""
        try:
            os.writev(self._device, (OUT_HEADER.pack(16, -errno.EIO, unique),))
        except OSError as error:
            _LOG.debug("nor was the error: %s", error)

"""How a worker's messages reach the trainer: written by the worker itself, not by a thread of its own.

A short message is in the pipe before the next batch is begun, so a worker that stops has stopped
at the first batch that did not come. It also saves a change of threads for every batch.
"""

import contextlib
import fcntl
import threading
from collections.abc import Callable
from multiprocessing.queues import Queue
from multiprocessing.reduction import ForkingPickler
from typing import Any

from typing_extensions import override

__all__ = ["DirectContext", "DirectQueue"]

_DIRECT_BYTES = 4_096 - 4
"""A message that the kernel writes whole or not at all, with the length before it."""
_PIPE_BYTES = 1 << 20


class _Counted:
    """What a queue's thread writes with: counts the messages that it has not written yet."""

    def __init__(self, send_bytes: Callable[[Any], None]) -> None:
        self._send_bytes = send_bytes
        self._lock = threading.Lock()
        self.left = 0

    def expect(self) -> None:
        """Count one more."""
        with self._lock:
            self.left += 1

    def __call__(self, data: Any) -> None:
        """Write one."""
        self._send_bytes(data)
        with self._lock:
            self.left -= 1


class DirectQueue(Queue):  # type: ignore[type-arg]
    """A queue whose short messages are written where ``put`` is called.

    Longer ones go by the queue's own thread: a worker must not wait for a trainer that does not read. So do those
    that come behind them, until the thread has none: a worker's last message says that it has ended, and
    torch looks for none of its batches after it.
    """

    _wlock: Any
    _writer: Any
    _sem: Any
    _send_bytes: Any
    _counted: _Counted | None = None

    def widen(self) -> None:
        """Have the pipe hold the messages of many workers; where that is refused, it holds 64 KiB."""
        with contextlib.suppress(OSError):
            fcntl.fcntl(self._writer.fileno(), fcntl.F_SETPIPE_SZ, _PIPE_BYTES)

    @override
    def put(self, obj: Any, block: bool = True, timeout: float | None = None) -> None:
        data = ForkingPickler.dumps(obj)
        if len(data) > _DIRECT_BYTES or (self._counted is not None and self._counted.left):
            self._put_by_thread(obj, block, timeout)
            return
        self._sem.acquire()
        with self._wlock:
            self._writer.send_bytes(data)

    def _put_by_thread(self, obj: Any, block: bool, timeout: float | None) -> None:
        if self._counted is None:
            # In the worker, before the thread begins: it writes with what it finds here.
            self._send_bytes = self._counted = _Counted(self._send_bytes)
        self._counted.expect()
        super().put(obj, block, timeout)


class DirectContext:
    """A multiprocessing context as torch's iterator asks it: its first queue is that of the results."""

    def __init__(self, context: Any) -> None:
        """Stand for ``context``, or for a module that has its functions."""
        self._context = context
        self._asked = False

    def Queue(self) -> Any:  # noqa: N802 -- the context's own name
        """Return a direct queue, and then the context's own."""
        if self._asked:
            return self._context.Queue()
        self._asked = True
        made = DirectQueue(ctx=self._context.get_context())
        made.widen()
        return made

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)

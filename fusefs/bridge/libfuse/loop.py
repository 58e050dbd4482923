"""The loop of one libfuse mount: runs pyfuse3's tasks in place of trio.

pyfuse3 finds trio through the name ``trio`` of its own module, which its asyncio layer replaces, too.
``Loop.as_trio`` puts this loop under that name. A request then costs one ``poll`` and one step of a coroutine; a
scheduler for arbitrary tasks needs two turns of its own and five calls of the kernel::

    poll --readable--> the reader reads, and runs its handler --answered--> it waits to read again
                                   |
                                   +--the handler waits for a future--> another worker is the reader

libfuse reads a descriptor that blocks, in the step in which its wait returns. So the reader's wait returns only
after ``poll``. While requests should stay in the kernel, the descriptor is not watched.
"""

import time
from collections import deque
from collections.abc import Callable, Coroutine, Generator
from enum import Enum, auto
from functools import partial
from types import SimpleNamespace
from typing import Any, Self

from fusefs.bridge.process.poller import Poller

__all__ = ["Loop"]

_LOOK_AGAIN_MS = 500
Task = Coroutine[Any, None, None]


class _For(Enum):
    """The reason that a task waits, if it does not wait for a future."""

    REQUEST = auto()
    TURN = auto()
    """The task waits to become the reader."""


class _ClosedResourceError(Exception):
    """Ends the loop of requests."""


class _Wait:
    __slots__ = ("_what",)

    def __init__(self, what: "_For | _Nursery") -> None:
        self._what = what

    def __await__(self) -> "Generator[_For | _Nursery, None, None]":
        yield self._what


class Loop:
    """Runs tasks that wait for requests or for futures. All calls but ``end`` are made on one thread.

    Args:
        terminate: Ends libfuse's session, and calls ``notify_closing``; called after ``end``.
        in_use: Returns the loop that stands in place of trio now. pyfuse3 makes one lock for the process, so the
            lock of the first mount must find the loop of a later mount.
    """

    def __init__(self, terminate: Callable[[], None], in_use: "Callable[[], Loop]") -> None:
        self._terminate = terminate
        self._poller = Poller(self._woken)
        self.watch, self.unwatch = self._poller.watch, self._poller.unwatch
        self._ready: deque[Task] = deque()
        self.reader = _Reader(self._poller, self._ready, self._step)
        self.take_requests = self.reader.take_requests
        self._nursery_of: dict[Task, _Nursery | None] = {}
        """Nursery of each task."""
        self._waiting: set[Task] = set()
        """Tasks that wait for futures: their requests are under way."""
        self._is_ending = False
        self.as_trio = SimpleNamespace(
            ClosedResourceError=_ClosedResourceError,
            Lock=partial(_Turn, in_use),
            open_nursery=partial(_Nursery, self),
            lowlevel=SimpleNamespace(
                current_task=partial(SimpleNamespace, name="pyfuse3"),
                current_trio_token=lambda: self,
                notify_closing=self.reader.notify_closing,
                wait_readable=self.reader.wait_readable,
            ),
        )
        """The calls that pyfuse3 makes to trio."""

    # From other threads and signal handlers

    def end(self) -> None:
        """End libfuse's session; pyfuse3's ``main`` ends when all requests are answered."""
        self._is_ending = True
        self._poller.wake()

    # On the loop's thread

    def run(self, main: Task) -> None:
        """Run until the started task ``main`` has ended; other tasks stay unfinished.

        Raises:
            Exception: The exception of a task.
        """
        self._run_ready()
        while main in self._nursery_of:
            self.once(None)

    def start(self, task: Task, nursery: "_Nursery | None" = None) -> None:
        """Start a task, in a nursery that waits for it or in none; ``run`` executes it."""
        self._nursery_of[task] = nursery
        self._ready.append(task)

    def once(self, timeout_ms: float | None) -> None:
        """Wait at most ``timeout_ms`` milliseconds for events, and act on them."""
        self._poller.wait(timeout_ms)
        self._run_ready()

    def finish_tasks(self, within_s: float) -> bool:
        """Run until no request is under way; return whether all finished in time."""
        until = time.monotonic() + within_s
        while self._waiting and (left_s := until - time.monotonic()) > 0:
            self.once(min(left_s * 1000, _LOOK_AGAIN_MS))
        return not self._waiting

    def close(self) -> None:
        """Drop waiting tasks."""
        tasks, self._nursery_of = self._nursery_of, {}
        for task in tasks:
            task.close()
        self._poller.close()

    # Inside

    def _run_ready(self) -> None:
        while (task := self._ready.popleft() if self._ready else self.reader.next()) is not None:
            self._step(task)
        self.reader.watch()

    def _step(self, task: Task) -> None:
        self._waiting.discard(task)
        try:
            awaited = task.send(None)
        except StopIteration:
            nursery = self._nursery_of.pop(task)
            if nursery is not None and (joining := nursery.left()) is not None:
                self._ready.append(joining)
            return
        if isinstance(awaited, _For):
            self.reader.wait(task, awaited)
        elif isinstance(awaited, _Nursery):
            awaited.joining = task
        else:

            def wake(_: object) -> None:
                self._ready.append(task)
                self._poller.wake()

            self._waiting.add(task)
            awaited.add_done_callback(wake)

    def _woken(self) -> None:
        if self._is_ending:
            self._terminate()


class _Reader:
    """The task that reads the next request, the tasks that wait for their turn to read, and the descriptor they read.

    Args:
        poller: Poller of the loop.
        ready: Tasks that are ready to continue.
        step: Continues a task at once.
    """

    def __init__(self, poller: Poller, ready: deque[Task], step: Callable[[Task], None]) -> None:
        self._poller = poller
        self._ready = ready
        self._step = step
        self.device: int | None = None
        """Descriptor of /dev/fuse, once pyfuse3 has waited for it; libfuse closes it."""
        self.is_there = False
        """Whether some task has the turn; other tasks then wait for it."""
        self._task: Task | None = None
        self._turns: deque[Task] = deque()
        self._takes = True
        self._is_watched = self._is_closing = False

    def wait(self, task: Task, what: _For) -> None:
        """Put a task aside that waits for a request, or for its turn to read one."""
        if what is _For.REQUEST:
            self._task = task
        else:
            self._turns.append(task)

    def next(self) -> Task | None:
        """Return the task whose turn it is, if there is such a task and the turn is free."""
        return self._turns.popleft() if self._turns and not self.is_there else None

    def take_requests(self, *, on: bool) -> None:
        """Start or stop reading new requests; while stopped, requests stay in the kernel."""
        self._takes = on
        self.watch()

    def watch(self) -> None:
        """Watch for requests while there is a task to read them."""
        wanted = self._takes and self._task is not None
        if self.device is not None and wanted != self._is_watched:
            self._is_watched = wanted
            if wanted:
                self._poller.watch(self.device, self._readable)
            else:
                self._poller.unwatch(self.device)

    def _readable(self) -> None:
        if (reader := self._task) is not None:
            self._task = None
            self._step(reader)

    # Calls of pyfuse3

    async def wait_readable(self, device: int) -> None:
        """Wait for a request; called by the task that has the turn."""
        self.device = device
        # A worker that arrives after the end would wait for a request that no task reads any more.
        if not self._is_closing:
            await _Wait(_For.REQUEST)
        if self._is_closing:
            raise _ClosedResourceError

    def notify_closing(self, _: int) -> None:
        """Release the task that waits for a request, and all tasks that will wait for one."""
        self._is_closing = True
        if self._task is not None:
            self._ready.append(self._task)
            self._task = None


class _Turn:
    """The lock that makes one worker at a time the reader. A free turn goes to the next task that asks."""

    def __init__(self, in_use: Callable[[], Loop]) -> None:
        self._in_use = in_use

    async def __aenter__(self) -> None:
        reader = self._in_use().reader
        # Check again in a loop: before this task runs its step, another task may have taken the turn.
        while reader.is_there:
            await _Wait(_For.TURN)
        reader.is_there = True

    async def __aexit__(self, *_: object) -> None:
        self._in_use().reader.is_there = False


class _Nursery:
    """The nursery in which pyfuse3 starts its workers; it ends with the last of them, whatever else the loop runs."""

    def __init__(self, loop: Loop) -> None:
        self._loop = loop
        self.num_tasks = 0
        self.joining: Task | None = None
        """Task that waits for the end of the workers."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        if self.num_tasks:
            await _Wait(self)

    def left(self) -> Task | None:
        """Note that a task ended; after the last one, return the task that waits for the end."""
        self.num_tasks -= 1
        return self.joining if not self.num_tasks else None

    def start_soon(self, run: Callable[..., Task], *arguments: object, name: str) -> None:
        del name
        self.num_tasks += 1
        self._loop.start(run(*arguments), self)

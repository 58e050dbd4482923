"""Time limits for calls of a store, and for calls of its client that take longer.

A client that hangs (in a socket, in Java) cannot be stopped from outside. So its calls are made in
threads of their own (``Callers``), and the thread is abandoned at the end of the time: the caller gets
``UnavailableError``, and a late result of the client is dropped. Only single calls of a client are
abandoned. A store call that makes several of them continues in the thread of its caller, and ends there.
An abandoned call may still take effect, just like a request whose answer was lost.
"""

import contextvars
import itertools
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from queue import Empty, SimpleQueue
from typing import Any, Generic, TypeVar, cast

from typing_extensions import override

from omniload.base.clock import Deadline
from omniload.base.errors import UnavailableError
from omniload.base.log import get_logger

__all__ = [
    "GIVE_UP_AFTER_S",
    "LEAST_BYTES_S",
    "Callers",
    "allowing",
    "hanging_calls",
    "left_s",
    "renew",
    "request_limit_s",
    "waiting_for_others",
    "within",
]

_LOG = get_logger(__name__)
Result = TypeVar("Result")

GIVE_UP_AFTER_S = 30.0
"""Limit of a call, unless the user sets another."""
LEAST_BYTES_S = 1 << 20
"""Bytes per second that a client must at least move in calls that move data by themselves: a copy, an upload."""
MOST_ABANDONED = 32
"""Most hanging calls of one client; at this number no further call is begun."""
_LOOK_EVERY_S = 1.0
_GIVEN_UP_WITHIN_S = 2.0
# Seconds that an idle thread waits for the next call, because starting a thread costs more than many calls take.
_IDLE_S = 60.0


_current: contextvars.ContextVar[Deadline | None] = contextvars.ContextVar("deadline", default=None)


def left_s() -> float | None:
    """Return the seconds that are left to the current call; None if it has no limit."""
    deadline = _current.get()
    return None if deadline is None else deadline.left_s()


@contextmanager
def within(limit_s: float) -> Iterator[Deadline]:
    """Limit all calls of stores inside the block to ``limit_s`` seconds together; an outer limit stays in force."""
    # The outer limit stays: a nested call must not begin the time anew.
    if (outer := _current.get()) is not None:
        yield outer
        return
    deadline = Deadline(limit_s)
    token = _current.set(deadline)
    try:
        yield deadline
    finally:
        _current.reset(token)


def renew() -> None:
    """Begin the limit anew, because the store answered one of many calls."""
    if (deadline := _current.get()) is not None:
        deadline.renew()


@contextmanager
def allowing(size_bytes: int) -> Iterator[None]:
    """Give the client more time inside the block: it moves ``size_bytes`` itself, and limits its own requests."""
    deadline = _current.get()
    more_s = size_bytes / LEAST_BYTES_S
    if deadline is not None:
        deadline.until += more_s
    try:
        yield
    finally:
        if deadline is not None:
            deadline.until -= more_s


@contextmanager
def waiting_for_others() -> Iterator[None]:
    """Stop the time inside the block, for a wait that has a limit of its own."""
    deadline = _current.get()
    token = _current.set(None)
    if deadline is not None:
        # Change the deadline itself, so that the time also stands still for other holders of it.
        deadline.until = float("inf")
    try:
        yield
    finally:
        _current.reset(token)
        renew()


def request_limit_s(give_up_after_s: float) -> float:
    """Return the seconds that a client may wait for one request, so that a call has time for another attempt."""
    return max(1.0, give_up_after_s / 3)


class _Call(Generic[Result]):
    """One call of a client, in any thread."""

    def __init__(self, name: str, path: str, call: Callable[[], Result]) -> None:
        self.name, self.path = name, path
        self.begun_s = time.monotonic()
        self.ended = threading.Event()
        self.dropped: Callable[[Result], object] | None = None
        """Called with the result of an abandoned call; None until the call is abandoned."""
        self._call = call
        self._context = contextvars.copy_context()
        self._result: Result | None = None
        self._error: BaseException | None = None

    def run(self) -> None:
        """Make the call."""
        try:
            self._result = self._context.run(self._call)
        except BaseException as error:  # noqa: BLE001 -- handed to the caller, whatever it is
            self._error = error

    def result(self) -> Result:
        """Return the call's result, or raise its exception."""
        if self._error is not None:
            raise self._error
        return cast("Result", self._result)

    def drop(self) -> None:
        """Drop the result of a call that nobody waits for any more."""
        if self._error is None and self.dropped is not None:
            with suppress(Exception):
                self.dropped(cast("Result", self._result))


_ALL: "weakref.WeakSet[Callers]" = weakref.WeakSet()


def hanging_calls() -> list[str]:
    """Return the hanging calls of this process, one line each; the process cannot wait for them at its end."""
    return [line for callers in list(_ALL) for line in callers.hanging()]


class Callers:
    """Threads that make the calls of one client. Safe in threads.

    A call without a limit (``within``) is made in the thread of the caller.

    Args:
        client: Name of the client, for messages.
    """

    def __init__(self, client: str) -> None:
        self._client = client
        self._lock = threading.Lock()
        self._names = itertools.count()
        self._reset()
        self.total_abandoned = 0
        """Number of calls abandoned since the start."""
        _ALL.add(self)

    def _reset(self) -> None:
        self._process = os.getpid()
        self._idle: list[_Caller] = []
        self._abandoned: set[_Call[Any]] = set()

    def hanging(self) -> list[str]:
        """Return the calls that hang at this moment, one line each."""
        with self._lock:
            return [f"{self._client}: {call.name} of {call.path!r}" for call in self._abandoned]

    @property
    def num_abandoned(self) -> int:
        """Number of calls that hang at this moment, and that nobody waits for."""
        return len(self._abandoned)

    def call(
        self,
        name: str,
        path: str,
        call: Callable[[], Result],
        dropped: Callable[[Result], object] = lambda _: None,
    ) -> Result:
        """Make a call within the limit of the current deadline.

        Args:
            name: Name of the call, for messages.
            path: Path that the call is about.
            call: Makes the call.
            dropped: Called with the result if the call returns after it was abandoned.

        Raises:
            UnavailableError: The call did not return in time, or was not begun.
        """
        deadline = _current.get()
        if deadline is None:
            return call()
        if deadline.left_s() <= 0:
            raise UnavailableError(f"{path!r}: no time is left of {deadline.limit_s:g} s to {name}")
        begun = self._begin(_Call(name, path, call))
        # Wait in short steps, because the call may ``renew`` its limit meanwhile, or stop the time.
        while not deadline.wait(begun.ended.wait, _LOOK_EVERY_S):
            # The call may have ended just now. Then take its result, because nobody else would.
            if deadline.left_s() <= 0 and self._abandon(begun, dropped):
                raise UnavailableError(
                    f"{path!r}: {self._client} did not answer {name} within {deadline.limit_s:g} s; "
                    "the call is abandoned; look after the store, or raise give_up_after if it is slow"
                )
        return begun.result()

    def give_up(self, name: str, path: str, call: Callable[[], object]) -> None:
        """Make a call whose outcome nobody needs, and wait for it only a moment. Never raises."""
        if _current.get() is None:
            call()
            return
        with suppress(UnavailableError):
            begun = self._begin(_Call(name, path, call))
            if not begun.ended.wait(_GIVEN_UP_WITHIN_S):
                self._abandon(begun, lambda _: None)

    def _begin(self, call: _Call[Result]) -> _Call[Result]:
        with self._lock:
            # a forked process, in which these threads do not exist
            if self._process != os.getpid():
                self._reset()
            # Each hanging call holds a thread and a connection; a store that hangs must not use up either.
            if len(self._abandoned) >= MOST_ABANDONED:
                oldest = min(self._abandoned, key=lambda hung: hung.begun_s)
                raise UnavailableError(
                    f"{call.path!r}: {len(self._abandoned)} calls of {self._client} hang, the oldest, "
                    f"{oldest.name} of {oldest.path!r}, for {time.monotonic() - oldest.begun_s:.0f} s; "
                    "look after the store"
                )
            caller = self._idle.pop() if self._idle else _Caller(self, next(self._names))
        try:
            caller.take(call)
        except RuntimeError as error:
            # Python's error for a system limit, below which other processes may soon leave room.
            raise UnavailableError(
                f"{call.path!r}: no thread is left to {call.name} in: {error}; raise the limit of "
                "processes (ulimit -u, or pids.max of the container)"
            ) from error
        return call

    def _abandon(self, call: _Call[Result], dropped: Callable[[Result], object]) -> bool:
        with self._lock:
            if call.ended.is_set():
                return False
            call.dropped = dropped
            self._abandoned.add(call)
            self.total_abandoned += 1
            num_abandoned = len(self._abandoned)
        _LOG.warning(
            "%s: %s of %r has hung for %.1f s and is abandoned; %d such calls now",
            self._client,
            call.name,
            call.path,
            time.monotonic() - call.begun_s,
            num_abandoned,
        )
        return True

    def end(self, call: _Call[Any], caller: "_Caller") -> None:
        """Note that a call returned, and keep its thread for the next one."""
        with self._lock:
            # Under the lock of ``_abandon``: either that call sees this one ended, or this one sees itself abandoned.
            was_abandoned = call in self._abandoned
            self._abandoned.discard(call)
            call.ended.set()
        if was_abandoned:
            took_s = time.monotonic() - call.begun_s
            _LOG.info(
                "%s: %s of %r returned after %.1f s", self._client, call.name, call.path, took_s
            )
            # Drop it here and not when it was abandoned, because the client returns its result only now.
            call.drop()
        with self._lock:
            self._idle.append(caller)

    def retire(self, caller: "_Caller") -> bool:
        """Release a thread that was idle for long; return False if it has just been given a call."""
        with self._lock:
            if caller not in self._idle:
                return False
            self._idle.remove(caller)
            return True


class _Caller(threading.Thread):
    """Makes one call after the other; the process may end without it."""

    def __init__(self, callers: Callers, number: int) -> None:
        # A daemon thread, because it cannot be stopped, and the process must be able to end.
        super().__init__(name=f"fusefs-client-{number}", daemon=True)
        self._callers = callers
        self._calls: SimpleQueue[_Call[Any]] = SimpleQueue()

    def take(self, call: _Call[Any]) -> None:
        """Make a call."""
        self._calls.put(call)
        if self.ident is None:
            self.start()

    @override
    def run(self) -> None:
        while True:
            try:
                call = self._calls.get(timeout=_IDLE_S)
            except Empty:
                if self._callers.retire(self):
                    return
                continue
            call.run()
            self._callers.end(call, self)
            del call

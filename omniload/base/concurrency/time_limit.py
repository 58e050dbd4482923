"""Time limits for calls that may never return, such as those of stores, whose clients wait on their own."""

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import Self, TypeVar

from omniload.base.concurrency.threads import DaemonPool
from omniload.base.errors import UnavailableError
from omniload.base.log import get_logger

__all__ = ["LimitedCalls", "call_within"]

Answer = TypeVar("Answer")

_TOLD_EVERY_S = 10.0
_LOOK_S = 1.0
"""Interval of waits in native code, which cannot be interrupted."""
_LEAVE_S = 5.0
_LOG = get_logger(__name__)


def call_within(limit_s: float, call: Callable[[], Answer], *, what: str) -> Answer:
    """Return the result of ``call``, if it returns within the limit.

    The call runs in its own thread, which is abandoned if the limit passes, because no client of a store can be made
    to end a call. A line is logged every ten seconds.

    Args:
        limit_s: Longest wait in seconds.
        call: Function that may not return.
        what: Whom the call asks for what, for messages.

    Raises:
        UnavailableError: The limit passed.
        BaseException: The exception of ``call``.
    """
    with LimitedCalls(f"omniload-within-{what[:40]}") as calls:
        return calls.call(limit_s, call, what=what)


class LimitedCalls:
    """Many short calls with a limit each; a thread whose call has ended carries out the next one.

    Any thread may call. There are as many background threads as simultaneous calls.
    """

    def __init__(self, name: str) -> None:
        """Start no thread yet; ``name`` is the name of the threads."""
        self._name = name
        self._idle: deque[DaemonPool] = deque()

    def call(self, limit_s: float, call: Callable[[], Answer], *, what: str) -> Answer:
        """Return the result of ``call``, like ``call_within``."""
        try:
            # The thread that became idle last. A deque pops atomically, so no lock is needed here.
            pool = self._idle.pop()
        except IndexError:
            pool = DaemonPool(1, self._name)
        answer = pool.submit(call)
        try:
            return _answered(answer, limit_s, what)
        finally:
            if answer.done():
                self._idle.append(pool)
            else:
                pool.close(0.0)  # its thread ends when the call does

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        while self._idle:
            self._idle.pop().close(_LEAVE_S)


def _answered(answer: "Future[Answer]", limit_s: float, what: str) -> Answer:
    waited_s, told_s = 0.0, _TOLD_EVERY_S
    while True:
        patience_s = min(_LOOK_S, told_s - waited_s, limit_s - waited_s)
        try:
            return answer.result(timeout=patience_s)
        except FutureTimeoutError:
            # The call itself raised a timeout, or ended just after the wait; in both cases it has answered.
            if answer.done():
                return answer.result()
        waited_s += patience_s
        if waited_s >= limit_s:
            raise UnavailableError(
                f"{what}: no answer within {limit_s:g} s; see whether the store can be reached from here"
            )
        if waited_s >= told_s:
            told_s += _TOLD_EVERY_S
            _LOG.info("%s: no answer for %.0f s, given up after %g s", what, waited_s, limit_s)

"""Signals that wait while an interruption would do damage.

Ctrl-C raises ``KeyboardInterrupt`` between any two instructions of the main thread. It may come between taking a lock
and the ``try`` that releases it, inside ``threading``, or below a library that turns it into another error. It then
leaves locks held and processes behind, or it is lost. Inside ``SignalsHeld`` it is raised only where nothing is half
done: where a wait calls ``let_signals_in``, or at the end.
"""

import _signal  # type: ignore[import-not-found]
import _thread
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Self

__all__ = ["SignalsHeld", "let_signals_in", "longest_turn_s"]

# Entered for each batch: ``signal`` wraps ``_signal`` to name handlers, and that takes eight times as long.
_NUMBERS = (int(signal.SIGTERM), int(signal.SIGINT))
_LONGEST_S = 3.0
"""Longest time that a signal waits; then it is answered wherever the main thread is, such as in a read that hangs."""
_PID = os.getpid()
"""The process that loaded this module, whose handlers are known."""
_TURN_S = 0.2
"""Interval at which waits let signals in while they are held."""


class _State:
    """The state of the held signals; only of the main thread, which has the handlers of a process."""

    def __init__(self) -> None:
        self._depth, self._ending, self._count = 0, 0, 0
        self._answers: dict[int, Callable[[int, FrameType | None], object]] = {}
        self._came: list[int] = []
        self._is_late = False

    def enter(self, *, to_the_end: bool) -> None:
        self._depth += 1
        if to_the_end and not self._ending:
            self._ending = self._depth
        if self._depth > 1:
            return
        self._count += 1
        self._came.clear()
        for number in _NUMBERS:
            answer = _signal.getsignal(number)
            if callable(answer) and answer != self._note:
                self._answers[number] = answer
                _signal.signal(number, self._note)

    def leave(self) -> None:
        is_ending = bool(self._ending)
        self._depth -= 1
        if self._depth < self._ending:
            self._ending = 0
        if self._depth:
            return
        # A handler left in place, as after an error in the other's answer, passes on what comes.
        for number in _NUMBERS:
            if _signal.getsignal(number) == self._note:
                _signal.signal(number, self._answers[number])
        if self._came:
            # A second Ctrl-C is dropped: everything open is being closed for the first one, which says all there is to
            # say. At the end of the process Python would print that it ignores the exception.
            is_over = not threading.main_thread().is_alive()
            if is_ending and (is_over or isinstance(sys.exc_info()[1], KeyboardInterrupt)):
                self._came = [number for number in self._came if number != signal.SIGINT]
            self._answer()

    @property
    def is_held(self) -> bool:
        return self._depth > 0 and _is_main()

    def let_in(self) -> None:
        if self._came and not self._ending and _is_main():
            self._answer()

    def _note(self, number: int, frame: FrameType | None) -> None:
        if not self._depth or not _is_main():
            self._answers[number](number, frame)
        elif self._is_late:
            self._answer()
        elif number not in self._came:
            self._came.append(number)
            if len(self._came) == 1:
                # Not ``Thread``, because the main thread may be inside the locks of that module.
                _thread.start_new_thread(self._remind, (self._count,))

    def _answer(self) -> None:
        self._is_late = False
        while self._came:
            number = self._came.pop(0)
            try:
                self._answers[number](number, None)
            except BaseException as error:
                # Everything open is being closed for this signal, so the next one waits until that is done.
                self._ending = min(1, self._depth)
                # Without a context, even if another error is being handled, such as that of a role that the same
                # Ctrl-C ended.
                raise error from None

    def _remind(self, count: int) -> None:
        time.sleep(_LONGEST_S)
        while self._came and self._count == count:
            self._is_late, came = True, self._came[:1]
            for number in came:
                signal.pthread_kill(threading.main_thread().ident or 0, number)
            time.sleep(_LONGEST_S)


_STATE = _State()


def _is_main() -> bool:
    # A forked process may have handlers that Python does not know, such as that of a torch worker for SIGTERM.
    # Restoring the handlers here would put back those of its parent, and nobody could end the process.
    return os.getpid() == _PID and threading.current_thread() is threading.main_thread()


class SignalsHeld:
    """Makes SIGINT and SIGTERM wait inside, if Python handles them and this is the main thread.

    Args:
        to_the_end: For code that closes: no wait inside lets the signals in, and Ctrl-C is ignored if
            ``KeyboardInterrupt`` has already been raised.
    """

    def __init__(self, *, to_the_end: bool = False) -> None:
        self._to_the_end, self._holds = to_the_end, _is_main()

    def __enter__(self) -> Self:
        if self._holds:
            try:
                _STATE.enter(to_the_end=self._to_the_end)
            except BaseException:  # a signal that came before it was held
                _STATE.leave()
                raise
        return self

    def __exit__(self, *_: object) -> None:
        if self._holds:
            _STATE.leave()


def let_signals_in() -> None:
    """Answer waiting signals, if any; to be called during waits, where an exception leaves nothing half done."""
    _STATE.let_in()


def longest_turn_s() -> float:
    """Return the longest time that a wait may last before it lets signals in."""
    return _TURN_S if _STATE.is_held else math.inf

"""Turns of threads that share one supply of batches."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import RLock
from typing import Generic, TypeVar

from typing_extensions import override

from omniload.base.clock import wait_of
from omniload.base.concurrency.held_signals import SignalsHeld
from omniload.base.errors import ConfigError, UnavailableError, shown_at_once

__all__ = ["EachBatch", "ask_in_turn"]

_LEAST_S = 0.001
"""Least time, in seconds, for a thread that gets its turn just as its timeout ends."""
T = TypeVar("T")


class EachBatch(Iterator[T], Generic[T]):
    """Iterates over batches up to ``None``, and then calls ``end`` with their number.

    Not a generator, because after an error a generator is over and would report the end of the data at the next call.
    Not ``iter`` with a sentinel either: if two threads share it, the thread that finds the end makes it drop the other
    thread's batch.
    """

    def __init__(
        self, following: Callable[[], T | None], end: Callable[[int], object] = lambda _: None
    ) -> None:
        self._following, self._end = following, end
        self._count, self._has_ended = 0, False

    @override
    def __next__(self) -> T:
        batch = None if self._has_ended else self._following()
        if batch is not None:
            self._count += 1
            return batch
        if not self._has_ended:
            self._has_ended = True
            self._end(self._count)
        raise StopIteration


def ask_in_turn(
    one_asks: RLock,
    timeout: float | None,
    ask: Callable[[float | None, list[Callable[[], None]]], T],
) -> T:
    """Ask for a batch while no other thread does; a batch that its caller does not receive stays the next one.

    Args:
        one_asks: Held while a thread asks.
        timeout: Longest wait in seconds, for the turn and the batch.
        ask: Receives the part of the timeout that is left after waiting for the turn, and a list for functions that
            take back the batch that it counts as handed out.

    Raises:
        ConfigError: Another thread is asking, and the timeout is not a valid time.
        UnavailableError: Another thread waited for its batch during the whole timeout.
    """
    take_back: list[Callable[[], None]] = []
    try:
        with SignalsHeld(), _turn_within(one_asks, timeout) as left_s:
            return ask(left_s, take_back)
    except BaseException as error:
        # For example Ctrl-C, which may come between the count and the caller, most often as the turn ends. A state
        # that is saved now, or a loop that continues, as in a notebook, would otherwise leave that batch out.
        for each in take_back:
            each()
        shown_at_once(error)
        raise


@contextmanager
def _turn_within(one_asks: RLock, timeout: float | None) -> Iterator[float | None]:
    """Let one thread at a time ask for a batch; yields the part of the timeout that is left after waiting."""
    try:
        if not one_asks.acquire(blocking=False):
            began_s = time.monotonic()
            if timeout is not None and (timeout := wait_of(given := timeout)) is None:
                raise ConfigError(f"timeout is {given!r}; give seconds above 0, or None")
            # Without a timeout, the waits of earlier threads end by ``runtime.batch_timeout``.
            if not one_asks.acquire(timeout=-1 if timeout is None else timeout):
                raise UnavailableError(
                    f"another thread waits for a batch of this rank, and has not had it within {timeout:g} s: each "
                    "goes to one of them; ask again"
                )
            if timeout is not None:
                timeout = max(timeout - (time.monotonic() - began_s), _LEAST_S)
        yield timeout
    finally:
        # Tried, because an interrupt may come just before or after the lock is taken, and only the lock knows which.
        try:  # noqa: SIM105 -- a call more, in which an interrupt would leave the lock held
            one_asks.release()
        except RuntimeError:
            pass  # another thread holds it, or none

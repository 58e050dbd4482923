"""Turns of threads that share what hands out one thing after another."""

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
"""Seconds that a thread has at least that gets its turn as its timeout ends."""
T = TypeVar("T")


class EachBatch(Iterator[T], Generic[T]):
    """What follows, up to ``None``; ``end`` is then told how many batches there were.

    No generator: that is over once an error has left it, and says at the next call that the data has ended. Nor
    ``iter`` with a sentinel: of two threads that share that, the one that finds the end has it drop the other's batch.
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
    """Ask for a batch while no other thread does; what its caller does not get stays the next one.

    Args:
        one_asks: Held while a thread asks.
        timeout: Longest wait in seconds, for the turn and the batch.
        ask: Is given what waiting for its turn has left of the timeout, and a list for what takes back the batch that
            it counts as handed out.

    Raises:
        ConfigError: Another thread asks, and the timeout is no length of time.
        UnavailableError: Another thread waited for its batch for as long.
    """
    take_back: list[Callable[[], None]] = []
    try:
        with SignalsHeld(), _turn_within(one_asks, timeout) as left_s:
            return ask(left_s, take_back)
    except BaseException as error:
        # Ctrl-C between the count and the caller, most often as the turn ends: a state that is saved now, or a loop
        # that goes on, as in a notebook, would leave that batch out.
        for each in take_back:
            each()
        shown_at_once(error)
        raise


@contextmanager
def _turn_within(one_asks: RLock, timeout: float | None) -> Iterator[float | None]:
    """Let one thread at a time ask for a batch; yields what waiting for its turn has left of the timeout."""
    try:
        if not one_asks.acquire(blocking=False):
            began_s = time.monotonic()
            if timeout is not None and (timeout := wait_of(given := timeout)) is None:
                raise ConfigError(f"timeout is {given!r}; give seconds above 0, or None")
            # Without one, the waits of those before it end by ``runtime.batch_timeout``.
            if not one_asks.acquire(timeout=-1 if timeout is None else timeout):
                raise UnavailableError(
                    f"another thread waits for a batch of this rank, and has not had it within {timeout:g} s: each "
                    "goes to one of them; ask again"
                )
            if timeout is not None:
                timeout = max(timeout - (time.monotonic() - began_s), _LEAST_S)
        yield timeout
    finally:
        # Tried: an interrupt comes before it is held, or just behind that, and nobody but the lock knows.
        try:  # noqa: SIM105 -- a call more, in which an interrupt would leave the lock held
            one_asks.release()
        except RuntimeError:
            pass  # another thread's, or nobody's

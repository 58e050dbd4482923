"""The client of a rank: hands out its batches in step order, and gives the state at the trainer's step.

::

    with open_plane(spec) as plane, Client(plane.handle(dp_rank=0)) as client:
        for batch in client:
            train(batch)
            state = client.state_dict()   # plain JSON, at this step boundary
"""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from typing import Self

from omniload.actors.plane import RankHandle
from omniload.base.clock import wait_of
from omniload.base.concurrency.held_signals import SignalsHeld
from omniload.base.concurrency.turns import EachBatch, ask_in_turn
from omniload.base.errors import ConfigError, OmniloadError
from omniload.base.metrics import BATCH_WAIT_SECONDS
from omniload.base.state import JsonObject
from omniload.batch.microbatch import Batch
from omniload.machine.messages import ResizeAsked

__all__ = ["Client"]

_AT_ONCE_S = 0.05
"""Longest wait for a batch that its handle says is ready."""


class Client:
    """Batches of one rank, in step order, and the state of the data before the next one.

    ``next_batch`` is ``wait_for_batch`` and then ``hand_out``. A caller that converts batches, as a loader does, calls
    the two itself: an error or an interrupt in between leaves the batch the next one.
    """

    def __init__(self, handle: RankHandle) -> None:
        self._handle = handle
        self.next_step = handle.first_step
        """Number of the step that the next batch is of."""
        self.last_wait_s = 0.0
        """Seconds that the last ``next_batch`` waited."""
        self._waited_for: int | None = None
        self._peeked: Batch | None = None
        """Batch of ``next_step``, if the handle has given it already."""
        self._behind: Batch | None = None
        """Batch of the step after ``next_step``, if it was given before ``take_back``: the handle gives each once."""
        self._one_asks = threading.RLock()

    def next_batch(self, timeout: float | None = None) -> Batch | None:
        """Return the batch of ``next_step``, or ``None`` when the data has ended.

        Args, Raises: as of ``wait_for_batch``.
        """
        # A loop may ask from threads: each of its batches goes to one of them.
        return ask_in_turn(self._one_asks, timeout, self._next_batch)

    def _next_batch(
        self, timeout: float | None, take_back: list[Callable[[], None]]
    ) -> Batch | None:
        batch = self.wait_for_batch(timeout)
        if batch is not None:
            back = partial(self.take_back, batch)
            self.hand_out()
            take_back.append(back)  # no call between the two
        return batch

    def wait_for_batch(self, timeout: float | None = None) -> Batch | None:
        """Return the batch of ``next_step``, again and again until ``hand_out``; ``None`` when the data has ended.

        Args:
            timeout: Longest wait in seconds; ``None`` for the mix's ``runtime.batch_timeout``,
                half an hour unless it says otherwise. After 10 s the log says which role it
                waits for, and why.

        Raises:
            ConfigError: The timeout is not a finite number above 0.
            UnavailableError: The time has passed; the message says which role holds the batch
                up, and why. Call again to go on waiting for the same batch.
            OmniloadError: The data plane has failed; this is the error that was raised there.
        """
        timeout_s = None if timeout is None else wait_of(timeout)
        if timeout is not None and timeout_s is None:
            raise ConfigError(f"timeout is {timeout!r}; give seconds above 0, or None")
        began_s = time.perf_counter()
        if self._peeked is None:
            self._peeked = self._handle.take(self.next_step, timeout_s)
        batch = self._peeked
        self.last_wait_s = time.perf_counter() - began_s
        # Once for each step: ``is_at_end`` of a loader waits for a batch before the loop asks for it.
        if self._waited_for != self.next_step:
            self._waited_for = self.next_step
            BATCH_WAIT_SECONDS.observe(self.last_wait_s)
        if batch is None:
            return None
        assert batch.step == self.next_step, (
            f"asked for step {self.next_step}, got step {batch.step}"
        )
        return batch

    def hand_out(self) -> None:
        """Count the batch of ``next_step`` as handed out; call this once the trainer can have it."""
        self._handle.taken(self.next_step)
        # In one line: an interrupt comes before both or behind both.
        self.next_step, self._peeked, self._behind = self.next_step + 1, self._behind, None

    def take_back(self, batch: Batch) -> None:
        """Make the batch that was handed out last the next one again, because its caller never got it."""
        if self.next_step == batch.step + 1:
            self.next_step, self._peeked, self._behind = batch.step, batch, self._peeked

    def peek(self) -> Batch | None:
        """Return the batch that ``next_batch`` will return, if it is ready; it is not handed out.

        If a change of the mix takes its plan back first, ``next_batch`` returns another one. A failure of the plane is
        left to ``next_batch``, too. While another thread is in ``next_batch``, this returns ``None``.
        """
        if not self._one_asks.acquire(blocking=False):
            return None
        try:
            return self._peek()
        finally:
            self._one_asks.release()

    def _peek(self) -> Batch | None:
        if self._peeked is None:
            with suppress(OmniloadError):
                if self._handle.is_ready(self.next_step):
                    if (lent := self._handle.lent(self.next_step, _AT_ONCE_S)) is not None:
                        return lent  # not kept: ``wait_for_batch`` asks whether it still stands
                    self._peeked = self._handle.take(self.next_step, _AT_ONCE_S)
        return self._peeked

    def state_dict(self) -> JsonObject:
        """Return the state after the batches handed out so far, whatever was prefetched beyond them.

        A data plane that is opened with it continues with the batch of ``next_step``.
        """
        with SignalsHeld():
            return self._handle.state_at(self.next_step)

    def resize(
        self, dp_rank: int, dp_size: int, *, step: int | None = None, generation: int | None = None
    ) -> None:
        """Become rank ``dp_rank`` of ``dp_size`` from a step on, by default from the next one.

        Raises:
            OmniloadError: As for ``RankHandle.resize``; this rank stays what it was.
        """
        step = self.next_step if step is None else step
        with SignalsHeld():
            self._handle.resize(ResizeAsked(dp=dp_size, step=step, generation=generation), dp_rank)
            # A batch that was peeked at was built for the earlier ranks.
            self.next_step, self._peeked, self._behind = step, None, None

    def close(self) -> None:
        """Let go of the data plane."""
        self._handle.close()

    def __iter__(self) -> Iterator[Batch]:
        return EachBatch(self.next_batch)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

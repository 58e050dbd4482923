"""Ranks of a small plane that pause before each step, like ranks that train, or that take steps without pauses.

They fetch at their own pace, as the ranks of a job do: after pauses, several batches arrive together, and the next ones
are requested with the second of them.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Protocol

from omniload.actors.ray.measuring.spent import Spent, spent_at_full_speed

__all__ = ["PAUSE_S", "Paced", "Ranks", "Taker", "paced_step", "took"]

PAUSE_S = 0.04
"""How long a rank pauses before it takes a batch, when steps after pauses are measured."""
_PLACES = 4
"""Places of a batch among the batches that arrived together: the first, the second, with which more batches are
requested, the third, whose caches are as the request left them, and all later ones, which are alike."""
_ASKED_WITH = 2
"""Batches from each arrival that a rank takes up to and including its request for the next ones."""


class Taker(Protocol):
    """What a rank takes its batches with."""

    last_wait_s: float
    """Seconds that the last ``next_batch`` waited."""

    def next_batch(self) -> object:
        """Take the next batch."""
        ...

    def close(self) -> None:
        """Release the plane."""
        ...


class _Handle(Protocol):
    """Where a taker gets its batches from."""

    @property
    def is_empty(self) -> bool:
        """Whether the next batch is the first of an arrival."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Paced:
    """Measurements of ranks that pause between their steps."""

    spent: Spent
    takes_s: tuple[tuple[float, ...], ...]
    """Seconds in which a rank that has paused takes a batch that is ready, over several batches, without other work on
    the core. Grouped by place: the first of an arrival, the second, the third, and all later ones."""
    aside_s: float
    """Processor time of the pauses of the ranks behind ``takes_s``; it belongs to the ranks, not to the data plane."""


class _Rank:
    """A rank, and the place of its next batch among the batches that arrived together."""

    def __init__(self, taker: Taker, handle: _Handle) -> None:
        self.taker, self._handle = taker, handle
        self.place = 0

    def take(self) -> tuple[float, float]:
        """Take a batch; return the same as ``took``."""
        taken = took(self.taker)
        self.place = 0 if self._handle.is_empty else self.place + 1
        return taken


class Ranks:
    """Ranks of one process, which take the same steps one after another."""

    def __init__(self, ranks: Sequence[tuple[Taker, _Handle]]) -> None:
        """Give each rank its taker and its handle."""
        self._ranks = [_Rank(*each) for each in ranks]

    def take(self, steps: int) -> None:
        """Take this many steps."""
        for _ in range(steps):
            for rank in self._ranks:
                rank.take()

    def settle(self, steps: int, *, resting: bool) -> None:
        """Take this many steps; ``resting`` pauses before each request for more, so that the requests are small."""
        for _ in range(steps):
            if resting and any(rank.place < _ASKED_WITH for rank in self._ranks):
                time.sleep(PAUSE_S)
            self.take(1)

    def pace(self, resting: int, steps: int) -> tuple[tuple[tuple[float, ...], ...], float]:
        """Take this many steps, of which the first ``resting`` ranks take each after a pause.

        Returns:
            The times of the batches that were ready then, by place as in ``Paced`` and empty for a place without a
            batch; and the processor time of the pauses.
        """
        takes_s: list[list[float]] = [[] for _ in range(_PLACES)]
        aside_s = 0.0
        for _ in range(steps):
            for number, rank in enumerate(self._ranks):
                if number >= resting:
                    rank.take()
                    continue
                of_place, began_s = takes_s[min(rank.place, _PLACES - 1)], time.thread_time()
                time.sleep(PAUSE_S)
                aside_s += time.thread_time() - began_s
                # The waited time includes other work on the core, and the processor time includes a twentieth for
                # reading the clock, so the smaller value is used.
                of_place.append(min(rank.take()))
        return tuple(map(tuple, takes_s)), aside_s


def took(taker: Taker) -> tuple[float, float]:
    """Take a batch; return the seconds waited for it, and the processor seconds of this thread."""
    began_s = time.thread_time()
    taker.next_batch()
    return taker.last_wait_s, time.thread_time() - began_s


def paced_step(
    apart: Sequence[Paced], together: Sequence[Paced], clock: Mapping[str, float]
) -> dict[str, float]:
    """Return the processor time of a step with pauses, by role, less the time-driven work.

    Args:
        apart: Periods in which each rank took its steps alone, used for the figure of ranks.
        together: Periods in which all ranks took steps at once, used for every other role.
        clock: Cores that each role uses at rest.
    """
    of_ranks, of_others = (
        spent_at_full_speed([each.spent for each in paces], clock) for paces in (apart, together)
    )
    aside_s = median(each.aside_s / each.spent.steps for each in apart)
    return {**of_others.step_s, "rank": of_ranks.step_s["rank"] - aside_s}

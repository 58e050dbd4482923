"""Ranks of a small plane that rest before each of their steps, as those of a job do that train, or do not rest.

They fetch by their pace, as those of a job: after pauses some batches at once, and the next ones with the second.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Protocol

from omniload.actors.ray.measuring.spent import Spent, spent_at_full_speed

__all__ = ["PAUSE_S", "Paced", "Ranks", "Taker", "paced_step", "took"]

PAUSE_S = 0.04
"""How long a rank rests before it takes a batch, where steps after pauses are measured."""
_PLACES = 4
"""The first batch of those that came together, the second, with which more are asked for, the third, which finds caches
as asking left them, and those behind it, which are alike."""
_ASKED_WITH = 2
"""Batches of those that came together by which the next ones are asked for."""


class Taker(Protocol):
    """What a rank takes its batches with."""

    last_wait_s: float
    """Seconds the last ``next_batch`` waited."""

    def next_batch(self) -> object:
        """Take the next one."""
        ...

    def close(self) -> None:
        """Let go of the plane."""
        ...


class _Handle(Protocol):
    """What a taker has its batches from."""

    @property
    def is_empty(self) -> bool:
        """Whether the next batch is the first of those that come together."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Paced:
    """What ranks that rest between their steps found."""

    spent: Spent
    takes_s: tuple[tuple[float, ...], ...]
    """Time in which a rank that has rested takes a batch that is at hand, of several, others left out: of the first of
    those that came together, of the second, of the third, and of those behind it."""
    aside_s: float
    """Processor time of the pauses, of the ranks that took these: theirs, and no data plane's."""


class _Rank:
    """A rank, and the place of the batch that it takes next among those that come together."""

    def __init__(self, taker: Taker, handle: _Handle) -> None:
        self.taker, self._handle = taker, handle
        self.place = 0

    def take(self) -> tuple[float, float]:
        """Take a batch; return as ``took``."""
        taken = took(self.taker)
        self.place = 0 if self._handle.is_empty else self.place + 1
        return taken


class Ranks:
    """Ranks of one process, which take the same steps one after the other."""

    def __init__(self, ranks: Sequence[tuple[Taker, _Handle]]) -> None:
        """Have the ranks of some handles take with those takers."""
        self._ranks = [_Rank(*each) for each in ranks]

    def take(self, steps: int) -> None:
        """Take so many steps."""
        for _ in range(steps):
            for rank in self._ranks:
                rank.take()

    def settle(self, steps: int, *, resting: bool) -> None:
        """Take so many steps; ``resting``, with a pause wherever a rank asks for more, which has it ask for few."""
        for _ in range(steps):
            if resting and any(rank.place < _ASKED_WITH for rank in self._ranks):
                time.sleep(PAUSE_S)
            self.take(1)

    def pace(self, resting: int, steps: int) -> tuple[tuple[tuple[float, ...], ...], float]:
        """Take so many steps, the first ranks after a pause each.

        Returns:
            What each batch took that was at hand then, by its place as in ``Paced``, none of a place that no batch had;
            and the processor time of the pauses.
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
                # Other work on the core is in the one, and to look at the other takes a twentieth of it.
                of_place.append(min(rank.take()))
        return tuple(map(tuple, takes_s)), aside_s


def took(taker: Taker) -> tuple[float, float]:
    """Take a batch; return how long that was waited for, and the processor time of this thread."""
    began_s = time.thread_time()
    taker.next_batch()
    return taker.last_wait_s, time.thread_time() - began_s


def paced_step(
    apart: Sequence[Paced], together: Sequence[Paced], clock: Mapping[str, float]
) -> dict[str, float]:
    """Return what a step took where ranks rest, by role, less what was done by the clock.

    Args:
        apart: Whiles in which each rank took its steps by itself, which tell of ranks.
        together: Whiles in which all did so at once, which tell of every other role.
        clock: Cores of each role in use at rest.
    """
    of_ranks, of_others = (
        spent_at_full_speed([each.spent for each in paces], clock) for paces in (apart, together)
    )
    aside_s = median(each.aside_s / each.spent.steps for each in apart)
    return {**of_others.step_s, "rank": of_ranks.step_s["rank"] - aside_s}

"""Counts of the planner's steps, as metrics and in its log."""

from collections import deque
from collections.abc import Iterable, Sequence
from functools import cache

import numpy as np
from prometheus_client import Counter

from omniload.actors.heartbeat_board import Figures
from omniload.base.log import get_logger
from omniload.base.metrics import IMBALANCE_RATIO, SAMPLES_SKIPPED, TOKENS_PLANNED
from omniload.machine.messages import AppendJournal, PlannerCommand
from omniload.machine.plans.fences import CutJournal
from omniload.machine.status import SKIPPED, has_doubled, said_of_skipped

__all__ = ["COUNTED", "PlannedCounts", "count_skipped"]

_LOG = get_logger(__name__)
COUNTED = "counted_step"
"""Figure of the planner: the first step whose tokens and bad records are not counted."""


class PlannedCounts:
    """Counts the tokens and bad records of steps by source, once every rank has taken them.

    Until then a change of the mix may take a step back and draw other samples for it, and a counter must not decrease.
    For one thread.
    """

    def __init__(self, figures: Figures) -> None:
        """Begin with the step that ``figures`` has as ``COUNTED``; a lost planner has counted the earlier ones."""
        self._figures = figures
        self._next = int(figures.read().get(COUNTED, 0.0))
        self._planned = deque[AppendJournal]()
        """Steps that are not counted yet, in order."""

    def note(self, commands: Iterable[PlannerCommand], slowest: int) -> None:
        """Note planned and withdrawn steps; count the steps before the one that the slowest rank wants next."""
        appended: AppendJournal | None = None
        for command in commands:
            if isinstance(command, AppendJournal):
                self._planned.append(appended := command)
            elif isinstance(command, CutJournal):
                while self._planned and self._planned[-1].plan.step >= command.step:
                    self._planned.pop()
        if appended is not None:
            # Only for the last step: a gauge that is set several times between two scrapes shows only its last value.
            IMBALANCE_RATIO.set(appended.plan.imbalance)
        taken = list[AppendJournal]()
        while self._planned and self._planned[0].plan.step < slowest:
            taken.append(self._planned.popleft())
        # A planner that took over plans the last steps again, so skip those that are known.
        if taken := [each for each in taken if each.plan.step >= self._next]:
            self._count(taken)
            self._next = slowest
            self._figures.note(**{COUNTED: slowest})

    def _count(self, taken: Sequence[AppendJournal]) -> None:
        # An added source comes after all others.
        names = taken[-1].names
        tokens_S = np.zeros(len(names), np.int64)
        for each in taken:
            tokens_S[: len(each.plan.tokens_S)] += each.plan.tokens_S
            for s, count in each.bad.items():
                count_skipped(names[s], count, self._figures)
        for s in np.flatnonzero(tokens_S).tolist():
            _tokens_planned(names[s]).inc(int(tokens_S[s]))


@cache
def _tokens_planned(name: str) -> Counter:
    """Return the counter of a source; cached, because the lookup by label is slow."""
    return TOKENS_PLANNED.labels(name)


def count_skipped(name: str, skipped: int, figures: Figures) -> None:
    """Count bad records of a source that a step passed; log the first, and each doubling of their number."""
    if not skipped:
        return
    SAMPLES_SKIPPED.labels(name).inc(skipped)
    total = int(figures.count(SKIPPED + name, skipped))
    if has_doubled(total - skipped, total):
        _LOG.warning("%s", said_of_skipped(name, total))

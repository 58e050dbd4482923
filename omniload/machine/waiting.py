"""Waits that are worth a line: whom a waiting rank names, when its wait ends, and which call to a store is slow.

And which store is slow for one that holds a role, and not for one that stands by.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Self

from omniload.base.concurrency.calls_under_way import ENDED_CALLS, RECENT_CALL, USUAL_CALL
from omniload.machine.progress import Progress, Task, ended_rank, reason_of

__all__ = ["GiveUp", "Looked", "Quicker", "Say", "SlowCalls", "SlowStore", "Wait"]

_FIRST_SAY_S = 10.0
_LONGEST_SAY_S = 300.0
_TIMES = 10
_LEAST_S = 2.0
"""What takes less holds nobody up: samples are read ahead by more."""
_SLOW_CALL_S = 0.25
"""As above, of calls one after the other: each holds up those behind it."""
_QUICKER = 4
"""Times as quickly that the store of a shadow answers that is to take over."""
_SLOW_FOR_S = 10.0
_MEASURED_CALLS = 8
"""Of holder and shadow, since the holder's became slow: as many as ``RECENT_CALL`` is of."""
_FIRST_PAUSE_S = 300.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Looked:
    """The shell has looked at the heartbeats."""

    waited_s: float
    """Since the wait began."""
    now_s: float
    """By the clock of the heartbeats."""
    roles: Mapping[str, Progress]


@dataclass(frozen=True, slots=True)
class Say:
    """Write a line to the log."""

    text: str


@dataclass(frozen=True, slots=True)
class GiveUp:
    """End the wait with an error."""

    text: str


@dataclass(slots=True, kw_only=True)
class Wait:
    """One wait for the answer of a role: said after 10 s, then ever less often, and ended at its limit."""

    who: str
    """Who waits: ``rank dp=0``."""
    what: str
    """For what: ``the batch of step 7``."""
    first: str
    """The role that was asked."""
    limit_s: float
    while_still: bool = False
    """Count the limit from the last change in what any role does: for a wait whose length the data decides."""
    ranks_stay: bool = False
    """End it, once it is due to be said, for a rank that has ended: where none comes in its place."""
    _still_from_s: float = field(default=0.0, init=False)
    _tasks: frozenset[tuple[str, Task]] = field(default=frozenset(), init=False)
    _next_say_s: float = field(default=_FIRST_SAY_S, init=False)

    @classmethod
    def for_batch(
        cls, rank: str, step: int, constructor: str, limit_s: float, *, ranks_stay: bool = False
    ) -> Self:
        """Return the wait of a rank for the batch of a step, which it has asked of a data constructor."""
        what = f"the batch of step {step}"
        return cls(who=rank, what=what, first=constructor, limit_s=limit_s, ranks_stay=ranks_stay)

    def due_in_s(self, waited_s: float) -> float:
        """Return how long the shell need not look, having waited so long; 0 when it is due."""
        return max(0.0, min(self._next_say_s, self._still_from_s + self.limit_s) - waited_s)

    def handle(self, event: Looked) -> tuple[Say | GiveUp, ...]:
        """Apply one event and return what must now be done."""
        waited_s = event.waited_s
        if self.due_in_s(waited_s) > 0:
            return ()
        # Before the limit is looked at: what has moved since the last look gives the wait its whole time again.
        if self.while_still:
            self._see(event)
        reason = reason_of(self.first, event.roles, event.now_s)
        if waited_s - self._still_from_s >= self.limit_s:
            return (
                GiveUp(
                    f"{self.who} waited {waited_s:.0f} s for {self.what}, its limit: {reason}; "
                    "mend or restart the last one named, or raise the limit (runtime.batch_timeout)"
                ),
            )
        if waited_s < self._next_say_s:
            return ()
        if self.ranks_stay and ended_rank(self.first, event.roles, event.now_s):
            return (
                GiveUp(
                    f"{self.who} waited {waited_s:.0f} s for {self.what}, which does not come: {reason}"
                ),
            )
        # More than once where the shell looked late: what was missed is not said after.
        while self._next_say_s <= waited_s:
            self._next_say_s += min(self._next_say_s, _LONGEST_SAY_S)
        return (Say(f"{self.who} has waited {waited_s:.0f} s for {self.what}: {reason}"),)

    def _see(self, event: Looked) -> None:
        roles = event.roles.values()
        # A task is known by when it began, too: the same done once more is a change.
        tasks = frozenset(
            (role.name, task) for role in roles for task in (*role.tasks, *role.calls)
        )
        if tasks != self._tasks:
            self._tasks, self._still_from_s = tasks, event.waited_s


@dataclass(slots=True)
class SlowCalls:
    """Compares calls under way with those that ended, role by role."""

    _said: set[tuple[str, str, float]] = field(default_factory=set, init=False)
    """Calls that were told of and are under way, by role, what they do, and when they began."""

    def see(self, beats: Mapping[str, Progress]) -> tuple[str, ...]:
        """Return a line for each call that is slow by now, with the role by name; seconds are up to its heartbeat."""
        slow = {
            (role.name, call.doing, call.since_s): role
            for role in beats.values()
            for call in role.calls
            if role.beat_s - call.since_s >= _limit_s(role)
        }
        # Once for each call: one that hangs would be told of four times a second.
        new = sorted(slow.keys() - self._said)
        # Calls that ended are forgotten: a run makes no end of them.
        self._said = set(slow)
        return tuple(_said_of(slow[call], *call) for call in new)


def _said_of(role: Progress, name: str, doing: str, since_s: float) -> str:
    usual_s = role.figures[USUAL_CALL]
    return (
        f"{name} {doing} for {role.beat_s - since_s:.0f} s, where a call to its store usually takes {usual_s:.3g} s: "
        "the store is slow, or does not answer"
    )


def _limit_s(role: Progress) -> float:
    usual_s = role.figures.get(USUAL_CALL)
    return math.inf if usual_s is None else max(_LEAST_S, _TIMES * usual_s)


@dataclass(frozen=True, slots=True)
class Quicker:
    """A shadow is to take over, for what its store takes."""

    name: str
    """Of the shadow."""
    why: str


@dataclass(slots=True)
class SlowStore:
    """Tells of one role when the store of its holder has become slow while that of a shadow has not.

    ::

        calls of the holder    20 ms  20 ms  20 ms  300 ms  300 ms  300 ms ...      ten times what they took
        calls of a shadow      20 ms                20 ms            20 ms ...      in the same time: it takes over

    Both are measured from when the first became slow, by calls that a shadow makes anyway, as it decodes ahead. So a
    store that is slow for all has nobody replaced. Nor do two that are slow in turn swap for ever: behind each
    take-over is a pause, the first of five minutes, and each twice as long as the one before.
    """

    _holder: str = field(default="", init=False)
    _usual_s: float = field(default=0.0, init=False)
    """What a call of the holder took before it became slow."""
    _slow_s: float = field(default=0.0, init=False)
    """For how long it has been slow."""
    _begun: dict[str, float] = field(default_factory=dict, init=False)
    """Calls of each that had ended when it became slow, or when a shadow was first seen since."""
    _rest_s: float = field(default=0.0, init=False)
    """Left of the pause."""
    _pause_s: float = field(default=_FIRST_PAUSE_S, init=False)

    def see(self, holder: Progress, shadows: Sequence[Progress], passed_s: float) -> Quicker | None:
        """Note another look at the last heartbeats; return who is to take over, where somebody is.

        Args:
            holder: Of the one that holds the role.
            shadows: Of those that stand by.
            passed_s: Since the look before, in which whoever looks has run.
        """
        self._rest_s = max(0.0, self._rest_s - passed_s)
        recent_s, usual_s = holder.figures.get(RECENT_CALL), holder.figures.get(USUAL_CALL)
        if recent_s is None or usual_s is None:
            return None
        if holder.name != self._holder:
            self._holder, self._usual_s, self._slow_s = holder.name, usual_s, 0.0
            self._begun.clear()
        if recent_s < max(_SLOW_CALL_S, _TIMES * self._usual_s):
            # Up to here: what a slow call takes is not to become what is usual.
            self._usual_s, self._slow_s = usual_s, 0.0
            self._begun.clear()
            return None
        self._slow_s += passed_s
        quick = [each for each in shadows if self._answers_by(each, recent_s / _QUICKER)]
        is_due = self._slow_s >= _SLOW_FOR_S and self._rest_s == 0
        if not self._answers_by(holder) or not is_due or not quick:
            return None
        found = min(quick, key=lambda each: each.figures[RECENT_CALL])
        self._rest_s, self._pause_s = self._pause_s, 2 * self._pause_s
        return Quicker(
            found.name,
            f"a call to its store takes {recent_s:.2g} s, where it took {self._usual_s:.2g} s, and "
            f"{found.figures[RECENT_CALL]:.2g} s from {found.name} on {found.host or 'its host'}",
        )

    def _answers_by(self, role: Progress, limit_s: float = math.inf) -> bool:
        """Tell whether the last calls of a role took so long at most, and were made since the holder became slow."""
        ended = role.figures.get(ENDED_CALLS, 0.0)
        made = ended - self._begun.setdefault(role.name, ended)
        return made >= _MEASURED_CALLS and role.figures.get(RECENT_CALL, math.inf) <= limit_s

"""Long waits: what a waiting rank logs, when its wait ends, and which calls to a store are slow.

``SlowStore`` notices when a store is slow for a loader but not for its shadow.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Self

from omniload.base.concurrency.calls_under_way import ENDED_CALLS, RECENT_CALL, USUAL_CALL
from omniload.machine.progress import Progress, Task, ended_rank, reason_of

__all__ = ["EndWait", "HeartbeatsRead", "Quicker", "Say", "SlowCalls", "SlowStore", "Wait"]

_FIRST_SAY_S = 10.0
_LONGEST_SAY_S = 300.0
_TIMES = 10
_LEAST_S = 2.0
"""A shorter call holds up nobody, because samples are read further ahead than that."""
_SLOW_CALL_S = 0.25
"""The same for consecutive calls, each of which delays the ones after it."""
_QUICKER = 4
"""A shadow takes over only if its store answers so many times as fast."""
_SLOW_FOR_S = 10.0
_MEASURED_CALLS = 8
"""Calls that holder and shadow must have made since the holder's became slow; ``RECENT_CALL`` covers as many."""
_FIRST_PAUSE_S = 300.0


@dataclass(frozen=True, slots=True, kw_only=True)
class HeartbeatsRead:
    """The shell has read the heartbeats."""

    waited_s: float
    """Seconds since the wait began."""
    now_s: float
    """The current time of the heartbeats' clock."""
    roles: Mapping[str, Progress]


@dataclass(frozen=True, slots=True)
class Say:
    """Write a line to the log."""

    text: str


@dataclass(frozen=True, slots=True)
class EndWait:
    """End the wait with an error."""

    text: str


@dataclass(slots=True, kw_only=True)
class Wait:
    """One wait for the answer of a role: logged after 10 s, then less and less often, and ended at its limit."""

    who: str
    """Who waits, such as ``rank dp=0``."""
    what: str
    """What for, such as ``the batch of step 7``."""
    first: str
    """The role that was asked."""
    limit_s: float
    while_still: bool = False
    """Count the limit from the last change of any role's activity, for a wait whose length depends on the data."""
    ranks_stay: bool = False
    """Whether nobody replaces a rank that has ended; the wait for such a rank ends when its first line is due."""
    _still_from_s: float = field(default=0.0, init=False)
    _tasks: frozenset[tuple[str, Task]] = field(default=frozenset(), init=False)
    _next_say_s: float = field(default=_FIRST_SAY_S, init=False)

    @classmethod
    def for_batch(
        cls, rank: str, step: int, constructor: str, limit_s: float, *, ranks_stay: bool = False
    ) -> Self:
        """Return the wait of a rank for the batch of a step that it has requested from a data constructor."""
        what = f"the batch of step {step}"
        return cls(who=rank, what=what, first=constructor, limit_s=limit_s, ranks_stay=ranks_stay)

    def due_in_s(self, waited_s: float) -> float:
        """Return for how long the shell need not look again, after it has waited ``waited_s``; 0 when a look is due."""
        return max(0.0, min(self._next_say_s, self._still_from_s + self.limit_s) - waited_s)

    def handle(self, event: HeartbeatsRead) -> tuple[Say | EndWait, ...]:
        """Apply one event and return the commands to carry out."""
        waited_s = event.waited_s
        if self.due_in_s(waited_s) > 0:
            return ()
        # Before the limit is checked, because progress since the last look gives the wait its whole time again.
        if self.while_still:
            self._see(event)
        reason = reason_of(self.first, event.roles, event.now_s)
        if waited_s - self._still_from_s >= self.limit_s:
            return (
                EndWait(
                    f"{self.who} waited {waited_s:.0f} s for {self.what}, its limit: {reason}; fix or restart the "
                    "role that is named last, or raise the limit (runtime.batch_timeout)"
                ),
            )
        if waited_s < self._next_say_s:
            return ()
        if self.ranks_stay and ended_rank(self.first, event.roles, event.now_s):
            return (
                EndWait(
                    f"{self.who} waited {waited_s:.0f} s for {self.what}, which does not come: {reason}"
                ),
            )
        # A loop, because lines that were missed by a late look are not made up for.
        while self._next_say_s <= waited_s:
            self._next_say_s += min(self._next_say_s, _LONGEST_SAY_S)
        return (Say(f"{self.who} has waited {waited_s:.0f} s for {self.what}: {reason}"),)

    def _see(self, event: HeartbeatsRead) -> None:
        roles = event.roles.values()
        # A task includes when it began, so the same activity once more counts as a change.
        tasks = frozenset(
            (role.name, task) for role in roles for task in (*role.tasks, *role.calls)
        )
        if tasks != self._tasks:
            self._tasks, self._still_from_s = tasks, event.waited_s


@dataclass(slots=True)
class SlowCalls:
    """Compares the calls under way of each role with its usual ones, and logs slow calls."""

    _said: set[tuple[str, str, float]] = field(default_factory=set, init=False)
    """Calls under way that were logged already, by role, activity, and time of beginning."""

    def see(self, beats: Mapping[str, Progress]) -> tuple[str, ...]:
        """Return a line for each call that has become slow; its seconds end at the role's last heartbeat."""
        slow = {
            (role.name, call.doing, call.since_s): role
            for role in beats.values()
            for call in role.calls
            if role.beat_s - call.since_s >= _limit_s(role)
        }
        # Once for each call: a hanging one would otherwise be logged four times a second.
        new = sorted(slow.keys() - self._said)
        # Ended calls are forgotten, because a run makes any number of them.
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
    """A shadow should take over, because its store is quicker."""

    name: str
    """Name of the shadow."""
    why: str


@dataclass(slots=True)
class SlowStore:
    """Notices for one role when the store has become slow for its holder but not for a shadow.

    ::

        calls of the holder    20 ms  20 ms  20 ms  300 ms  300 ms  300 ms ...      ten times what they took
        calls of a shadow      20 ms                20 ms            20 ms ...      in the same time: it takes over

    Both are measured from the moment when the holder's calls became slow; a shadow makes calls anyway, as it decodes
    ahead. So a store that is slow for everybody causes no replacement. Two loaders that are slow alternately do not
    swap for ever either: after each take-over comes a pause, of five minutes at first and twice as long each time.
    """

    _holder: str = field(default="", init=False)
    _usual_s: float = field(default=0.0, init=False)
    """Duration of the holder's calls before they became slow."""
    _slow_s: float = field(default=0.0, init=False)
    """For how long they have been slow."""
    _begun: dict[str, float] = field(default_factory=dict, init=False)
    """Number of ended calls, by role, when the holder became slow or the shadow was first seen after that."""
    _rest_s: float = field(default=0.0, init=False)
    """Remainder of the pause."""
    _pause_s: float = field(default=_FIRST_PAUSE_S, init=False)

    def see(self, holder: Progress, shadows: Sequence[Progress], passed_s: float) -> Quicker | None:
        """Note another look at the heartbeats; return the shadow that should take over, if there is one.

        Args:
            holder: Last heartbeat of the loader that holds the role.
            shadows: Last heartbeats of its shadows.
            passed_s: Seconds since the previous look during which the observer was running.
        """
        self._rest_s = max(0.0, self._rest_s - passed_s)
        recent_s, usual_s = holder.figures.get(RECENT_CALL), holder.figures.get(USUAL_CALL)
        if recent_s is None or usual_s is None:
            return None
        if holder.name != self._holder:
            self._holder, self._usual_s, self._slow_s = holder.name, usual_s, 0.0
            self._begun.clear()
        if recent_s < max(_SLOW_CALL_S, _TIMES * self._usual_s):
            # Only here: slow calls must not become the usual ones.
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
        """Return whether a role's last calls took at most ``limit_s``, and were made since the holder became slow."""
        ended = role.figures.get(ENDED_CALLS, 0.0)
        made = ended - self._begun.setdefault(role.name, ended)
        return made >= _MEASURED_CALLS and role.figures.get(RECENT_CALL, math.inf) <= limit_s

"""Waits that are worth a line: whom a waiting rank names, when its wait ends, and which call to a store is slow."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Self

from omniload.machine.progress import USUAL_CALL, Progress, Task, ended_rank, reason_of

__all__ = ["GiveUp", "Looked", "Say", "SlowCalls", "Wait"]

_FIRST_SAY_S = 10.0
_LONGEST_SAY_S = 300.0
_TIMES = 10
_LEAST_S = 2.0
"""What takes less holds nobody up: samples are read ahead by more."""


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
    return float("inf") if usual_s is None else max(_LEAST_S, _TIMES * usual_s)

"""The Wait machine: when a wait is worth a line in the log, whom the line names, and when the wait ends."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from omniload.machine.progress import Progress, Task, reason_of

__all__ = ["GiveUp", "Looked", "Say", "Wait"]

_FIRST_SAY_S = 10.0
_LONGEST_SAY_S = 300.0


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
    _still_from_s: float = field(default=0.0, init=False)
    _tasks: frozenset[tuple[str, Task]] = field(default=frozenset(), init=False)
    _next_say_s: float = field(default=_FIRST_SAY_S, init=False)

    def due_in_s(self, waited_s: float) -> float:
        """Return how long the shell need not look, having waited so long; 0 when it is due."""
        return max(0.0, min(self._next_say_s, self._still_from_s + self.limit_s) - waited_s)

    def handle(self, event: Looked) -> tuple[Say | GiveUp, ...]:
        """Apply one event and return what must now be done."""
        waited_s = event.waited_s
        if self.due_in_s(waited_s) > 0:
            return ()
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
        while self._next_say_s <= waited_s:
            self._next_say_s += min(self._next_say_s, _LONGEST_SAY_S)
        return (Say(f"{self.who} has waited {waited_s:.0f} s for {self.what}: {reason}"),)

    def _see(self, event: Looked) -> None:
        roles = event.roles.values()
        tasks = frozenset(
            (role.name, task) for role in roles for task in (*role.tasks, *role.calls)
        )
        if tasks != self._tasks:
            self._tasks, self._still_from_s = tasks, event.waited_s

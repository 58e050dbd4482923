"""The SlowCalls machine: tells once of each call to a store that takes far longer than such calls usually do."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from omniload.machine.progress import USUAL_CALL, Progress

__all__ = ["SlowCalls"]

_TIMES = 10
_LEAST_S = 2.0
"""What takes less holds nobody up: samples are read ahead by more."""


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
        new = sorted(slow.keys() - self._said)
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

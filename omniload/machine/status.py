"""What a look at a running data plane shows: every role's heartbeat, and how fast its figures grow."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from omniload.machine.progress import SILENT_S, Progress

__all__ = ["RoleStatus", "status_of"]

_TOTAL = "_total"


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleStatus:
    """One role, as somebody who watches sees it."""

    name: str
    pid: int
    state: str
    """What it does, or waits for."""
    age_s: float
    """Since its last heartbeat."""
    task_s: float
    """Since it began with what it does: the age of its last progress."""
    waits_for: tuple[str, ...] = ()
    figures: Mapping[str, float] = field(default_factory=dict)
    """What it counts of itself."""
    rates: Mapping[str, float] = field(default_factory=dict)
    """How fast those grow that only grow, a second; nothing at the first look."""


def status_of(
    roles: Mapping[str, Progress], before: Mapping[str, Progress], now_s: float
) -> list[RoleStatus]:
    """Return every role's status, in the order of their names.

    Args:
        roles: Last heartbeats by name.
        before: Those of an earlier look.
        now_s: Now, by the clock of the heartbeats.
    """
    return [_status(roles[name], before.get(name), now_s) for name in sorted(roles)]


def _status(role: Progress, before: Progress | None, now_s: float) -> RoleStatus:
    age_s = max(0.0, now_s - role.beat_s)
    task = (*role.calls, *role.tasks)[:1]
    waits_for = next((t.waits_for for t in role.tasks if t.waits_for), ())
    doing = task[0].doing if task else "idle"
    return RoleStatus(
        name=role.name,
        pid=role.pid,
        state="stopped" if age_s > SILENT_S else doing,
        age_s=age_s,
        task_s=max(0.0, now_s - task[0].since_s) if task else 0.0,
        waits_for=waits_for,
        figures=dict(role.figures),
        rates=_rates(role, before),
    )


def _rates(role: Progress, before: Progress | None) -> dict[str, float]:
    if before is None or before.pid != role.pid or role.beat_s <= before.beat_s:
        return {}
    seconds = role.beat_s - before.beat_s
    return {
        name: max(0.0, value - before.figures.get(name, 0.0)) / seconds
        for name, value in role.figures.items()
        if name.endswith(_TOTAL)
    }

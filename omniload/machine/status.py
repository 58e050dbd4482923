"""What a look at a running data plane shows: every role's heartbeat, and how fast its figures grow."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from omniload.machine.progress import Progress, is_rank, is_silent, way_of

__all__ = [
    "REPEATED",
    "SKIPPED",
    "UNREAD",
    "RoleStatus",
    "SkippedRecords",
    "has_doubled",
    "said_of_skipped",
    "status_of",
]

_TOTAL = "_total"
REPEATED = "repeated_reads"
"""Figure of a loader: reads that wait to be tried again, because a store did not answer."""
SKIPPED = "skipped_records:"
"""Begins a figure of the planner: bad records of the source behind it that the steps of this process went past."""
UNREAD = "unread_source:"
"""Begins a figure of the planner that is there while the source behind it cannot be read on."""
_TROUBLE_S = 10.0
"""A wait of a rank, or a call to a store, that takes longer is somebody's trouble."""


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
    log: str = ""
    """File of its lines; empty without one."""
    host: str = ""
    """What people call the host that it is on."""
    in_trouble: bool = False
    """Whether it is stopped, holds up a rank, or waits for a store that does not answer."""


def status_of(
    roles: Mapping[str, Progress], before: Mapping[str, Progress], now_s: float
) -> list[RoleStatus]:
    """Return every role's status, in the order of their names.

    Args:
        roles: Last heartbeats by name.
        before: Those of an earlier look.
        now_s: Now, by the clock of the heartbeats.
    """
    # The end of the way, not all on it: whoever waits for somebody in trouble is in none itself.
    causes = {
        way_of(name, roles, now_s)[-1]
        for name, role in roles.items()
        if is_rank(name) and _waited_s(role, now_s) > _TROUBLE_S
    }
    found = [_status(roles[name], before.get(name), now_s) for name in sorted(roles)]
    return [
        replace(
            status,
            in_trouble=status.name in causes or _is_held_up(roles[status.name], now_s),
        )
        for status in found
    ]


def _waited_s(rank: Progress, now_s: float) -> float:
    """Return how long a rank has waited for its batch."""
    return max((now_s - task.since_s for task in rank.tasks if task.waits_for), default=0.0)


def _is_held_up(role: Progress, now_s: float) -> bool:
    calls_s = max((now_s - call.since_s for call in role.calls), default=0.0)
    return is_silent(role, now_s) or role.figures.get(REPEATED, 0.0) > 0 or calls_s > _TROUBLE_S


def _status(role: Progress, before: Progress | None, now_s: float) -> RoleStatus:
    age_s = max(0.0, now_s - role.beat_s)
    # A call to a store first: it is what the task waits for.
    task = (*role.calls, *role.tasks)[:1]
    waits_for = next((t.waits_for for t in role.tasks if t.waits_for), ())
    doing = task[0].doing if task else "idle"
    return RoleStatus(
        name=role.name,
        pid=role.pid,
        state=_silent(role) if is_silent(role, now_s) else doing,
        age_s=age_s,
        task_s=max(0.0, now_s - task[0].since_s) if task else 0.0,
        waits_for=waits_for,
        figures=dict(role.figures),
        rates=_rates(role, before),
        log=role.log,
        host=role.host,
    )


def _silent(role: Progress) -> str:
    return "ended" if role.has_ended else "stopped"


def _rates(role: Progress, before: Progress | None) -> dict[str, float]:
    # Another process counts from nothing.
    if before is None or before.pid != role.pid or role.beat_s <= before.beat_s:
        return {}
    # By its own clock: looks come unevenly, and two may show the same heartbeat.
    seconds = role.beat_s - before.beat_s
    return {
        name: max(0.0, value - before.figures.get(name, 0.0)) / seconds
        for name, value in role.figures.items()
        if name.endswith(_TOTAL)
    }


@dataclass(slots=True)
class SkippedRecords:
    """Tells of bad records that steps went past: of the first of a source, and each time that they doubled.

    In the process of the ranks: who watches a job does not read the lines of the planner's.
    """

    _told: dict[str, int] = field(default_factory=dict, init=False)
    """Of each source, how many there were then."""

    def see(self, beats: Mapping[str, Progress]) -> tuple[str, ...]:
        """Return a line for each source that is to be told of, as the planner's heartbeat counts them."""
        counts = {
            figure.removeprefix(SKIPPED): int(count)
            for role in beats.values()
            for figure, count in role.figures.items()
            if figure.startswith(SKIPPED)
        }
        due = [s for s, n in counts.items() if has_doubled(self._told.get(s, 0), n)]
        self._told |= {source: counts[source] for source in due}
        return tuple(said_of_skipped(source, counts[source]) for source in due)


def has_doubled(told: int, count: int) -> bool:
    """Tell whether a count has come to a power of two since; each record would be a line for every step."""
    return told.bit_length() < count.bit_length()


def said_of_skipped(source: str, count: int) -> str:
    """Return what is said of a source of which so many bad records were skipped."""
    times = "once" if count == 1 else f"{count} times"
    return (
        f"source {source}: records that cannot be decoded were skipped {times} so far; told again at "
        f"{1 << count.bit_length()}; its loader's lines, and `omniload mix stats`, say what is wrong with the first"
    )

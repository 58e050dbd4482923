"""The status of a running data plane: every role's heartbeat, and the rates of its figures."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from pydantic import ConfigDict

from omniload.base.config import StrictModel
from omniload.machine.progress import Progress, is_rank, is_silent, way_of

__all__ = [
    "REPEATED",
    "SKIPPED",
    "UNREAD",
    "PlaneStatus",
    "RoleLine",
    "SkippedRecords",
    "has_doubled",
    "said_of_skipped",
    "status_of",
]

_TOTAL = "_total"
REPEATED = "repeated_reads"
"""Figure of a loader: reads that wait for another try because a store did not answer."""
SKIPPED = "skipped_records:"
"""Prefix of a figure of the planner: bad records of a source that steps of this process passed; its name follows."""
UNREAD = "unread_source:"
"""Prefix of a figure of the planner that exists while the next records of a source cannot be read; its name follows."""
_TROUBLE_S = 10.0
"""A longer wait of a rank, or call to a store, counts as trouble."""


class RoleLine(StrictModel):
    """One role, as shown to people."""

    name: str
    pid: int
    state: str
    """Its activity, or what it waits for."""
    age_s: float
    """Age of its last heartbeat."""
    task_s: float
    """Time since its present activity began, which is the age of its last progress."""
    waits_for: tuple[str, ...]
    figures: dict[str, float]
    """Its own figures."""
    rates: dict[str, float]
    """Growth of its counters per second; empty at the first look."""
    memory_bytes: int | None
    """Resident memory of its process; ``None`` for a process on another host."""
    log: str = ""
    """Its log file; empty if there is none."""
    host: str = ""
    """Name of its host, for people."""
    in_trouble: bool = False
    """Whether it is stopped, holds up a rank, or waits for a store that does not answer."""


class PlaneStatus(StrictModel):
    """All roles of a plane at one moment."""

    model_config = ConfigDict(ser_json_inf_nan="constants")

    version: Literal[1] = 1
    written_at: float
    """Seconds since 1970."""
    up_s: float = 0.0
    """Seconds since the plane was opened."""
    host: str
    pid: int
    """Process that opened the plane."""
    roles: tuple[RoleLine, ...]
    has_ended: bool = False
    """Whether that process has closed the plane: this is its last status."""
    been_to: int = 0
    """First step that no start before had planned, as far as their last statuses told; this one may have gone back."""

    @property
    def reached(self) -> int:
        """First step that neither this start nor one before had planned."""
        planned = (role.figures.get("planned_step", 0.0) for role in self.roles)
        return max(self.been_to, *map(int, planned), 0)


def status_of(
    roles: Mapping[str, Progress], before: Mapping[str, Progress], now_s: float
) -> list[RoleLine]:
    """Return the line of every role, without its memory, in the order of their names.

    Args:
        roles: Last heartbeats by name.
        before: Heartbeats of an earlier look.
        now_s: The current time of the heartbeats' clock.
    """
    # Only the end of the chain: a role that waits for one in trouble is not in trouble itself.
    causes = {
        way_of(name, roles, now_s)[-1]
        for name, role in roles.items()
        if is_rank(name) and _waited_s(role, now_s) > _TROUBLE_S
    }
    return [_line(roles[n], before.get(n), now_s, is_cause=n in causes) for n in sorted(roles)]


def _waited_s(rank: Progress, now_s: float) -> float:
    """Return how long a rank has waited for its batch."""
    return max((now_s - task.since_s for task in rank.tasks if task.waits_for), default=0.0)


def _is_held_up(role: Progress, now_s: float) -> bool:
    calls_s = max((now_s - call.since_s for call in role.calls), default=0.0)
    return is_silent(role, now_s) or role.figures.get(REPEATED, 0.0) > 0 or calls_s > _TROUBLE_S


def _line(role: Progress, before: Progress | None, now_s: float, *, is_cause: bool) -> RoleLine:
    age_s = max(0.0, now_s - role.beat_s)
    # A call to a store comes first, because the activity waits for it.
    task = (*role.calls, *role.tasks)[:1]
    waits_for = next((t.waits_for for t in role.tasks if t.waits_for), ())
    doing = task[0].doing if task else "idle"
    return RoleLine(
        name=role.name,
        pid=role.pid,
        state=_silent(role) if is_silent(role, now_s) else doing,
        age_s=age_s,
        task_s=max(0.0, now_s - task[0].since_s) if task else 0.0,
        waits_for=waits_for,
        figures=dict(role.figures),
        rates=_rates(role, before),
        memory_bytes=None,
        log=role.log,
        host=role.host,
        in_trouble=is_cause or _is_held_up(role, now_s),
    )


def _silent(role: Progress) -> str:
    return "ended" if role.has_ended else "stopped"


def _rates(role: Progress, before: Progress | None) -> dict[str, float]:
    # A new process counts from zero.
    if before is None or before.pid != role.pid or role.beat_s <= before.beat_s:
        return {}
    # Measured between its heartbeats, because looks are uneven and two may show the same heartbeat.
    seconds = role.beat_s - before.beat_s
    return {
        name: max(0.0, value - before.figures.get(name, 0.0)) / seconds
        for name, value in role.figures.items()
        if name.endswith(_TOTAL)
    }


@dataclass(slots=True)
class SkippedRecords:
    """Logs bad records that steps passed: the first of each source, and each doubling of their number.

    It runs in the process of the ranks, because people who watch a job do not read the planner's log.
    """

    _told: dict[str, int] = field(default_factory=dict, init=False)
    """Count of each source at its last line."""

    def see(self, beats: Mapping[str, Progress]) -> tuple[str, ...]:
        """Return a line for each source that is due, by the counts in the planner's heartbeat."""
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
    """Return whether a count has reached another power of two; a line for each record would be too many."""
    return told.bit_length() < count.bit_length()


def said_of_skipped(source: str, count: int) -> str:
    """Return the line about a source with this many skipped bad records."""
    times = "once" if count == 1 else f"{count} times"
    return (
        f"source {source}: records that cannot be decoded were skipped {times} so far; reported again at "
        f"{1 << count.bit_length()}; its loader's lines, and `omniload mix stats`, say what is wrong with the first"
    )

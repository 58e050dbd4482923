"""Heartbeats of the roles, and how a wait is followed to the role that causes it.

A role's ``Progress`` is its heartbeat: what it does, since when, and which other roles it waits
for. All seconds are of one clock, which writers and readers share.
"""

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from omniload.base.state import JsonObject

__all__ = [
    "AFTER_A_RANK",
    "PLANNED_ALL",
    "SILENT_S",
    "Progress",
    "Task",
    "Waits",
    "Watched",
    "dp_rank_of",
    "ended_rank",
    "is_rank",
    "is_silent",
    "rank_name",
    "reason_of",
    "way_of",
]

AFTER_A_RANK = (
    "resize to the ranks that are left, or, if the ranks of the job cannot change, start again from the last "
    "checkpoint"
)
"""Remedy once a rank has ended."""
PLANNED_ALL = "has planned every step before"
"""Begins the text of a planner that has planned the last step."""
_RANK = "rank dp="
SILENT_S = 5.0
"""Heartbeats come once a second. If the last one is older than this, the role is stopped or its host too busy."""

_SAME_CALL_S = 0.5
"""Tolerance for the beginning of a call: the clocks of two hosts are compared again and again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One activity of a role."""

    doing: str
    """Words that follow the role's name, such as ``reads source web``."""
    since_s: float
    waits_for: tuple[str, ...] = ()
    """Names of the roles that the activity waits for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """A role at its last heartbeat."""

    name: str
    """``planner``, ``loader-0``, ``constructor-0``, ``rank dp=1``."""
    pid: int
    beat_s: float
    """Time of the heartbeat."""
    tasks: tuple[Task, ...]
    """Activities, the oldest first."""
    calls: tuple[Task, ...] = ()
    """Calls to a store that are under way in its process, the oldest first."""
    figures: Mapping[str, float] = field(default_factory=dict)
    """Its own figures by name; names of counters end in ``_total``."""
    log: str = ""
    """Its log file; empty if there is none."""
    host: str = ""
    """Name of its host, for people."""
    is_cut_off: bool = False
    """Whether its host did not answer the last request for heartbeats."""
    has_ended: bool = False
    """For a rank without heartbeats: whether its process is known to be gone, or to have closed its loader."""

    def moved(self, by_s: float) -> "Progress":
        """Return the heartbeat in the time of another host, whose clock is ahead by ``by_s`` seconds."""
        tasks, calls = (
            tuple(replace(task, since_s=task.since_s + by_s) for task in several)
            for several in (self.tasks, self.calls)
        )
        return replace(self, beat_s=self.beat_s + by_s, tasks=tasks, calls=calls)

    def to_json(self) -> JsonObject:
        """Return the heartbeat as plain JSON."""
        return asdict(self)

    @classmethod
    def from_json(cls, stored: Mapping[str, Any]) -> "Progress":
        """Return the heartbeat that ``to_json`` stored."""
        tasks, calls = (
            tuple(Task(**{**task, "waits_for": tuple(task["waits_for"])}) for task in stored[key])
            for key in ("tasks", "calls")
        )
        return cls(**{**stored, "tasks": tasks, "calls": calls})


@dataclass(slots=True)
class Watched:
    """The last heartbeat of a role, and for how long the observer has seen no newer one."""

    beat_s: float | None = None
    """Time of the last heartbeat; ``None`` before the first."""
    silent_s: float = 0.0
    stopped_s: float | None = None
    """Seconds since the role was first seen stopped; ``None`` while it runs."""
    call: Task | None = None
    """Its oldest call to a store that is under way."""
    call_s: float = 0.0
    """For how long that call has been seen."""

    def see(self, progress: Progress | None, *, is_stopped: bool, passed_s: float) -> None:
        """Note another look, also at one that has not begun, or whose host is not heard."""
        if not is_stopped:
            self.stopped_s = None
        else:
            self.stopped_s = 0.0 if self.stopped_s is None else self.stopped_s + passed_s
        if progress is None:
            # A role that was heard before is on a host that does not answer now.
            self.silent_s += passed_s if self.beat_s is None else 0.0
            return
        # Time is counted by looks, not by the age of the heartbeat, so that a job which was suspended replaces nobody.
        self.silent_s = self.silent_s + passed_s if self.beat_s == progress.beat_s else 0.0
        self.beat_s = progress.beat_s
        call = progress.calls[0] if progress.calls else None
        if call is not None and self.call is not None and _is_same(self.call, call):
            self.call_s += passed_s
        else:
            self.call, self.call_s = call, 0.0


def _is_same(first: Task, now: Task) -> bool:
    """Return whether two observations are of one call, even if its host's clock offset was corrected meanwhile."""
    return now.doing == first.doing and abs(now.since_s - first.since_s) < _SAME_CALL_S


@dataclass(frozen=True, slots=True, kw_only=True)
class Waits:
    """What holds up the next plan: ranks that are behind, or sources with too few known samples."""

    text: str
    """Words that follow the planner's name."""
    ranks: tuple[str, ...] = ()
    """Names of the ranks."""
    sources: tuple[int, ...] = ()
    """Sources with a request under way."""


def rank_name(dp_rank: int, cp_rank: int, cp_size: int) -> str:
    """Return the name of a rank as a role."""
    return f"{_RANK}{dp_rank}" + (f" cp={cp_rank}" if cp_size > 1 else "")


def is_rank(name: str) -> bool:
    """Return whether a role is a rank."""
    return name.startswith(_RANK)


def dp_rank_of(name: str) -> int:
    """Return the dp coordinate of a rank from its name as a role."""
    return int(name.removeprefix(_RANK).partition(" ")[0])


def reason_of(name: str, roles: Mapping[str, Progress], now_s: float) -> str:
    """Say why a role does not answer, by following its waits to the role that waits for no other.

    Args:
        name: Role that the caller waits for.
        roles: Last heartbeats by name.
        now_s: The current time of the heartbeats' clock.

    Returns:
        The roles of the chain in order, each with its activity. The last one is the cause, named with its log file.
    """
    names = way_of(name, roles, now_s)
    said = "; ".join(_said_of(each, roles.get(each), now_s) for each in names)
    cause = roles.get(names[-1])
    return f"{said} (its lines: {cause.log})" if cause is not None and cause.log else said


def ended_rank(name: str, roles: Mapping[str, Progress], now_s: float) -> bool:
    """Return whether a wait for ``name`` comes from a rank that is known to be gone, or to have closed its loader."""
    cause = roles.get(way_of(name, roles, now_s)[-1])
    return cause is not None and cause.has_ended and is_silent(cause, now_s)


def way_of(name: str, roles: Mapping[str, Progress], now_s: float) -> list[str]:
    """Return the names of the roles in the chain of ``reason_of``, the cause last."""
    passed: dict[str, None] = {}
    name = _newest(name, roles)
    while name not in passed:
        passed[name] = None
        role = roles.get(name)
        # While a call to a store is under way, everything that the role does waits for it.
        if role is None or is_silent(role, now_s) or not role.tasks or role.calls:
            break
        # Of several activities, the one that waits for other roles holds up the rest.
        ahead = [task for task in role.tasks if task.waits_for] or list(role.tasks)
        if not ahead[0].waits_for:
            break
        name = _newest(_worst(ahead[0].waits_for, roles, now_s), roles)
    return list(passed)


def _newest(name: str, roles: Mapping[str, Progress]) -> str:
    """Return the name of a role's last life with a heartbeat, because a waiter may know only the name of the role."""
    if name in roles:
        return name
    lives = [each for each in roles if each.startswith(f"{name}+")]
    # Compared as numbers, not as names: +10 comes after +9.
    return max(lives, key=lambda each: int(each.rpartition("+")[2]), default=name)


def _said_of(name: str, role: Progress | None, now_s: float) -> str:
    if role is None:
        why = "has no handle" if name.startswith(_RANK) else "has not started yet"
        return f"{name} {why}: no heartbeat of it was ever seen"
    beat = f"process {role.pid}, last heartbeat {max(0.0, now_s - role.beat_s):.0f} s ago"
    if is_silent(role, now_s) and role.is_cut_off:
        seen = f"{beat}, on {role.host}" if role.pid else "no heartbeat of it was ever seen"
        return f"{name} ({seen}) cannot be reached: its host, or the network to it, does not answer"
    if is_silent(role, now_s) and role.has_ended:
        return f"{name} ({beat}) has ended, or has closed its loader, and is waited for: {AFTER_A_RANK}"
    if is_silent(role, now_s):
        return f"{name} ({beat}) is stopped, or its machine is too busy to run it"
    doing = [f"{t.doing} for {now_s - t.since_s:.0f} s" for t in (*role.tasks[:1], *role.calls[:1])]
    return f"{name} ({beat}) {', '.join(doing) or 'does nothing'}"


def _worst(names: Iterable[str], roles: Mapping[str, Progress], now_s: float) -> str:
    """Return the role that is most likely the cause: a silent one, otherwise the one with the oldest activity."""

    def held_s(name: str) -> float:
        role = roles.get(name)
        if role is None or is_silent(role, now_s):
            return float("inf")
        return max((now_s - task.since_s for task in (*role.tasks, *role.calls)), default=0.0)

    return max(names, key=held_s)


def is_silent(role: Progress, now_s: float) -> bool:
    """Return whether a role is stopped, or its host too busy to run it."""
    return now_s - role.beat_s > SILENT_S

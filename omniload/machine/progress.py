"""What every role says of itself, and how a wait is followed to the role that holds it up.

A role's ``Progress`` is its heartbeat: what it does, since when, and which roles it waits
for in turn. Seconds are of one clock, shared by all who write and read.
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

AFTER_A_RANK = "resize the ranks that are left, or where ranks stay as they are start again from the last checkpoint"
"""What to do once a rank has ended."""
PLANNED_ALL = "has planned every step before"
"""Begins what a planner says once there is no further step."""
_RANK = "rank dp="
SILENT_S = 5.0
"""A role whose last heartbeat is older is stopped, or its machine too busy to run it; they come once a second."""

_SAME_CALL_S = 0.5
"""Less than this may lie between two beginnings of one call: clocks of two hosts are compared again and again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One thing that a role does at present."""

    doing: str
    """As words that follow the role's name: ``reads source web``."""
    since_s: float
    waits_for: tuple[str, ...] = ()
    """Names of the roles without which it does not end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """A role at its last heartbeat."""

    name: str
    """``planner``, ``loader-0``, ``constructor-0``, ``rank dp=1``."""
    pid: int
    beat_s: float
    """When it said so."""
    tasks: tuple[Task, ...]
    """The oldest first."""
    calls: tuple[Task, ...] = ()
    """Calls to a store that are under way in its process, the oldest first."""
    figures: Mapping[str, float] = field(default_factory=dict)
    """What it counts of itself; what only grows ends in ``_total``."""
    log: str = ""
    """File of its lines; empty without one."""
    host: str = ""
    """What people call the host that it is on."""
    is_cut_off: bool = False
    """Whether its host was asked for heartbeats just now, and did not answer."""
    has_ended: bool = False
    """Of a rank without heartbeats: whether its process is seen to be gone, or to have closed its loader."""

    def moved(self, by_s: float) -> "Progress":
        """Return it by another host's clock, which is ahead by so many seconds."""
        tasks, calls = (
            tuple(replace(task, since_s=task.since_s + by_s) for task in several)
            for several in (self.tasks, self.calls)
        )
        return replace(self, beat_s=self.beat_s + by_s, tasks=tasks, calls=calls)

    def to_json(self) -> JsonObject:
        """Return it as plain JSON."""
        return asdict(self)

    @classmethod
    def from_json(cls, stored: Mapping[str, Any]) -> "Progress":
        """Return what ``to_json`` gave."""
        tasks, calls = (
            tuple(Task(**{**task, "waits_for": tuple(task["waits_for"])}) for task in stored[key])
            for key in ("tasks", "calls")
        )
        return cls(**{**stored, "tasks": tasks, "calls": calls})


@dataclass(slots=True)
class Watched:
    """The last heartbeat of a role, and for how long whoever looks at it has seen no other."""

    beat_s: float | None = None
    """``None`` until there is one."""
    silent_s: float = 0.0
    stopped_s: float | None = None
    """Since it was first seen stopped; ``None`` while it runs."""
    call: Task | None = None
    """The oldest call to a store that it has under way."""
    call_s: float = 0.0
    """For how long it has been seen."""

    def see(self, progress: Progress | None, *, is_stopped: bool, passed_s: float) -> None:
        """Note another look, also at one that has not begun, or whose host is not heard."""
        if not is_stopped:
            self.stopped_s = None
        else:
            self.stopped_s = 0.0 if self.stopped_s is None else self.stopped_s + passed_s
        if progress is None:
            # One that was heard before is on a host that does not answer just now.
            self.silent_s += passed_s if self.beat_s is None else 0.0
            return
        # By looks, not by the age of the heartbeat: a job that is suspended and goes on replaces nobody.
        self.silent_s = self.silent_s + passed_s if self.beat_s == progress.beat_s else 0.0
        self.beat_s = progress.beat_s
        call = progress.calls[0] if progress.calls else None
        if call is not None and self.call is not None and _is_same(self.call, call):
            self.call_s += passed_s
        else:
            self.call, self.call_s = call, 0.0


def _is_same(first: Task, now: Task) -> bool:
    """Tell whether a call is the one that was seen first, also where the clock of its host is known better by now."""
    return now.doing == first.doing and abs(now.since_s - first.since_s) < _SAME_CALL_S


@dataclass(frozen=True, slots=True, kw_only=True)
class Waits:
    """What holds up the next plan: ranks that are behind, or sources of which too little is known."""

    text: str
    """As words that follow the planner's name."""
    ranks: tuple[str, ...] = ()
    """Names of the ranks."""
    sources: tuple[int, ...] = ()
    """Sources that were asked for more."""


def rank_name(dp_rank: int, cp_rank: int, cp_size: int) -> str:
    """Return the name of a rank as a role."""
    return f"{_RANK}{dp_rank}" + (f" cp={cp_rank}" if cp_size > 1 else "")


def is_rank(name: str) -> bool:
    """Tell whether a role is a rank."""
    return name.startswith(_RANK)


def dp_rank_of(name: str) -> int:
    """Return the place along dp of a rank, by its name as a role."""
    return int(name.removeprefix(_RANK).partition(" ")[0])


def reason_of(name: str, roles: Mapping[str, Progress], now_s: float) -> str:
    """Say why a role does not answer: follow what it waits for to the role that waits for no other.

    Args:
        name: Role that is waited for.
        roles: Last heartbeats by name.
        now_s: Now, by the clock of the heartbeats.

    Returns:
        The roles on the way in order, each with what it does; the last one is the cause, told with the file of
        its lines.
    """
    names = way_of(name, roles, now_s)
    said = "; ".join(_said_of(each, roles.get(each), now_s) for each in names)
    cause = roles.get(names[-1])
    return f"{said} (its lines: {cause.log})" if cause is not None and cause.log else said


def ended_rank(name: str, roles: Mapping[str, Progress], now_s: float) -> bool:
    """Tell whether a wait for ``name`` is one for a rank that is seen to be gone, or to have closed its loader."""
    cause = roles.get(way_of(name, roles, now_s)[-1])
    return cause is not None and cause.has_ended and is_silent(cause, now_s)


def way_of(name: str, roles: Mapping[str, Progress], now_s: float) -> list[str]:
    """Return the names of the roles that a wait for ``name`` is a wait for, as ``reason_of`` does; the cause last."""
    passed: dict[str, None] = {}
    name = _newest(name, roles)
    while name not in passed:
        passed[name] = None
        role = roles.get(name)
        # While a call to a store is under way, all that the role does waits for that.
        if role is None or is_silent(role, now_s) or not role.tasks or role.calls:
            break
        # A role may do several things: the one that waits for others is what holds the rest up.
        ahead = [task for task in role.tasks if task.waits_for] or list(role.tasks)
        if not ahead[0].waits_for:
            break
        name = _newest(_worst(ahead[0].waits_for, roles, now_s), roles)
    return list(passed)


def _newest(name: str, roles: Mapping[str, Progress]) -> str:
    """Return the name of the last life of a role with a heartbeat: whoever waits may know the role only."""
    if name in roles:
        return name
    lives = [each for each in roles if each.startswith(f"{name}+")]
    # By number, not by name: +10 comes after +9.
    return max(lives, key=lambda each: int(each.rpartition("+")[2]), default=name)


def _said_of(name: str, role: Progress | None, now_s: float) -> str:
    if role is None:
        why = "has no handle" if name.startswith(_RANK) else "has not started yet"
        return f"{name} {why}: no heartbeat of it was ever seen"
    beat = f"process {role.pid}, last heartbeat {max(0.0, now_s - role.beat_s):.0f} s ago"
    if is_silent(role, now_s) and role.is_cut_off:
        seen = f"{beat}, on {role.host}" if role.pid else "no heartbeat of it was ever seen"
        return f"{name} ({seen}) is out of reach: its host, or the way to it, does not answer"
    if is_silent(role, now_s) and role.has_ended:
        return f"{name} ({beat}) has ended, or has closed its loader, and is waited for: {AFTER_A_RANK}"
    if is_silent(role, now_s):
        return f"{name} ({beat}) is stopped, or its machine is too busy to run it"
    doing = [f"{t.doing} for {now_s - t.since_s:.0f} s" for t in (*role.tasks[:1], *role.calls[:1])]
    return f"{name} ({beat}) {', '.join(doing) or 'does nothing'}"


def _worst(names: Iterable[str], roles: Mapping[str, Progress], now_s: float) -> str:
    """Return the role that is most likely the cause: one not heard of, else the one at its task the longest."""

    def held_s(name: str) -> float:
        role = roles.get(name)
        if role is None or is_silent(role, now_s):
            return float("inf")
        return max((now_s - task.since_s for task in (*role.tasks, *role.calls)), default=0.0)

    return max(names, key=held_s)


def is_silent(role: Progress, now_s: float) -> bool:
    """Tell whether a role is stopped, or its machine too busy to run it."""
    return now_s - role.beat_s > SILENT_S

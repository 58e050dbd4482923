"""Comparison of looks at a running data plane: how long ranks waited and for whom, and how far each rank is."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from omniload.actors.status_file import read_status
from omniload.base.errors import StateError
from omniload.machine.progress import PLANNED_ALL, is_rank
from omniload.machine.status import PlaneStatus, RoleLine

__all__ = [
    "OLD_S",
    "lags_of",
    "last_steps",
    "pace_of",
    "passed_s",
    "said_of_untaken",
    "taken_steps",
    "waited_share",
    "waits_by_way",
]

OLD_S = 5.0
"""Age of a status whose plane has ended, or whose machine is too busy to write it."""

_WRITTEN_EVERY_S = 1.0
_SHOWN = 8
"""Ranks named in a sentence."""
_WAITED, _TAKEN, _STEP = "wait_seconds_total", "taken_steps_total", "taken_step"


def lags_of(look: PlaneStatus, pace: float) -> dict[str, float]:
    """Return how many steps each rank is behind the first, less those it may have taken since its last heartbeat.

    Args:
        look: The status; the heartbeats of ranks are up to a second old, each by a different time.
        pace: Steps per second of these ranks.
    """
    ages_s = {role.name: role.age_s for role in look.roles}
    # A rank that has not taken its first step is not behind, because it may still load its model.
    taken = {name: steps for name, steps in taken_steps(look).items() if steps}
    first = max(taken, key=lambda name: taken[name], default="")
    return {
        name: taken[first] - steps - pace * max(0.0, ages_s[name] - ages_s[first])
        for name, steps in taken.items()
    }


def pace_of(looks: Sequence[PlaneStatus]) -> float:
    """Return the largest number of steps per second that a rank took."""
    roles = [role for look in looks for role in look.roles if is_rank(role.name)]
    return max((role.rates.get(_TAKEN, 0.0) for role in roles), default=0.0)


def taken_steps(status: PlaneStatus) -> dict[str, float]:
    """Return how many steps each rank has taken since the plane was opened."""
    return {role.name: role.figures.get(_TAKEN, 0.0) for role in status.roles if is_rank(role.name)}


def last_steps(status: PlaneStatus) -> dict[str, int | None]:
    """Return the last step that each rank has taken, ``None`` for none; a rank that counts by itself is left out."""
    figures = {role.name: role.figures for role in status.roles if is_rank(role.name)}
    return {
        name: int(told[_STEP]) if _STEP in told else None
        for name, told in figures.items()
        if _STEP in told or not told.get(_TAKEN)
    }


def said_of_untaken(run: Path, step: int) -> list[str]:
    """Return a note if ranks have not taken a step since the latest start, so that it was not trained on yet."""
    try:
        last = last_steps(read_status(run))
    except StateError:  # no record was kept
        return []
    late = [name for name, taken in last.items() if taken is None or taken < step]
    who = "any rank" if len(late) == len(last) else ", ".join(late[:_SHOWN])
    said = f"step {step:,} is planned ahead, and not taken by {who} as of the run's last status"
    return [said] if late else []


def passed_s(first: PlaneStatus, last: PlaneStatus) -> float:
    """Return the seconds between two looks, by a monotonic clock if one process has written both."""
    if first.pid == last.pid and first.up_s and last.up_s >= first.up_s:
        return last.up_s - first.up_s
    return max(0.0, last.written_at - first.written_at)


def waited_share(first: PlaneStatus, last: PlaneStatus) -> float | None:
    """Return the share of the time between two looks that ranks waited, mean over ranks; ``None`` without reports."""
    seconds = passed_s(first, last)
    before = {role.name: _waited_s(role) for role in first.roles}
    waited = [
        # A role that was replaced meanwhile counts from 0 again.
        max(0.0, _waited_s(role) - before[role.name])
        for role in last.roles
        if _WAITED in role.figures and role.name in before
    ]
    if not waited or seconds <= 0:
        return None
    return sum(min(each, seconds) for each in waited) / len(waited) / seconds


def _waited_s(role: RoleLine) -> float:
    """Return how long a role has waited, including its present wait, because its figure grows only when a wait ends."""
    return role.figures.get(_WAITED, 0.0) + (role.task_s if role.waits_for else 0.0)


def waits_by_way(looks: Sequence[PlaneStatus]) -> dict[tuple[str, ...], float]:
    """Return the seconds that ranks waited, by the chain of roles that a wait leads through, from the rank on.

    A look counts for no longer than the time since the previous one. So a change that happens while a status is
    written, and lasts only a moment, counts as nothing.
    """
    ways_s: dict[tuple[str, ...], float] = {}
    # The first look also counts for a second, because minutes of waiting before it were not observed.
    looked_s = _WRITTEN_EVERY_S
    for look, after in zip(looks, [*looks[1:], None], strict=True):
        roles = {role.name: role for role in look.roles}
        for name in filter(is_rank, roles):
            if roles[name].waits_for:
                way = _way(name, roles)
                if (end := roles.get(way[-1])) is not None and end.state.startswith(PLANNED_ALL):
                    continue  # no step is to come, and the ranks wait only to learn so
                seconds = min(roles[name].task_s, looked_s)
                ways_s[way] = ways_s.get(way, 0.0) + seconds
        looked_s = 0.0 if after is None else passed_s(look, after)
    return ways_s


def _way(rank: str, roles: Mapping[str, RoleLine]) -> tuple[str, ...]:
    """Follow a rank's wait to the role that waits for no other."""
    passed = [rank]
    # Each role once, because roles that wait for each other would be followed in a circle.
    while waits_for := [each for each in _waits_of(passed[-1], roles) if each not in passed]:
        passed.append(max(waits_for, key=lambda each: roles[each].task_s if each in roles else 0.0))
    return tuple(passed)


def _waits_of(name: str, roles: Mapping[str, RoleLine]) -> tuple[str, ...]:
    role = roles.get(name)
    return () if role is None else role.waits_for

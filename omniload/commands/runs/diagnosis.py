"""What looks at a running plane tell: steps that ranks have taken, how long they waited, and which role a wait led to.

A look is the status of all roles at one moment.
"""

from collections.abc import Mapping, Sequence

from omniload.actors.status_file import PlaneStatus, RoleLine
from omniload.machine.progress import is_rank

__all__ = ["taken_steps", "waited_share", "waits_by_way"]

_WRITTEN_EVERY_S = 1.0
_WAITED = "wait_seconds_total"


def taken_steps(status: PlaneStatus) -> dict[str, float]:
    """Return how many steps each rank has taken since the plane was opened."""
    return {
        role.name: role.figures.get("taken_steps_total", 0.0)
        for role in status.roles
        if is_rank(role.name)
    }


def waited_share(first: PlaneStatus, last: PlaneStatus) -> float | None:
    """Return the share of the time between two looks that ranks waited, mean over ranks; ``None`` where none tells."""
    seconds = last.written_at - first.written_at
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
    """Return how long a role has waited, the wait that it is in among it: its figure grows where one ends."""
    return role.figures.get(_WAITED, 0.0) + (role.task_s if role.waits_for else 0.0)


def waits_by_way(looks: Sequence[PlaneStatus]) -> dict[tuple[str, ...], float]:
    """Return how many seconds ranks waited, by the roles that a wait led through, from the rank on.

    A look counts for no longer than the time since the one before: what changes hands while a status is written,
    and is over in a moment, counts for nothing.
    """
    ways_s: dict[tuple[str, ...], float] = {}
    # Of the first look a second too: a wait that went on for minutes before it is not what was looked at.
    before_s = looks[0].written_at - _WRITTEN_EVERY_S
    for look in looks:
        roles = {role.name: role for role in look.roles}
        for name in filter(is_rank, roles):
            if roles[name].waits_for:
                way = _way(name, roles)
                seconds = max(0.0, min(roles[name].task_s, look.written_at - before_s))
                ways_s[way] = ways_s.get(way, 0.0) + seconds
        before_s = look.written_at
    return ways_s


def _way(rank: str, roles: Mapping[str, RoleLine]) -> tuple[str, ...]:
    """Follow a rank's wait to the role that waits for no other."""
    passed = [rank]
    # Each once: roles that wait for each other would be followed round and round.
    while waits_for := [each for each in _waits_of(passed[-1], roles) if each not in passed]:
        passed.append(max(waits_for, key=lambda each: roles[each].task_s if each in roles else 0.0))
    return tuple(passed)


def _waits_of(name: str, roles: Mapping[str, RoleLine]) -> tuple[str, ...]:
    role = roles.get(name)
    return () if role is None else role.waits_for

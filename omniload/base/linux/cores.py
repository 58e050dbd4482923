"""Limits of the cgroup and the user: usable cores, and how many processes and threads may still be started.

A container with a limit of 4 cores may run on all 200 cores of its machine. It is stopped for the rest of each tenth
of a second once it has used the time of 4 cores. Neither Python's counts nor the affinity show this limit. If there is
no room for a thread, native libraries abort the process, or wait for ever for the thread's work.
"""

import math
import os
import re
import resource
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

__all__ = ["TaskRoom", "cores_here", "task_room"]

_MEMBERSHIP, _GROUPS = Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")
_V1_CONTROLLER = "cpu"
_PROCESSES = Path("/proc")
_MANY = 1 << 13
"""Limit from which on a user's running processes are not counted."""
_STATUS = re.compile(r"^Uid:\s+([0-9]+).*^Threads:\s+([0-9]+)", re.MULTILINE | re.DOTALL)


def cores_here(membership: Path = _MEMBERSHIP, groups: Path = _GROUPS) -> int:
    """Return the number of cores that this process may use, at least 1; a part of a core counts as one.

    Args:
        membership: The kernel's list of a process's cgroups, of version 1, 2 or both.
        groups: Folder where they are mounted; a container may see its own cgroup as the root.
    """
    quotas = _quotas(membership, groups)
    return max(1, min(len(os.sched_getaffinity(0)), *(math.ceil(each) for each in quotas), 1 << 20))


def _quotas(membership: Path, groups: Path) -> Iterator[float]:
    """Return the quota in cores of each cgroup of this process that has one, from its own up to the root."""
    for folder, is_v1 in _groups_of(_V1_CONTROLLER, membership, groups):
        if is_v1:
            yield from _quota(folder / "cpu.cfs_quota_us", folder / "cpu.cfs_period_us")
        else:
            yield from _quota(folder / "cpu.max")


def _groups_of(
    controller: str, membership: Path = _MEMBERSHIP, groups: Path = _GROUPS
) -> Iterator[tuple[Path, bool]]:
    """Return the folders of the cgroups of this process, from its own up to the root.

    Args:
        controller: Name of the controller in cgroups of version 1.
        membership: As for ``cores_here``.
        groups: As for ``cores_here``.

    Returns:
        Each folder, and whether it is of version 1.
    """
    lines: list[str] = []
    with suppress(OSError):
        lines = membership.read_text().splitlines()
    for line in lines:
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        own = PurePosixPath(path.lstrip("/"))
        for folder in (own, *own.parents) if path.strip("/") else (own,):
            if not controllers:
                yield groups / folder, False
            elif controller in controllers.split(","):
                yield groups / controllers / folder, True


def _quota(*files: Path) -> Iterator[float]:
    """Return a quota in cores, from microseconds of each period; nothing without a quota or without the files."""
    with suppress(OSError, ValueError, ZeroDivisionError):
        quota_us, period_us = " ".join(each.read_text() for each in files).split()
        if quota_us not in {"max", "-1"}:
            yield int(quota_us) / int(period_us)


@dataclass(frozen=True, slots=True)
class TaskRoom:
    """A limit of processes and threads, and the number that it leaves."""

    name: str
    """Name of what sets the limit."""
    limit: int
    left: int
    """Largest possible number, because processes that cannot be seen from here count as well."""


def task_room(processes: Path = _PROCESSES) -> TaskRoom | None:
    """Return the limit that leaves the fewest processes and threads; ``None`` if no low limit is set."""
    return min((*_of_groups(), *_of_user(processes)), key=lambda room: room.left, default=None)


def _of_groups() -> Iterator[TaskRoom]:
    for folder, _ in _groups_of("pids"):
        with suppress(OSError, ValueError):  # no such file, or no limit: "max"
            limit = int((folder / "pids.max").read_text())
            left = limit - int((folder / "pids.current").read_text())
            yield TaskRoom(f"pids.max of its cgroup ({folder})", limit, max(0, left))


def _of_user(processes: Path) -> Iterator[TaskRoom]:
    limit, user = resource.getrlimit(resource.RLIMIT_NPROC)[0], os.getuid()
    if user == 0 or not 0 <= limit < _MANY:  # root has none
        return
    running = 0
    for status in processes.glob("[0-9]*/status"):
        with suppress(OSError):  # it has ended meanwhile
            found = _STATUS.search(status.read_text())
            running += int(found[2]) if found is not None and int(found[1]) == user else 0
    yield TaskRoom(f"ulimit -u of user {user}", limit, max(0, limit - running))

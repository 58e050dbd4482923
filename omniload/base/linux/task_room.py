"""How many processes and threads may begin yet, where a container, a job or a user has a limit of them.

Native libraries abort the process that gets no thread, or wait for ever for what it was to do.
"""

import os
import re
import resource
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from omniload.base.linux.cores import groups_of

__all__ = ["TaskRoom", "task_room"]

_PROCESSES = Path("/proc")
_MANY = 1 << 13
"""Where a user may have more, it is not looked for how many there are."""
_STATUS = re.compile(r"^Uid:\s+([0-9]+).*^Threads:\s+([0-9]+)", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True, slots=True)
class TaskRoom:
    """A limit of processes and threads, and what it leaves."""

    name: str
    """What sets it."""
    limit: int
    left: int
    """At most: processes that cannot be seen from here count as well."""


def task_room(processes: Path = _PROCESSES) -> TaskRoom | None:
    """Return the limit that leaves the fewest processes and threads; ``None`` where there is none that is low."""
    return min((*_of_groups(), *_of_user(processes)), key=lambda room: room.left, default=None)


def _of_groups() -> Iterator[TaskRoom]:
    for folder, _ in groups_of("pids"):
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

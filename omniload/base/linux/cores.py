"""How many cores a process may use: those that it may run on, or fewer where its cgroup has a quota of time.

A container with a limit of 4 cores may run on all 200 of its machine, and is stopped for the rest of each tenth of a
second once they have used what 4 give. Neither Python's counts nor the affinity tell.
"""

import math
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path, PurePosixPath

__all__ = ["cores_here", "groups_of"]

_MEMBERSHIP, _GROUPS = Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")
_V1_CONTROLLER = "cpu"


def cores_here(membership: Path = _MEMBERSHIP, groups: Path = _GROUPS) -> int:
    """Return the cores that this process may use, at least 1; a part of a core counts as one.

    Args:
        membership: The kernel's list of the cgroups of a process, of version 1, 2 or both.
        groups: Where they are mounted; a container may see its own as the root.
    """
    quotas = _quotas(membership, groups)
    return max(1, min(len(os.sched_getaffinity(0)), *(math.ceil(each) for each in quotas), 1 << 20))


def _quotas(membership: Path, groups: Path) -> Iterator[float]:
    """Return the cores that each cgroup has that a process is in, from its own up to the root, where it has a quota."""
    for folder, is_v1 in groups_of(_V1_CONTROLLER, membership, groups):
        if is_v1:
            yield from _quota(folder / "cpu.cfs_quota_us", folder / "cpu.cfs_period_us")
        else:
            yield from _quota(folder / "cpu.max")


def groups_of(
    controller: str, membership: Path = _MEMBERSHIP, groups: Path = _GROUPS
) -> Iterator[tuple[Path, bool]]:
    """Return the folders of the cgroups that this process is in, each from its own up to the root.

    Args:
        controller: Name of it in cgroups of version 1.
        membership: As for ``cores_here``.
        groups: As for ``cores_here``.

    Returns:
        A folder, and whether it is of version 1.
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
    """Return the cores of a quota, in microseconds of each period; nothing where there is none, or no such file."""
    with suppress(OSError, ValueError, ZeroDivisionError):
        quota_us, period_us = " ".join(each.read_text() for each in files).split()
        if quota_us not in {"max", "-1"}:
            yield int(quota_us) / int(period_us)

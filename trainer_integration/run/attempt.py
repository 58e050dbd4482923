"""One attempt of a job: the processes that run, the memory they take, and what becomes of them that no exit tells.

Memory is the proportional set size, which counts a shared page once.
"""

import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import psutil

from trainer_integration.run.rank_process import RankProcess

if TYPE_CHECKING:
    from omniload.actors.ray.plane import RayPlane

__all__ = ["Attempt", "pss_by_role"]


@dataclass(slots=True)
class Attempt:
    """What runs at present."""

    number: int
    plane: "RayPlane | None" = None
    ranks: dict[int, RankProcess] = field(default_factory=dict)
    roles: Mapping[str, int] = field(default_factory=dict)
    is_ending: bool = False
    """Whether its processes are being ended: what ends now was ended by the launcher."""
    _stopped: set[int] = field(default_factory=set)

    @property
    def pids(self) -> dict[str, int]:
        """Processes by role: ``rank 0``, ``planner``, ``loader-0``, ..."""
        return {**{f"rank {rank}": p.pid for rank, p in dict(self.ranks).items()}, **self.roles}

    def newly_stopped(self) -> Iterator[str]:
        """Say of each rank that was stopped (SIGSTOP) since this was last asked what to do: its peers wait for it."""
        for rank, process in dict(self.ranks).items():
            if not process.is_stopped():
                self._stopped.discard(rank)
            elif rank not in self._stopped:
                self._stopped.add(rank)
                yield (
                    f"rank {rank} (process {process.pid}) is stopped, and all ranks wait for it: kill -CONT "
                    f"{process.pid} has it go on, kill -9 {process.pid} starts all again from the last checkpoint"
                )

    def without_ray(self) -> str:
        """Say which server of the data plane's own Ray has ended; empty while all run, or where there is none."""
        ended = "" if self.plane is None else self.plane.ended_service()
        return f"Ray's {ended}, and the data plane with it" if ended else ""

    def end_without_ray(self) -> str:
        """End the ranks where a server of their Ray has ended: no role can be replaced then, and they would wait.

        Returns:
            What ``without_ray`` says, the first time; empty else.
        """
        if self.is_ending or not (said := self.without_ray()):
            return ""
        self.is_ending = True
        for process in dict(self.ranks).values():
            process.kill()
        return said


def pss_by_role(pids: Mapping[str, int]) -> dict[str, int]:
    """Return the proportional set size of each process, and of the launcher's other children together.

    Args:
        pids: Processes by role.

    Returns:
        Bytes by role; ``launcher`` is this process, ``ray`` what Ray runs beside the actors. A
        process that has ended in the meantime is left out.
    """
    known = set(pids.values())
    sizes: dict[str, int] = {}
    for role, pid in {**pids, "launcher": os.getpid()}.items():
        with suppress(psutil.Error):
            sizes[role] = int(psutil.Process(pid).memory_full_info().pss)
    others = 0
    for child in psutil.Process().children(recursive=True):
        if child.pid not in known:
            with suppress(psutil.Error):
                others += int(child.memory_full_info().pss)
    if others:
        sizes["ray"] = others
    return sizes

"""Processor time and memory of processes, as the kernel reports them, by role of a plane or end of a call."""

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from operator import truediv
from pathlib import Path
from statistics import median
from typing import Any

import psutil

__all__ = [
    "Call",
    "PlaneSpent",
    "Spent",
    "by_role",
    "cores_at_rest",
    "measured_calls",
    "memory_of",
    "rays_own",
    "spent_at_full_speed",
    "spent_by",
]

_ROLE, _START_S = "the probe", 300.0
_WARM_UP, _TOGETHER = 20, 8
"""Calls that are under way at the same time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Spent:
    """Processor time of the roles of a plane in a period."""

    seconds: float
    """Duration of the period."""
    steps: int
    """Steps taken in the period."""
    by_role: Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlaneSpent:
    """Processor time of a plane, by role: ``planner``, ``loader``, ``constructor``, ``rank``, ``node``, ``opener``.

    ``rank`` is one rank in a process of its own. All other ranks are in the process of ``opener``.
    """

    steps: int
    """Steps taken at full speed."""
    step_s: Mapping[str, float]
    """Seconds of a step at full speed, less the time-driven work: the median of several turns."""
    mean_s: Mapping[str, float]
    """Mean over all turns, which includes occasional work: a block is decoded in one of many steps."""


def rays_own() -> list[psutil.Process]:
    """Return Ray's own processes: the children of this process that are not actors."""
    below = psutil.Process().children(recursive=True)
    return [process for process in below if not _name_of(process).startswith("ray::")]


def _name_of(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline()[:1])
    except psutil.Error:
        return ""


def memory_of(process: psutil.Process) -> int:
    """Return the memory of a process, with its part of shared pages; 0 if the process has ended."""
    try:
        return int(process.memory_full_info().pss)
    except psutil.Error:
        return 0


def spent_by(process: psutil.Process) -> float:
    """Return the processor seconds of a process so far, to the nanosecond if the kernel reports its threads."""
    spent_s = 0.0
    with suppress(OSError):  # the process has ended
        for task in Path(f"/proc/{process.pid}/task").iterdir():
            with suppress(OSError):  # the thread has ended
                spent_s += int((task / "schedstat").read_text().split()[0]) * 1e-9
    if spent_s:
        return spent_s
    with suppress(psutil.Error):
        found = process.cpu_times()
        return float(found.user + found.system)
    return 0.0


def by_role(
    before: Mapping[int, float], now: Mapping[int, float], roles: Mapping[int, str]
) -> dict[str, float]:
    """Return the processor time of each role between two readings; ``node`` is the time of processes without a role.

    A process that has ended, such as an unused worker, would yield a negative time, so it is left out.
    """
    found = dict.fromkeys((*roles.values(), "node"), 0.0)
    for pid in before.keys() & now.keys():
        found[roles.get(pid, "node")] += now[pid] - before[pid]
    return found


def cores_at_rest(rests: Sequence[Spent]) -> dict[str, float]:
    """Return the cores that each role uses while no rank asks for anything: the median of several periods."""
    roles = rests[0].by_role
    return {role: median(each.by_role[role] / each.seconds for each in rests) for role in roles}


def spent_at_full_speed(turns: Sequence[Spent], clock: Mapping[str, float]) -> PlaneSpent:
    """Return the processor time of a plane's step in its turns, less the time-driven work."""
    steps_T = [turn.steps for turn in turns]
    beyond_s = {
        role: [turn.by_role[role] - cores * turn.seconds for turn in turns]
        for role, cores in clock.items()
    }
    return PlaneSpent(
        steps=sum(steps_T),
        step_s={role: median(map(truediv, its, steps_T)) for role, its in beyond_s.items()},
        mean_s={role: sum(its) / sum(steps_T) for role, its in beyond_s.items()},
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """Seconds of a call, and memory."""

    waits_s: tuple[float, ...]
    """Seconds from each call to its answer, less the processor time of both ends; the calls are made one at a time."""
    asking_s: float
    """Processor time of the calling process, with several calls under way at once, as in a plane."""
    answering_s: float
    """Processor time of the answering process."""
    process_bytes: int
    """Memory of the process of an empty actor."""


class _Answering:
    """The answering end."""

    def answer(self) -> None: ...

    def spent(self) -> tuple[float, int]:
        """Return the processor seconds of this process so far, and its memory."""
        return time.process_time(), memory_of(psutil.Process())


def measured_calls(calls: int) -> Call:
    """Measure calls to an actor in this process's Ray that answers with nothing."""
    # The other functions of this module also work without Ray.
    from omniload.actors.ray.answers import answer_to  # noqa: PLC0415 -- an extra
    from omniload.actors.ray.environment import ray  # noqa: PLC0415 -- an extra

    remote: Any = ray.remote
    actor = remote(num_cpus=0)(_Answering).remote()
    _, process_bytes = answer_to(actor.spent.remote(), _ROLE, limit_s=_START_S)
    for _ in range(_WARM_UP):
        answer_to(actor.answer.remote(), _ROLE)
    rounds_s = []

    def one_by_one() -> None:
        for _ in range(calls):
            began_s = time.perf_counter()
            ray.get(actor.answer.remote())
            rounds_s.append(time.perf_counter() - began_s)

    def together() -> None:
        for _ in range(calls // _TOGETHER):
            ray.get([actor.answer.remote() for _ in range(_TOGETHER)])

    # The two ends work alternately while the caller waits, so the remaining time is that of the transport.
    ends_s = sum(_spent(actor, one_by_one)) / calls
    asking_s, answering_s = _spent(actor, together)
    done = calls // _TOGETHER * _TOGETHER
    return Call(
        waits_s=tuple(max(0.0, round_s - ends_s) for round_s in rounds_s),
        asking_s=asking_s / done,
        answering_s=answering_s / done,
        process_bytes=process_bytes,
    )


def _spent(actor: Any, work: Callable[[], None]) -> tuple[float, float]:  # noqa: ANN401 -- Ray's handle has no static type
    """Return the processor seconds that some work takes in this process and in the actor's."""
    from omniload.actors.ray.answers import answer_to  # noqa: PLC0415 -- an extra

    before_s, _ = answer_to(actor.spent.remote(), _ROLE)
    own_s = time.process_time()
    work()
    own_s = time.process_time() - own_s
    after_s, _ = answer_to(actor.spent.remote(), _ROLE)
    return own_s, after_s - before_s

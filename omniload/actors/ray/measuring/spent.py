"""Processor time and memory of processes, as the kernel tells them: of a plane by its roles, of a call by its ends."""

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
"""Calls that are under way at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Spent:
    """What the roles of a plane had of processors in a while."""

    seconds: float
    """How long it was."""
    steps: int
    """That were taken in it."""
    by_role: Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlaneSpent:
    """Processor time of a plane, by role: ``planner``, ``loader``, ``constructor``, ``rank``, ``node``, ``opener``.

    That of ``rank`` is of one, in a process of its own; the others are in that of ``opener``.
    """

    steps: int
    """That were taken at full speed."""
    step_s: Mapping[str, float]
    """Of a step at full speed, less what is done by the clock: the median of some turns."""
    mean_s: Mapping[str, float]
    """The mean of all turns, for what comes now and then: a block is decoded in one of many steps."""


def rays_own() -> list[psutil.Process]:
    """Return Ray's own processes: those below this one that are no actors."""
    below = psutil.Process().children(recursive=True)
    return [process for process in below if not _name_of(process).startswith("ray::")]


def _name_of(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline()[:1])
    except psutil.Error:
        return ""


def memory_of(process: psutil.Process) -> int:
    """Return its memory, what several share by parts; 0 where it has ended."""
    try:
        return int(process.memory_full_info().pss)
    except psutil.Error:
        return 0


def spent_by(process: psutil.Process) -> float:
    """Return the processor seconds of a process so far: to the nanosecond, of its threads, where the kernel tells."""
    spent_s = 0.0
    with suppress(OSError):  # it has ended
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
    """Return what each role had of processors meanwhile; ``node`` is what processes of no role had.

    One that has ended, as workers do that nobody needed, would have had less than nothing: it is left out.
    """
    found = dict.fromkeys((*roles.values(), "node"), 0.0)
    for pid in before.keys() & now.keys():
        found[roles.get(pid, "node")] += now[pid] - before[pid]
    return found


def cores_at_rest(rests: Sequence[Spent]) -> dict[str, float]:
    """Return the cores that each role has in use while nobody asks for anything: the median of some whiles."""
    roles = rests[0].by_role
    return {role: median(each.by_role[role] / each.seconds for each in rests) for role in roles}


def spent_at_full_speed(turns: Sequence[Spent], clock: Mapping[str, float]) -> PlaneSpent:
    """Return what a step of a plane took in its turns, less what was done by the clock."""
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
    """Seconds of a call."""

    waits_s: tuple[float, ...]
    """From asking to the answer, of each that came alone, less the processor time of both ends."""
    asking_s: float
    """Processor time of the process that asks, where some calls are under way at once, as they are in a plane."""
    answering_s: float
    """Of the one that answers."""
    process_bytes: int
    """Memory of an actor's process that holds nothing."""


class _Answering:
    """The end that answers."""

    def answer(self) -> None: ...

    def spent(self) -> tuple[float, int]:
        """Return the processor seconds of this process so far, and its memory."""
        return time.process_time(), memory_of(psutil.Process())


def measured_calls(calls: int) -> Call:
    """Measure calls to an actor in the Ray of this process that answers with nothing."""
    # What was spent is read without Ray, too.
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

    # Both ends work one after the other while the caller waits: what is left is the way itself.
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
    """Return the processor seconds of this process and of the actor's that something takes."""
    from omniload.actors.ray.answers import answer_to  # noqa: PLC0415 -- an extra

    before_s, _ = answer_to(actor.spent.remote(), _ROLE)
    own_s = time.process_time()
    work()
    own_s = time.process_time() - own_s
    after_s, _ = answer_to(actor.spent.remote(), _ROLE)
    return own_s, after_s - before_s

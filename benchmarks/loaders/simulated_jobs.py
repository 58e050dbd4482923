"""Jobs for comparison with simulations: one process with ranks as threads, or a plane on Ray with ranks as processes.

A job runs at several paces, one after the other: at full speed, and with a training time.
"""

import multiprocessing
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Barrier
from statistics import median

import psutil

from omniload.actors.address import PlaneAddress
from omniload.actors.opening import open_plane, runtime_of
from omniload.actors.plane import PlaneSpec
from omniload.actors.ray.measuring.spent import by_role, spent_by
from omniload.actors.ray.plane import RayPlane
from omniload.actors.ray.rank.joining import handle_in
from omniload.base.linux.kept_waiting import IdleBesideWork, kept_waiting_s
from omniload.client import Client
from omniload.simulation.figures import Waits

__all__ = ["Found", "Pace", "run"]

_SKIPPED = 8
"""Steps of a pace before the measured ones; by then the buffers are in their steady state."""
_LONGEST = 0.05
"""Part of the waits that count as the longest."""
_LONGEST_S, _END_S = 180.0, 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """The pace at which a job is driven."""

    step_s: float
    """Time of training, which all ranks begin together; with 0 each rank takes batches alone, at full speed."""
    steps: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """One run, or its simulation, at one pace."""

    steps: int
    seconds: float
    tokens_per_s: float
    by_role_s: Mapping[str, float]
    """Processor time of a step, by role."""
    waits: Waits
    cores: float
    """Cores that it used, or could have used."""
    idle: float
    """Part of the wanted core time that was not granted although a core was idle."""
    waits_s: Sequence[float] = ()
    """Wait for each step of a run; the waits of several runs together can only be computed from these."""
    own: Waits | None = None
    """Waits without the time in which the kernel kept a rank from a core although it was ready to run; of a
    simulation, waits on as many cores as there are processes."""
    kept: float = 0.0
    """Of the longest twentieth of a run's waits, the part that is not own; the middle one of these."""

    @property
    def trained_s(self) -> float:
        """Time of a step without the wait of its last rank: training, and the meeting of the ranks."""
        return self.seconds / self.steps - self.waits.mean_s

    @property
    def cpu_step_s(self) -> float:
        """Processor time of a step, of all processes."""
        return sum(self.by_role_s.values())

    @property
    def used(self) -> float:
        """Cores in use."""
        return self.cpu_step_s * self.steps / self.seconds


def run(spec: PlaneSpec, paces: Sequence[Pace]) -> list[Found]:
    """Run a job at each pace."""
    if runtime_of(spec) == "ray":
        return _in_processes(spec, paces)
    return _in_threads(spec, paces)


@dataclass(frozen=True, slots=True)
class _Taken:
    """Counted steps of a rank, at one pace."""

    waits_s: Sequence[float]
    own_s: Sequence[float]
    """Waits without the time in which the kernel kept the rank from a core."""
    aside_s: float
    """Processor time for meetings of the ranks and their wake-ups, which belongs to the benchmark alone."""


@dataclass(frozen=True, slots=True)
class _Seen:
    """Clocks at the start or the end of a pace."""

    at_s: float
    ours_s: Mapping[int, float]
    """Processor time of each process of the job."""
    whole_s: float
    """Processor time of the whole machine."""

    @classmethod
    def now(cls, processes: Sequence[psutil.Process]) -> "_Seen":
        """Read the clocks of the processes of the job."""
        ours_s = {process.pid: spent_by(process) for process in processes}
        whole = psutil.cpu_times()
        whole_s = whole.user + whole.nice + whole.system + whole.irq + whole.softirq
        return cls(time.perf_counter(), ours_s, whole_s)


def _found(
    spec: PlaneSpec,
    pace: Pace,
    seen: Sequence[_Seen],
    idle: float,
    taken: Sequence[_Taken],
    roles: Mapping[int, str],
) -> Found:
    began, ended = seen
    seconds = ended.at_s - began.at_s
    ours = by_role(began.ours_s, ended.ours_s, roles)
    role = "rank" if "rank" in ours else "process"
    # The other roles' share contains this time too, so it is subtracted from what the job used alone.
    its = {**ours, role: ours[role] - sum(each.aside_s for each in taken)}
    others = (ended.whole_s - began.whole_s - sum(ours.values())) / seconds
    cores = psutil.cpu_count() or 1
    of_steps_s, own_s = (
        tuple(map(max, zip(*of_ranks, strict=True)))
        for of_ranks in ([each.waits_s for each in taken], [each.own_s for each in taken])
    )
    return Found(
        steps=pace.steps,
        seconds=seconds,
        tokens_per_s=pace.steps * spec.mix.batch.tokens / seconds,
        by_role_s={role: spent_s / pace.steps for role, spent_s in its.items()},
        waits=Waits.of(of_steps_s),
        # The kernel's two clocks differ by a hundredth, and a job cannot have more than the whole machine.
        cores=min(cores, max(0.1, cores - others)),
        idle=idle,
        waits_s=of_steps_s,
        own=Waits.of(own_s),
        kept=_kept(of_steps_s, own_s),
    )


def _kept(waits_s: Sequence[float], own_s: Sequence[float]) -> float:
    pairs = sorted(zip(waits_s, own_s, strict=True), reverse=True)
    longest = pairs[: max(1, round(_LONGEST * len(pairs)))]
    return median(1 - own_s / waited_s if waited_s else 0.0 for waited_s, own_s in longest)


def _rank(
    client: Client,
    spec: PlaneSpec,
    paces: Sequence[Pace],
    meet: Callable[[], object],
    together: Callable[[], object],
) -> list[_Taken]:
    """Take the steps of every pace; return the measured ones.

    Clocks are read after the first two of the three meetings of a pace. If a rank ended before the last reading, its
    time would be negative.
    """

    def take(pace: Pace) -> tuple[float, float, float]:
        kept_s = kept_waiting_s()
        assert client.next_batch() is not None, "the mix has no end"
        waited_s = client.last_wait_s
        # Reading the kernel's clock may itself be kept waiting, so the difference may exceed the wait.
        own_s = max(0.0, waited_s - (kept_waiting_s() - kept_s))
        began_s = time.thread_time()
        if pace.step_s:
            together()
            time.sleep(pace.step_s)
        return waited_s, own_s, time.thread_time() - began_s

    found = []
    for pace in paces:
        filling = 2 * (spec.mix.steps_ahead + spec.mix.steps_at_once)
        for _ in range(_SKIPPED if pace.step_s else filling):
            take(pace)
        meet()
        taken = [take(pace) for _ in range(pace.steps)]
        waits_s, own_s, aside_s = zip(*taken, strict=True)
        found.append(_Taken(waits_s, own_s, sum(aside_s)))
        meet()
        meet()
    return found


def _all_found(
    spec: PlaneSpec,
    paces: Sequence[Pace],
    meet: Callable[[], object],
    taken: Callable[[], Sequence[list[_Taken]]],
    roles: Mapping[int, str],
) -> list[Found]:
    """Read the clocks at the start and the end of paces.

    Args:
        spec: The job.
        paces: The paces of the job.
        meet: Waits for all ranks.
        taken: Returns the steps of each rank by pace, once all are done.
        roles: Role of each process that has one; ``node`` are the others.
    """
    seen: list[_Seen] = []
    idle: list[float] = []
    for pace in paces:
        # Found before the ranks start to run, because finding them takes as long as dozens of steps.
        ours = [psutil.Process(), *psutil.Process().children(recursive=True)]
        meet()
        seen.append(_Seen.now(ours))
        with ExitStack() as beside:
            # With paced ranks this counter would keep a core awake for them, and batches would come a tenth sooner.
            cores = None if pace.step_s else beside.enter_context(IdleBesideWork())
            meet()
        seen.append(_Seen.now(ours))
        idle.append(cores.share if cores else 0.0)
        meet()
    by_rank = taken()
    return [
        _found(spec, pace, seen[2 * n : 2 * n + 2], idle[n], [its[n] for its in by_rank], roles)
        for n, pace in enumerate(paces)
    ]


def _in_threads(spec: PlaneSpec, paces: Sequence[Pace]) -> list[Found]:
    ranks = spec.tree.size_of("dp")
    meet, together = (threading.Barrier(n, timeout=_LONGEST_S) for n in (ranks + 1, ranks))
    with ExitStack() as opened:
        plane = opened.enter_context(open_plane(spec))
        clients = [opened.enter_context(Client(plane.handle(rank))) for rank in range(ranks)]
        pool = opened.enter_context(ThreadPoolExecutor(ranks))
        done = [
            pool.submit(_rank, client, spec, paces, meet.wait, together.wait) for client in clients
        ]
        roles = {os.getpid(): "process"}
        return _all_found(spec, paces, meet.wait, lambda: [each.result() for each in done], roles)


def _in_processes(spec: PlaneSpec, paces: Sequence[Pace]) -> list[Found]:
    """Open the plane in a separate process, so that all processes of the plane are below it."""
    spawn = multiprocessing.get_context("spawn")
    received, told = spawn.Pipe(duplex=False)
    lead = spawn.Process(target=_lead, args=(spec, paces, told))
    lead.start()
    told.close()
    try:
        if not received.poll(_LONGEST_S):
            raise TimeoutError(f"a job of {spec.tree} gave no figures within {_LONGEST_S} s")
        found: list[Found] = received.recv()
    finally:
        lead.join(_END_S)
        if lead.is_alive():
            lead.kill()
            lead.join()
    return found


def _lead(spec: PlaneSpec, paces: Sequence[Pace], told: Connection) -> None:
    spawn = multiprocessing.get_context("spawn")
    ranks = spec.tree.size_of("dp")
    meet, together = (spawn.Barrier(n, timeout=_LONGEST_S) for n in (ranks + 1, ranks))
    with RayPlane(spec) as plane:
        address = plane.address.model_dump_json()
        pipes, processes = [], []
        for rank in range(ranks):
            own, its = spawn.Pipe(duplex=False)
            arguments = ((address, rank), spec, paces, (meet, together), its)
            processes.append(spawn.Process(target=_join, args=arguments))
            processes[-1].start()
            its.close()
            pipes.append(own)
        roles = {pid: name.partition("-")[0] for name, pid in plane.pids().items()}
        roles |= {process.pid: "rank" for process in processes if process.pid}
        told.send(
            _all_found(spec, paces, meet.wait, lambda: [pipe.recv() for pipe in pipes], roles)
        )
        for process in processes:
            process.join()


def _join(
    place: tuple[str, int],
    spec: PlaneSpec,
    paces: Sequence[Pace],
    barriers: tuple[Barrier, Barrier],
    told: Connection,
) -> None:
    address, rank = place
    meet, together = barriers
    handle = handle_in(PlaneAddress.model_validate_json(address), rank)
    with Client(handle) as client:
        told.send(_rank(client, spec, paces, meet.wait, together.wait))

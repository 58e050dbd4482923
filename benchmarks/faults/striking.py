"""A job on Ray, and the effect of a fault on it: on its processes, its store, its disk and its journal.

::

    kill, stop        SIGKILL, SIGSTOP to the process of a role, of a shadow or of a reader
    starve            the process gets a twentieth of one core for a while
    memory            the process gets no more memory, so that the kernel ends it
    full              the disk of the run's folder has no free space for a while
    store, delay      the store of the sources refuses, or is ten times slower, for a while
    torn-journal      the planner is killed as it writes a record
    cut-journal       the end of the journal's last record is removed, and the planner killed
    flipped-journal   a bit of the journal is flipped, and the planner killed
    network           the host of the shadows is cut off for a while
"""

import os
import random
import select
import signal
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Self

import psutil

from benchmarks.faults.ailing_store import AilingStore
from benchmarks.faults.full_disk import full_for
from benchmarks.faults.hosts import Hosts, cut_for
from benchmarks.faults.schedule import OF_ROLES, Fault
from benchmarks.faults.starving import short_for, starved_for
from omniload.actors.heartbeat_board import FolderBoard
from omniload.actors.opening import open_ray_plane
from omniload.actors.plane import PlaneSpec
from omniload.actors.ray.plane import RayPlane
from omniload.base.state import JsonObject
from omniload.batch.microbatch import Batch
from omniload.client import Client
from omniload.machine.roster.members import Member
from omniload.mix.journal.place import JOURNAL_NAME

__all__ = ["Job", "StruckProcess", "damage", "strike"]

_SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}
_NO_SIGNAL = 0
"""Signal number that only checks whether the process exists."""
_PLANNER = "planner"
_LOOK_S = 0.05
"""Interval of looks for a successor; a look reads all heartbeats or all processes."""
_GIVE_UP_S = 120.0


class Job:
    """A plane on Ray with its ranks in this process.

    If the plane refuses to continue, the job resumes from its last state.
    """

    def __init__(
        self,
        spec: PlaneSpec,
        *,
        ranks: int,
        store: AilingStore | None = None,
        disk: Path | None = None,
        hosts: Hosts | None = None,
    ) -> None:
        """Make a job; it starts when its ``with`` block is entered.

        Args:
            spec: The run.
            ranks: Number of ranks.
            store: Store of its sources, if that can fail.
            disk: Small file system of the run's folder, if that can be filled.
            hosts: Both hosts, if the job is on two.
        """
        self.store, self.disk, self.hosts, self.run_dir = store, disk, hosts, spec.run_dir
        self._spec, self._ranks = spec, ranks
        self._opened = ExitStack()

    def __enter__(self) -> Self:
        self._open(None)
        return self

    def __exit__(self, *_: object) -> None:
        self._opened.close()

    def _open(self, state: JsonObject | None) -> None:
        spec = replace(self._spec, state=state)
        self.plane: RayPlane = self._opened.enter_context(open_ray_plane(spec))
        self._clients = [Client(self.plane.handle(rank)) for rank in range(self._ranks)]

    def next_batches(self) -> list[Batch]:
        """Return the batch of each rank; raises as ``Client.next_batch``."""
        batches = [client.next_batch() for client in self._clients]
        found = [batch for batch in batches if batch is not None]
        assert len(found) == self._ranks, "the mix has no end"
        return found

    @property
    def longest_wait_s(self) -> float:
        """Longest wait of any rank for its last batch."""
        return max(client.last_wait_s for client in self._clients)

    def state(self) -> JsonObject:
        """Return the state before the next step."""
        return self._clients[0].state_dict()

    def resume(self, state: JsonObject) -> None:
        """End the plane and open another one that resumes from a state, as a restart of the job would."""
        self._opened.close()
        self._open(state)

    def targets(self) -> list[str]:
        """Return the possible targets by name: roles, a shadow of each loader that has one, and readers."""
        roles = sorted(self.plane.holders())
        shadows = [f"shadow-{role.partition('-')[2]}" for role in roles if self._shadows_of(role)]
        return [*roles, *shadows, *(f"reader-{n}" for n in range(len(readers_now())))]

    def process_of(self, target: str) -> tuple[int, Callable[[], bool]]:
        """Return the process of a target, and a function that returns whether another process has replaced it.

        Raises:
            ValueError: The target does not exist now.
        """
        sort, _, number = target.partition("-")
        if sort == "shadow" and (shadows := self._shadows_of(f"loader-{number}")):
            return shadows[min(shadows)], self._is_followed(f"loader-{number}")
        if sort == "reader" and int(number) < len(before := readers_now()):
            return before[int(number)], lambda: len(readers_now()) >= len(before)
        plane, holders = self.plane, self.plane.holders()
        if target not in holders:
            raise ValueError(f"{target}: is not there; there are {', '.join(self.targets())}")
        return plane.pids()[
            target
        ], lambda: self.plane is not plane or plane.holders()[target] != holders[target]

    def _members_of(self, role: str) -> dict[int, int]:
        """Return the processes of the members of a role by their lives."""
        beats = FolderBoard(self.plane.address.board).read()
        lives = {f"{role}": 0} | {
            name: int(n) for name in beats if (n := name.removeprefix(f"{role}+")).isdigit()
        }
        return {life: beats[name].pid for name, life in lives.items() if name in beats}

    def _shadows_of(self, role: str) -> dict[int, int]:
        holder = self.plane.holders().get(role)
        return {
            life: pid
            for life, pid in self._members_of(role).items()
            if role.startswith("loader") and Member(role, life).name != holder
        }

    def _is_followed(self, role: str) -> Callable[[], bool]:
        plane, before = self.plane, self._members_of(role).keys()
        return lambda: bool(self._members_of(role).keys() - before) and plane.is_whole()


def readers_now() -> list[int]:
    """Return the processes that read parts of sources for loaders of this process, the oldest first."""
    below = psutil.Process().children(recursive=True)
    # A process that ends during the look has no title any more.
    return sorted(p.pid for p in below if "ReaderActor" in _title_of(p))


def _title_of(process: psutil.Process) -> str:
    try:
        return "".join(process.cmdline()[:1])
    except psutil.Error:
        return ""


class StruckProcess:
    """A process that was struck: the times of its end and of its replacement, in seconds after the blow."""

    def __init__(self, pid: int, number: int, is_replaced: Callable[[], bool]) -> None:
        """Send a signal, and let a thread watch the process.

        Args:
            pid: The process.
            number: Number of the signal.
            is_replaced: Returns whether another process has replaced it; called once it has ended.
        """
        self.ended_s: float | None = None
        self.replaced_s: float | None = None
        self._is_replaced, self._process = is_replaced, os.pidfd_open(pid)
        self._began_s = time.monotonic()
        signal.pidfd_send_signal(self._process, number)
        self._thread = threading.Thread(target=self._watch, name="struck", daemon=True)
        self._thread.start()

    def is_over(self) -> bool:
        """Return whether another process has replaced it."""
        return self.replaced_s is not None

    def wait(self) -> None:
        """Wait until the process is replaced, or given up."""
        self._thread.join()

    def _watch(self) -> None:
        look = select.poll()
        look.register(self._process, select.POLLIN)
        is_there = not look.poll(1000 * _GIVE_UP_S)
        os.close(self._process)
        if is_there:
            return  # the code that waits for the end of the fault reports it
        self.ended_s = time.monotonic() - self._began_s
        while not self._is_replaced():
            if time.monotonic() > self._began_s + _GIVE_UP_S:
                return
            time.sleep(_LOOK_S)
        self.replaced_s = time.monotonic() - self._began_s


@dataclass(slots=True)
class Blow:
    """Faults that strike together, and their end."""

    faults: Sequence[Fault]
    processes: list[StruckProcess] = field(default_factory=list)
    starved: list[StruckProcess] = field(default_factory=list)
    """Processes that the fault need not end: only their end is noticed."""
    others: list[Callable[[], bool]] = field(default_factory=list)
    """Functions that return, for each fault that strikes no process, whether it is over."""

    def is_over(self) -> bool:
        """Return whether all of them are over."""
        return all(each.is_over() for each in self.processes) and all(
            over() for over in self.others
        )


def strike(job: Job, faults: Sequence[Fault], inside: ExitStack, seed: int) -> Blow:
    """Let faults strike together.

    Args:
        job: The job to strike.
        faults: The faults to strike it with.
        inside: Ends lasting faults, at its own end at the latest.
        seed: Decides which bit of a journal is flipped.

    Raises:
        ValueError: A target does not exist.
    """
    blow = Blow(faults)
    # All are found before any is struck, because a plane that has lost roles takes its time to name the others.
    found = [job.process_of(fault.role) for fault in faults if fault.kind in OF_ROLES]
    for fault in faults:
        match fault.kind:
            case "store" | "delay":
                assert job.store is not None, "it is there for these kinds"
                job.store.ail(fault.kind, fault.seconds)
                blow.others.append(_after(fault.seconds))
            case "full":
                assert job.disk is not None, "asked for with the kind"
                full: AbstractContextManager[threading.Event] = full_for(job.disk, fault.seconds)
                blow.others.append(inside.enter_context(full).is_set)
            case "network":
                assert job.hosts is not None, "it is there for this kind"
                cut_off = inside.enter_context(cut_for(job.hosts.there, fault.seconds))
                blow.others.append(cut_off.is_set)
            case "torn-journal" | "cut-journal" | "flipped-journal":
                blow.processes.append(_strike_journal(job, fault, seed))
    struck = [fault for fault in faults if fault.kind in OF_ROLES]
    for (pid, is_replaced), fault in zip(found, struck, strict=True):
        if fault.kind == "starve":
            blow.starved.append(StruckProcess(pid, _NO_SIGNAL, is_replaced))
            _, is_over = inside.enter_context(starved_for(pid, fault.seconds))
            blow.others.append(is_over.is_set)
            continue
        if fault.kind == "memory":
            inside.enter_context(short_for(pid, fault.seconds))
        number = _SIGNALS.get(fault.kind, _NO_SIGNAL)
        blow.processes.append(StruckProcess(pid, number, is_replaced))
    return blow


def _after(seconds: float) -> Callable[[], bool]:
    until_s = time.monotonic() + seconds
    return lambda: time.monotonic() > until_s


def _strike_journal(job: Job, fault: Fault, seed: int) -> StruckProcess:
    assert job.run_dir is not None, "it is there for these kinds"
    pid, is_replaced = job.process_of(_PLANNER)
    # It is stopped first, so that it writes nothing after the damage. The kill comes before any role notices the
    # stop.
    os.kill(pid, signal.SIGSTOP)
    damage(job.run_dir / JOURNAL_NAME, fault.kind, random.Random(f"{seed} {fault.step}"))
    return StruckProcess(pid, signal.SIGKILL, is_replaced)


def damage(journal: Path, kind: str, chance: random.Random) -> None:
    """Damage a journal in one of the ways of ``OF_JOURNALS``; ``chance`` decides where."""
    with journal.open("r+b") as file:
        content = file.read()
        last = content[content.rstrip(b"\n").rfind(b"\n") + 1 :]
        some = chance.randrange(1, len(last))
        match kind:
            case "torn-journal":
                file.write(last[:some])
            case "cut-journal":
                file.truncate(len(content) - some)
            case "flipped-journal":
                file.seek(at := chance.randrange(len(content)))
                file.write(bytes([content[at] ^ 1 << chance.randrange(8)]))

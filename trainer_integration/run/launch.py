"""The launcher: starts the data plane and the ranks, restarts them from the last checkpoint, and ends them all.

It is a thin shell of ``omniload.machine.job_restarts``. It never imports torch, so it starts immediately.
"""

import queue
import secrets
import signal
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import assert_never

from omniload.actors.address import PlaneAddress
from omniload.actors.opening import open_ray_plane, runtime_of
from omniload.actors.reaper import Reaper, marked
from omniload.base.errors import OmniloadError
from omniload.base.linux.interrupts import INTERRUPTED_EXIT
from omniload.base.log import get_logger
from omniload.base.units import counted
from omniload.machine.job_restarts import (
    AskRanks,
    CheckpointCommitted,
    CheckpointDamaged,
    Command,
    EndJob,
    Event,
    RankExited,
    RanksStopped,
    Start,
    StartRanks,
    Stop,
    StopRanks,
    Succeed,
    Supervisor,
)
from omniload.mix.config import MixConfig
from omniload.mix.run_record import RUN_RECORD_NAME, read_run_record
from snapshot.startup.events import restarted, stage
from trainer_integration.config import TrainConfig
from trainer_integration.run.launch_plan import (
    AttemptStart,
    LaunchPlan,
    next_log_number,
    read_plan,
)
from trainer_integration.run.rank_process import Attempt, RankProcess, pss_by_role, python_of_ranks
from trainer_integration.run.resuming import Resume, step_name
from trainer_integration.run.run_lock import RunLock
from trainer_integration.run.run_log import (
    EventKind,
    EventLine,
    JobLog,
    RunLog,
    StepLine,
)
from trainer_integration.writers.opening import open_writers

__all__ = ["Launcher", "Observer"]

_LOG = get_logger(__name__)
_WATCH_EVERY_S = 5.0
_ENDING_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_OTHER_EXITS_S = 0.5
"""How long the peers of a failed rank may take to report that something worse happened to them."""
_FOLLOWER_S = 5.0
_SAVING_S = 30.0
"""How long ranks that were asked to end may take for their step and its checkpoint."""

Observer = Callable[["Launcher", StepLine | EventLine], None]
"""Called for every step and event, in the launcher's threads; it may read ``pids``."""


class Launcher:
    """One training job on this machine, from its first attempt to its end."""

    def __init__(
        self,
        config: Path,
        *,
        resume: Resume = "never",
        observer: Observer | None = None,
        profile: tuple[int, int] | None = None,
    ) -> None:
        """Read and check the configuration; nothing is started. ``profile``: first and last step of a trace.

        Raises:
            ConfigError: The training file, the mix file or the Python for ranks has a fault.
            StateError: The run has checkpoints and ``resume`` is ``never``, or has none of the requested step.
        """
        self._plan = read_plan(config, profile)
        self._python = python_of_ranks()
        self._resume = resume
        self._first_step = self._plan.first_step(resume)
        self._machine = Supervisor(
            num_ranks=self._plan.train.parallel.num_ranks,
            max_restarts=self._plan.train.max_restarts,
        )
        # A simple queue, because a signal's handler puts into it too, and may interrupt another ``put``.
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._attempt: Attempt | None = None
        self._job = secrets.token_hex(8)
        self._log = JobLog(self, observer)
        self._first_log = 0
        self._noted = False
        self._damaged: dict[int, str] = {}
        self._data_end: int | None = None
        self._patience: threading.Timer | None = None
        self._ended = threading.Event()
        self._watch = threading.Thread(
            target=self._watch_processes, name="omniload-watch", daemon=True
        )

    @property
    def train(self) -> TrainConfig:
        """The training file."""
        return self._plan.train

    @property
    def plan(self) -> LaunchPlan:
        """The plan of the launch."""
        return self._plan

    @property
    def mix(self) -> MixConfig:
        """The mix, with its balance."""
        return self._plan.mix

    @property
    def run_dir(self) -> Path:
        """Folder of the run."""
        return self._plan.run_dir

    @property
    def pids(self) -> dict[str, int]:
        """Processes by role at present: ``rank 0``, ``planner``, ``loader-0``, ..."""
        attempt = self._attempt
        return {} if attempt is None else attempt.pids

    def run(self) -> int:
        """Run the job to its end; return the exit code.

        Raises:
            IntegrityError: No checkpoint to resume from is whole.
            OmniloadError: The data plane cannot be started.
        """
        with RunLock(self.run_dir):
            # Checked again, because the previous launcher of the folder may have saved a checkpoint.
            self._plan.first_step(self._resume)
            start = self._start_of(0)
            if self._plan.is_finished(start.step):
                step = step_name(start.step or 0)
                self._tell("end", f"{step} is the end of the run: nothing is left to train")
                return 0
            self._first_step = start.step or 0
            if (self.run_dir / RUN_RECORD_NAME).exists():
                read_run_record(self.run_dir)  # refuse a damaged one now; it is written again later
            return self._guarded()

    def _guarded(self) -> int:
        """Run with a reaper; this launcher holds the folder."""
        self._first_log = next_log_number(self.run_dir)
        reaper = Reaper(self._job)  # of the ranks; the data plane has one of its own
        previous = {number: signal.getsignal(number) for number in _ENDING_SIGNALS}
        self._listen()
        try:
            first = self._first_step
            with (
                marked(self._job),
                open_writers(self.train.log, self.run_dir, from_step=first) as writers,
                RunLog(self.run_dir, fresh=first == 0, writers=writers) as self._log.file,
            ):
                return self._logged()
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)
            reaper.close()

    def _logged(self) -> int:
        """Run while the log is open, and leave no thread that would write to it later."""
        self._watch.start()
        try:
            return self._supervise()
        except SystemExit:  # Ray's reaction to a SIGTERM while it is starting
            self._end("interrupted")
            return INTERRUPTED_EXIT
        finally:
            # The ranks first, because the threads that listen to them write to the log as well.
            self._stop_ranks()
            self._ended.set()
            if self._patience is not None:
                self._patience.cancel()
            self._watch.join()

    def _supervise(self) -> int:
        event: Event = Start()
        while True:
            for command in self._machine.handle(event):
                if (code := self._carry_out(command)) is not None:
                    return code
            event = self._events.get()

    def _carry_out(self, command: Command) -> int | None:
        match command:
            case StartRanks(attempt=attempt):
                self._start(attempt)
            case StopRanks(at_once=at_once):
                self._stop_ranks(0.0 if at_once else _OTHER_EXITS_S)
                self._events.put(RanksStopped())
            case AskRanks():
                self._ask_ranks()
            case Succeed():
                end = self._data_end
                self._end("done" if end is None else f"done: the data ended at step {end}")
                return 0
            case EndJob(reason=reason, exit_code=code):
                self._end(reason)
                return code
            case _:
                assert_never(command)
        return None

    def _start(self, number: int) -> None:
        """Start data plane and ranks, from the newest checkpoint if there is one."""
        start = self._start_of(number)
        what: EventKind = "restart" if number else "start"
        self._tell(what, counted(self._machine.num_ranks, "rank"), attempt=number)
        if start.step is not None:
            self._tell("resume", step_name(start.step), attempt=number, step=start.step)
        if (
            start.step or 0
        ) < self._first_step:  # the launch began from one that ranks found damaged
            self._first_step, self._noted = start.step or 0, False
        self._attempt = Attempt(number)
        plane = self._open_plane(start)
        # Only after the plane has accepted the launch, so that a refused launch leaves the run as it was.
        for step, why in start.beyond.items():
            aside = self._plan.checkpoints.set_aside(step)
            self._tell("set_aside", f"{aside}: {why}", attempt=number, step=step)
        # Bound here and passed on, because a port that is only chosen may be taken by then.
        with socket.create_server(("127.0.0.1", 0)) as store:
            for rank in range(self._machine.num_ranks):
                self._start_rank(rank, start, plane, store if self._machine.num_ranks > 1 else None)

    def _start_of(self, number: int) -> AttemptStart:
        """Choose a checkpoint: the requested one in the first attempt, and the newest whole one afterwards."""
        resume = self._resume if number == 0 else "latest"
        return self._plan.start_of(number, resume, self._damaged)

    def _open_plane(self, start: AttemptStart) -> PlaneAddress | None:
        """Open the data plane, unless the rank does so itself; return its address."""
        spec = replace(self._plan.plane_spec(start.state), restarts=start.attempt)
        if runtime_of(spec) != "ray":
            return None
        assert self._attempt is not None
        with stage("data_plane", restarted(start.attempt)):
            self._attempt.plane = plane = open_ray_plane(spec)
        self._listen()  # Ray has set its own handlers
        self._attempt.roles = plane.pids()
        self._note_launch()
        self._tell("plane", ", ".join(self._attempt.roles), attempt=start.attempt)
        return plane.address

    def _note_launch(self) -> None:
        if not self._noted:
            self._noted = True
            self._plan.note(self._first_step)

    def _start_rank(
        self,
        rank: int,
        start: AttemptStart,
        plane: PlaneAddress | None,
        store: socket.socket | None,
    ) -> None:
        assert self._attempt is not None
        spec = self._plan.rank_spec(rank, start, plane, store)
        log_file = (
            self.run_dir / "logs" / f"rank-{rank}-attempt-{self._first_log + start.attempt}.log"
        )
        inherited = () if spec.store_fd is None else (spec.store_fd,)
        command = (self._python, "-m", "trainer_integration.run.rank")
        process = RankProcess(command, spec.to_json(), log_file, inherited)
        self._attempt.ranks[rank] = process
        process.listen(
            lambda line: self._on_line(start.attempt, line),
            lambda code: self._on_exit(start.attempt, rank, process, code),
        )

    def _on_line(self, attempt: int, line: StepLine | EventLine) -> None:
        """Handle a rank's line, in the thread that listens to the rank."""
        if isinstance(line, StepLine):
            self._log.write(line)
            return
        if line.what == "plane":
            self._note_launch()
        elif line.what == "checkpoint":
            self._events.put(CheckpointCommitted(attempt=attempt))
        elif line.what == "damaged":
            assert line.step is not None, "a rank names the step that it cannot load"
            if line.step in self._damaged:
                return  # every rank reports it
            self._damaged[line.step] = line.detail
            if attempt or not isinstance(self._resume, int):
                self._events.put(CheckpointDamaged(attempt=attempt))
        elif line.what == "data_end":
            self._data_end = line.step
        self._log.write(line)

    def _on_exit(self, attempt: int, rank: int, process: RankProcess, code: int) -> None:
        """Handle a rank's exit, in the thread that listened to the rank."""
        try:
            if not process.killed:
                current = self._attempt
                # Ray ends a process that has lost its node, without any message.
                lost = "" if current is None or code == 0 else current.without_ray()
                said = f"code {code}: {lost}" if lost else process.cause(code)
                self._tell("exit", f"rank {rank}: {said}", attempt=attempt)
        finally:
            # Posted even if the report fails, because without this event the supervisor would wait forever.
            self._events.put(RankExited(rank=rank, attempt=attempt, code=code))

    def _ask_ranks(self) -> None:
        """Have the ranks save and end, and ask for their end once more if that takes too long."""
        if self._attempt is not None:
            for process in self._attempt.ranks.values():
                process.ask_to_end()
        self._patience = threading.Timer(_SAVING_S, self._events.put, (Stop(),))
        self._patience.daemon = True
        self._patience.start()

    def _stop_ranks(self, others_s: float = 0.0) -> None:
        """End every process of the attempt. They are killed, because ranks wait for each other in collectives.

        Args:
            others_s: How long ranks may still end by themselves.
        """
        attempt, self._attempt = self._attempt, None
        if attempt is None:
            return
        # The watching thread may still use the attempt, and Ray's servers end below.
        attempt.is_ending = True
        stop_s = time.monotonic() + others_s
        for process in attempt.ranks.values():
            # One deadline for all of them, because a limit for each would add up over the ranks.
            process.wait(max(0.0, stop_s - time.monotonic()))
        for process in attempt.ranks.values():
            process.kill()
        for process in attempt.ranks.values():
            process.join(_FOLLOWER_S)
        if attempt.plane is not None:
            with suppress(OmniloadError):
                attempt.plane.close()

    def _listen(self) -> None:
        for number in _ENDING_SIGNALS:
            signal.signal(number, self._on_signal)

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        _LOG.warning(
            "%s: the ranks save and end; a second signal ends them at once",
            signal.Signals(number).name,
        )
        self._events.put(Stop())

    def _end(self, detail: str) -> None:
        """Log how the run ended. This is the last line of its log, so memory is not sampled any more."""
        self._ended.set()
        self._watch.join()
        self._tell("end", detail)

    def _watch_processes(self) -> None:
        while not self._ended.wait(_WATCH_EVERY_S):
            attempt = self._attempt
            if attempt is None or not attempt.ranks:
                continue
            self._log.memory(pss_by_role(attempt.pids), attempt=attempt.number)
            for said in attempt.newly_stopped():
                self._tell("stopped", said, attempt=attempt.number)
            if said := attempt.end_without_ray():
                self._tell("exit", said, attempt=attempt.number)

    def _tell(
        self,
        what: EventKind,
        detail: str = "",
        *,
        attempt: int | None = None,
        step: int | None = None,
    ) -> None:
        number = self._machine.attempt if attempt is None else attempt
        self._log.event(what, detail, attempt=number, step=step)

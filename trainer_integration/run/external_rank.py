"""A rank that torchrun or Slurm started. Rank 0 also does for the job what our launcher does.

::

    rank 0   read the files ── lock the run ── choose a checkpoint ── post "job" ── join ── train, write the log
    rank 1                                                            read "job" ── join ── train
    rank 2                                                            read "job" ── join ── train

Only rank 0 reads files and decides, so no rank can train on another mix than rank 0 recorded. A start that the launcher
repeats begins from the newest whole checkpoint.
"""

import json
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Protocol

from omniload.base.config import StrictModel
from omniload.base.errors import OmniloadError, UnavailableError
from omniload.base.linux.exec_with_parent import end_with_parent
from omniload.base.linux.interrupts import INTERRUPTED_EXIT
from omniload.base.log import get_logger, set_up_logging
from omniload.base.units import counted
from omniload.front.launch import Launch
from omniload.front.meeting import Failure, read_as
from omniload.front.rendezvous import Rendezvous
from omniload.mix.config import MixConfig
from trainer_integration.loader.start_number import has_agents_store
from trainer_integration.loader.torch_arrays import rendezvous_of
from trainer_integration.run.joining import joined, peer_loss
from trainer_integration.run.launch_plan import AttemptStart, LaunchPlan, read_plan
from trainer_integration.run.rank_client import rank_client
from trainer_integration.run.rank_spec import RankSpec
from trainer_integration.run.resuming import Resume, choose, step_name
from trainer_integration.run.run_lock import RunLock
from trainer_integration.run.run_log import (
    EventKind,
    EventLine,
    JobLog,
    RunLog,
    StepLine,
    show,
)
from trainer_integration.run.trainer import Trainer, Write
from trainer_integration.training.step import use_one_thread
from trainer_integration.writers.opening import open_writers

__all__ = ["Display", "run_rank", "with_slurm_address"]

_LOG = get_logger(__name__)
_MEET_S = 300.0
"""Longest wait of ranks until rank 0 has read its files, because hosts start at their own pace."""
_HEAR_S = 60.0
"""Longest stay of rank 0 without any training, so that later ranks learn why."""
_SOON_S = 1.0
_ENDING_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
"""Signals of a terminal, of a launcher, and of Slurm before a job's time is up (``--signal=USR1@120``)."""
_LONGEST_CAUSE = 500
_FIRST_PORT, _NUM_PORTS, _PORTS_A_JOB = 15_000, 10_000, 16
"""Ports where ranks of Slurm's steps meet, below Linux's ephemeral ports."""
_MOST_DIGITS = 18
"""Digits of a job's or step's number."""


class Display(Protocol):
    """Shows a job to a person."""

    def expect(self, steps: int, mix: MixConfig, run_dir: Path) -> None:
        """Show the length of the job, its mix, and the folder of its edits."""
        ...

    def observe(self, job: object, line: StepLine | EventLine, /) -> None:
        """Show a step or an event."""
        ...


class _Job(StrictModel):
    """Message of rank 0 to the others."""

    spec: RankSpec | None
    """Rank 0's specification; ``None`` if nothing is left to train."""


def run_rank(
    config: Path,
    launch: Launch,
    resume: Resume,
    *,
    display: Display | None = None,
    profile: tuple[int, int] | None = None,
) -> int:
    """Run this rank of a job that another launcher started; return its exit code.

    Args:
        config: The training file; rank 0 reads it.
        launch: Which rank this is.
        resume: Checkpoint that the first start begins from; later starts take the newest.
        display: Rank 0's display.
        profile: First and last step of a trace.

    Raises:
        ConfigError: The files have faults, or the job has other ranks than they name; on all ranks.
        StateError: The run has checkpoints and ``resume`` is ``never``; on all ranks.
        IntegrityError: A checkpoint is not what was saved; it is set aside if there is an earlier one. Or a shard of
            data is damaged.
        UnavailableError: Another rank has ended, or does not come.
    """
    set_up_logging(role=f"rank {launch.rank}")
    use_one_thread()
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    if "TORCHELASTIC_RUN_ID" in os.environ:
        end_with_parent(signal.SIGKILL)  # an agent that is killed leaves no rank
    with_slurm_address(os.environ)
    meeting, key = rendezvous_of(launch, _MEET_S), f"omniload/train/{launch.attempt}/job"
    # The agent's own count differs between hosts; the number on which the ranks have agreed does not.
    launch = replace(launch, restarts=meeting.start)
    if launch.rank == 0:
        return _lead(meeting, key, _Request(config, launch, resume, profile), display)
    try:
        job = read_as(meeting, key, _Job, of_rank=0, timeout_s=_MEET_S)
    finally:
        with suppress(UnavailableError):  # rank 0 does not stay forever
            meeting.post(_heard(key, launch.rank), "heard")
    if job is None:
        raise UnavailableError(
            f"rank {launch.rank}: rank 0 has not read the training file within {_MEET_S:g} s; does it run?"
        )
    if job.spec is None:
        return 0
    spec = job.spec.model_copy(update={"rank": launch.rank})
    return _exit_code(_train(spec, _nobody_reads, lambda: None))


class _Request:
    """Requests of the command line and the launcher."""

    def __init__(
        self, config: Path, launch: Launch, resume: Resume, profile: tuple[int, int] | None
    ) -> None:
        self.config, self.launch, self.profile = config, launch, profile
        self.resume: Resume = "latest" if launch.restarts else resume


def _lead(meeting: Rendezvous, key: str, asked: _Request, display: Display | None) -> int:
    """Decide for all ranks, then train as rank 0 and write the log."""
    with ExitStack() as stack:
        try:
            plan = read_plan(asked.config, asked.profile)
            plan.require_ranks(asked.launch)
            stack.enter_context(RunLock(plan.run_dir))
            # Under the lock, because the previous holder of the folder may have saved a checkpoint.
            plan.first_step(asked.resume)
            start = plan.start_of(asked.launch.restarts, asked.resume)
            done = plan.is_finished(start.step)
            spec = plan.rank_spec(0, start, None).model_copy(update={"launcher_pid": None})
            log = None if done else stack.enter_context(_opened_log(plan, start, asked))
        except BaseException as error:
            # Also for an interrupt: ranks that wait for the job learn of it immediately, not at their limit.
            with suppress(UnavailableError):  # no rank is there to read it
                meeting.post(key, Failure.of(error).model_dump_json())
                # After an interrupt, the user does not want rank 0 to stay.
                if isinstance(error, Exception):
                    _stay(meeting, key, asked.launch, str(error))
            raise
        # The data plane's state is used by rank 0 alone, which opens the plane, and may be long.
        told = _Job(spec=None if done else spec.model_copy(update={"loader_state": None}))
        meeting.post(key, json.dumps(told.model_dump(mode="json")))
        if log is None:
            end = f"{step_name(start.step or 0)} is the end of the run: nothing is left to train"
            _LOG.warning("%s", end)
            _stay(meeting, key, asked.launch, end)
            return 0
        if display is not None:
            show(display.expect, plan.train.steps, plan.mix, plan.run_dir)
        return _Leader(plan, start, asked, _Record(log, display, start.attempt)).run(spec)


def _heard(key: str, rank: int) -> str:
    return f"{key}/heard/{rank}"


def _stay(meeting: Rendezvous, key: str, launch: Launch, decided: str) -> None:
    """Keep the store, which ends with rank 0 unless an agent hosts it, until all ranks have read the decision.

    A rank that comes later would look for the store until its own limit, and never learn why.
    """
    if has_agents_store():
        return
    absent = list(range(1, launch.world_size))
    for limit_s in (_SOON_S, _HEAR_S):
        until_s = time.monotonic() + limit_s
        absent = [
            rank
            for rank in absent
            if meeting.read(_heard(key, rank), max(0.0, until_s - time.monotonic())) is None
        ]
        if not absent:
            return
        waits = f"rank 0 stays up to {_HEAR_S:g} s for" if limit_s < _HEAR_S else "gone on without"
        _LOG.warning("%s; %s ranks %s, which have not come to hear it", decided, waits, absent)


@contextmanager
def _opened_log(plan: LaunchPlan, start: AttemptStart, asked: _Request) -> Iterator[RunLog]:
    """Open the log and its writers."""
    fresh = start.step is None and not asked.launch.restarts
    with (
        open_writers(plan.train.log, plan.run_dir, from_step=start.step or 0) as writers,
        RunLog(plan.run_dir, fresh=fresh, writers=writers) as log,
    ):
        yield log


class _Record:
    """The log of one start, and the reasons for its end that its lines tell."""

    def __init__(self, file: RunLog, display: Display | None, attempt: int) -> None:
        self._log, self._attempt = (
            JobLog(self, None if display is None else display.observe),
            attempt,
        )
        self._log.file = file
        self.data_end: int | None = None
        self.damaged: str | None = None
        """Fault of the checkpoint that this start began from."""

    def write(self, line: StepLine | EventLine) -> None:
        """Write a line from the trainer."""
        if isinstance(line, EventLine):
            if line.what == "data_end":
                self.data_end = line.step
            elif line.what == "damaged":
                self.damaged = line.detail
        self._log.write(line)

    def tell(self, what: EventKind, detail: str, step: int | None = None) -> None:
        """Write an event."""
        self._log.event(what, detail, attempt=self._attempt, step=step)


class _Leader:
    """Rank 0 during one start of the job."""

    def __init__(
        self, plan: LaunchPlan, start: AttemptStart, asked: _Request, record: _Record
    ) -> None:
        self._plan, self._start, self._asked, self._record = plan, start, asked, record

    def run(self, spec: RankSpec) -> int:
        """Train; log how it ended."""
        record, step = self._record, self._start.step
        # Each start is a launch of its own in the log, with a new clock.
        record.tell(
            "start", f"{counted(self._asked.launch.world_size, 'rank')}, by another launcher"
        )
        if step is not None:
            record.tell("resume", step_name(step), step)
        try:
            interrupted = _train(spec, record.write, self._begin)
        except Exception as error:
            record.tell("exit", f"rank 0: {type(error).__name__}: {error}"[:_LONGEST_CAUSE])
            # The data may be damaged instead, which no earlier checkpoint fixes.
            if step is not None and record.damaged is not None:
                self._set_aside_damaged(step, record.damaged)
            raise
        if interrupted:
            record.tell("end", "interrupted")
        else:
            end = record.data_end
            record.tell("end", "done" if end is None else f"done: the data ended at step {end}")
        return _exit_code(interrupted)

    def _begin(self) -> None:
        """Record the launch, which the data plane has accepted."""
        for step, why in self._start.beyond.items():
            aside = self._plan.checkpoints.set_aside(step)
            self._record.tell("set_aside", f"{aside}: {why}", step)
        self._plan.note(self._start.step or 0)
        self._record.tell("plane", "brought up by rank 0")

    def _set_aside_damaged(self, step: int, why: str) -> None:
        """Have the next start begin from an earlier checkpoint, unless this one was asked for or is the last."""
        place = self._plan.checkpoints
        if isinstance(self._asked.resume, int) or step not in place.steps():
            return
        try:
            choose(place, "latest", {step: why})
        except OmniloadError as error:
            # Without any checkpoint, the next start would begin anew, over a run that might be restored.
            _LOG.warning("%s is damaged and stays in its place: %s", step_name(step), error)
            return
        aside = place.set_aside(step)
        self._record.tell("set_aside", f"{aside}: ranks found it damaged", step)


def _train(spec: RankSpec, write: Write, begin: Callable[[], None]) -> bool:
    """Train to the end; return whether the ranks were asked to end before it.

    Raises:
        UnavailableError: Another rank has ended.
    """
    asked_to_end = threading.Event()
    try:
        with joined(spec) as groups, rank_client(spec) as client, _asked_by_signals(asked_to_end):
            # The records are written only now, when the ranks have met and the plane has accepted the mix.
            begin()
            trainer = Trainer(spec, groups, write, asked_to_end)
            trainer.run(client)
            return trainer.all_end
    except RuntimeError as error:
        if (loss := peer_loss(error)) is None:
            raise
        raise UnavailableError(
            f"rank {spec.rank}: another rank has ended ({loss}); its own log says why: start again with --resume latest"
        ) from error


@contextmanager
def _asked_by_signals(asked_to_end: threading.Event) -> Iterator[None]:
    """On a signal, save and end after the present step; a second signal ends immediately."""

    def ask(number: int, _frame: FrameType | None) -> None:
        if asked_to_end.is_set():
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        asked_to_end.set()

    # Set only now, because Ray sets handlers of its own as it starts.
    previous = {number: signal.signal(number, ask) for number in _ENDING_SIGNALS}
    try:
        yield
    finally:
        for number, handler in previous.items():
            # None stands for a handler of C code, which cannot be restored from here.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)


def _exit_code(interrupted: bool) -> int:
    return INTERRUPTED_EXIT if interrupted else 0


def _nobody_reads(_line: StepLine | EventLine) -> None:
    """Drop a line, because only rank 0's lines are kept."""


def with_slurm_address(environment: MutableMapping[str, str]) -> None:
    """Set where the ranks of a Slurm step meet, unless ``MASTER_ADDR`` and ``MASTER_PORT`` do.

    Task 0 runs on the first host of the step. The port follows from the numbers of the job and the step, so that jobs
    on one host get different ports, and so do steps of one job that run at the same time.
    """
    if "RANK" in environment or "SLURM_STEP_ID" not in environment:
        return
    first = _first_host(environment)
    if first:
        # Existing values are kept, because a site may have a network of its own for this.
        environment.setdefault("MASTER_ADDR", first)
    job, step = environment.get("SLURM_JOB_ID", ""), environment["SLURM_STEP_ID"]
    if _is_number(job) and _is_number(step):
        port = _FIRST_PORT + (_PORTS_A_JOB * int(job) + int(step)) % _NUM_PORTS
        environment.setdefault("MASTER_PORT", str(port))


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) <= _MOST_DIGITS


def _first_host(environment: Mapping[str, str]) -> str:
    """Return the first host of Slurm's list: ``r[1-2]n[003-004,9],login`` begins with ``r1n003``."""
    listed = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_JOB_NODELIST", "")
    # Up to the first comma outside brackets; then the first number in each bracket.
    first = re.match(r"(?:[^\[,]|\[[^\]]*\])*", listed)
    return "" if first is None else re.sub(r"\[(\d*)[^\]]*\]", r"\1", first[0])

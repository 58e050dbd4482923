"""The launcher: starts the data plane and the ranks, restarts them from the last checkpoint, ends them all.

A thin shell of ``omniload.machine.supervisor``. It never imports torch, so it is up at once.
"""

import os
import queue
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Literal, assert_never

from omniload.actors.opening import open_ray_plane, runtime_of
from omniload.actors.plane import PlaneSpec
from omniload.base.errors import ConfigError, OmniloadError, StateError
from omniload.base.log import get_logger
from omniload.base.state import JsonObject
from omniload.machine.supervisor import (
    Command,
    Event,
    GiveUp,
    RankExited,
    RanksStopped,
    Start,
    StartRanks,
    Stop,
    StopRanks,
    Succeed,
    Supervisor,
)
from omniload.mix.config import MixConfig, load_mix
from omniload.mix.run_record import write_run_record
from omniload.plan.place_tree import ClientPlaceTree
from trainer_integration.checkpoint_folder import latest, loader_state_of, step_of
from trainer_integration.config import TrainConfig, load_train
from trainer_integration.guard import MARK, Guard
from trainer_integration.launch_record import write_launch_record
from trainer_integration.memory import pss_by_role
from trainer_integration.model_of import model_of, with_cost_of
from trainer_integration.moe.config import MoEConfig
from trainer_integration.rank_spec import PlaneRef, RankSpec
from trainer_integration.run_log import (
    EventKind,
    EventLine,
    MemoryLine,
    RunLog,
    StepLine,
    parse_line,
)

if TYPE_CHECKING:
    from omniload.actors.ray_plane import RayPlane

__all__ = ["Launcher", "Observer", "Resume"]

_LOG = get_logger(__name__)
_MEMORY_EVERY_S = 5.0
_INTERRUPTED_EXIT = 130
_ENDING_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_LONGEST_CAUSE = 500

Resume = Literal["never", "latest"]
Observer = Callable[["Launcher", StepLine | EventLine], None]
"""Called for every step and event, in the launcher's threads; it may look at ``pids``."""


@dataclass(slots=True)
class _Attempt:
    """What runs at present."""

    number: int
    plane: "RayPlane | None"
    ranks: dict[int, "subprocess.Popen[str]"]
    roles: Mapping[str, int]


class Launcher:
    """One training job on this machine, from its first attempt to its end."""

    def __init__(
        self, config: Path, *, resume: Resume = "never", observer: Observer | None = None
    ) -> None:
        """Read and check the configuration; nothing is started.

        Raises:
            ConfigError: The training or the mix file is faulty.
            StateError: The run has checkpoints and ``resume`` is ``never``.
        """
        self.config = config.resolve()
        self.train, self._folder = load_train(config)
        mix, self._base_dir = load_mix(self.train.mix_file(self._folder))
        self.mix = with_cost_of(_model(self.train, mix, self._base_dir), mix)
        if mix.runtime.kind == "local" and self.train.parallel.num_ranks > 1:
            raise ConfigError(
                f"runtime.kind is local and parallel.dp is {self.train.parallel.dp}: threads of one process "
                "serve one rank; set runtime.kind to auto or ray, or parallel.dp to 1"
            )
        self.run_dir = self.train.run_folder(self._folder)
        self._checkpoints = self.train.checkpoint_folder(self._folder)
        self._resume = resume
        newest = latest(self._checkpoints)
        if newest is not None and resume == "never":
            raise StateError(
                f"{self._checkpoints} holds {newest.name}; pass --resume latest to go on from it, "
                "or give another run_dir"
            )
        self._observer = observer
        self._machine = Supervisor(
            num_ranks=self.train.parallel.num_ranks, max_restarts=self.train.max_restarts
        )
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._attempt: _Attempt | None = None
        self._job = secrets.token_hex(8)
        self._began_s = time.monotonic()
        self._log: RunLog | None = None

    @property
    def pids(self) -> dict[str, int]:
        """Processes by role at present: ``rank 0``, ``planner``, ``loader-0``, ..."""
        attempt = self._attempt
        if attempt is None:
            return {}
        return {**{f"rank {rank}": p.pid for rank, p in attempt.ranks.items()}, **attempt.roles}

    def run(self) -> int:
        """Run the job to its end; return the exit code.

        Raises:
            OmniloadError: The data plane cannot be started.
        """
        newest = latest(self._checkpoints)
        first_step = 0 if newest is None else step_of(newest)
        mix_file = self.train.mix_file(self._folder)
        write_run_record(
            self.run_dir, mix_file, {"dp": self.train.parallel.dp}, from_step=first_step
        )
        write_launch_record(self.run_dir, self.config, self.train)
        os.environ[MARK] = self._job  # inherited by Ray's processes and by the ranks
        guard = Guard(self._job)
        previous = {number: signal.getsignal(number) for number in _ENDING_SIGNALS}
        self._listen()
        try:
            with RunLog(self.run_dir, fresh=newest is None) as self._log:
                try:
                    return self._supervise()
                except SystemExit:  # what Ray makes of a SIGTERM while it is starting
                    self._tell("end", "interrupted")
                    return _INTERRUPTED_EXIT
        finally:
            self._stop_ranks()
            for number, handler in previous.items():
                signal.signal(number, handler)
            guard.close()
            del os.environ[MARK]

    def _supervise(self) -> int:
        watch = threading.Thread(target=self._watch_memory, name="omniload-memory", daemon=True)
        watch.start()
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
            case StopRanks():
                self._stop_ranks()
                self._events.put(RanksStopped())
            case Succeed():
                self._tell("end", "done")
                return 0
            case GiveUp(reason=reason, exit_code=code):
                self._tell("end", reason)
                return code
            case _:
                assert_never(command)
        return None

    def _start(self, number: int) -> None:
        """Start data plane and ranks, from the newest checkpoint where there is one."""
        newest = latest(self._checkpoints)
        state = None if newest is None else loader_state_of(newest)
        step = None if newest is None else step_of(newest)
        self._tell(
            "restart" if number else "start", f"{self._machine.num_ranks} ranks", attempt=number
        )
        if newest is not None:
            self._tell("resume", newest.name, attempt=number, step=step)
        spec = PlaneSpec(
            mix=self.mix,
            base_dir=self._base_dir,
            tree=ClientPlaceTree.of(dp=self.train.parallel.dp),
            run_dir=self.run_dir,
            state=state,
            num_steps=self.train.steps,
        )
        self._attempt = _Attempt(number, None, {}, {})
        reference = None
        if runtime_of(spec) == "ray":
            self._attempt.plane = plane = open_ray_plane(spec)
            self._listen()  # Ray has put its own handlers in place
            self._attempt.roles = plane.pids()
            reference = PlaneRef(
                address=plane.address.cluster.address,
                namespace=plane.address.cluster.namespace,
                dp_ranks_of={
                    name: tuple(ranks) for name, ranks in plane.address.dp_ranks_of.items()
                },
            )
            self._tell("plane", ", ".join(self._attempt.roles), attempt=number)
        for rank in range(self._machine.num_ranks):
            self._start_rank(number, rank, step, reference, state)

    def _start_rank(
        self,
        attempt: int,
        rank: int,
        step: int | None,
        plane: PlaneRef | None,
        state: JsonObject | None,
    ) -> None:
        assert self._attempt is not None
        log_file = self._rank_log(attempt, rank)
        log_file.parent.mkdir(exist_ok=True)
        rendezvous = self.run_dir / f"rendezvous-{self._job}-{attempt}"
        spec = RankSpec(
            config=self.config,
            rank=rank,
            attempt=attempt,
            rendezvous=rendezvous,
            resume_step=step,
            plane=plane,
            loader_state=state if plane is None else None,
        )
        with log_file.open("w", encoding="utf-8") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "trainer_integration.rank"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env={**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"},
                start_new_session=True,  # Ctrl-C at the terminal is for the launcher
            )
        self._attempt.ranks[rank] = process
        assert process.stdin is not None
        with suppress(BrokenPipeError):  # it died at once: its exit is reported below
            process.stdin.write(spec.model_dump_json())
            process.stdin.close()
        threading.Thread(target=self._follow, args=(attempt, rank, process), daemon=True).start()

    def _follow(self, attempt: int, rank: int, process: "subprocess.Popen[str]") -> None:
        """Carry a rank's lines to the log and its exit to the supervisor."""
        assert process.stdout is not None
        for text in process.stdout:
            line = parse_line(text)
            if isinstance(line, EventLine):
                self._tell(line.what, line.detail, attempt=attempt, step=line.step)
            elif isinstance(line, StepLine):
                self._write(line)
        code = process.wait()
        if self._attempt is not None and self._attempt.number == attempt:
            self._tell("exit", f"rank {rank}: {self._cause(attempt, rank, code)}", attempt=attempt)
        self._events.put(RankExited(rank=rank, attempt=attempt, code=code))

    def _cause(self, attempt: int, rank: int, code: int) -> str:
        """Say how a rank ended, with the last line it wrote where it failed."""
        if code < 0:
            return f"signal {signal.Signals(-code).name}"
        if code == 0:
            return "code 0"
        lines = self._rank_log(attempt, rank).read_text(errors="replace").split("\n")
        last = next((line.strip() for line in reversed(lines) if line.strip()), "it wrote nothing")
        return f"code {code}: {last[:_LONGEST_CAUSE]}"

    def _rank_log(self, attempt: int, rank: int) -> Path:
        return self.run_dir / "logs" / f"rank-{rank}-attempt-{attempt}.log"

    def _stop_ranks(self) -> None:
        """End every process of the attempt. Ranks wait for each other in collectives, so they are killed."""
        attempt, self._attempt = self._attempt, None
        if attempt is None:
            return
        for process in attempt.ranks.values():
            process.kill()
        for process in attempt.ranks.values():
            process.wait()
        if attempt.plane is not None:
            with suppress(OmniloadError):
                attempt.plane.close()
        for leftover in self.run_dir.glob(f"rendezvous-{self._job}-*"):
            leftover.unlink(missing_ok=True)

    def _listen(self) -> None:
        for number in _ENDING_SIGNALS:
            signal.signal(number, self._on_signal)

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        _LOG.warning("%s: ending the job", signal.Signals(number).name)
        self._events.put(Stop())

    def _watch_memory(self) -> None:
        while True:
            time.sleep(_MEMORY_EVERY_S)
            attempt = self._attempt
            if attempt is not None and attempt.ranks and self._log is not None:
                self._log.write(
                    MemoryLine(
                        attempt=attempt.number,
                        seconds=time.monotonic() - self._began_s,
                        pss_bytes=pss_by_role(self.pids),
                    )
                )

    def _tell(
        self,
        what: EventKind,
        detail: str = "",
        *,
        attempt: int | None = None,
        step: int | None = None,
    ) -> None:
        number = self._machine.attempt if attempt is None else attempt
        seconds = time.monotonic() - self._began_s
        self._write(EventLine(attempt=number, seconds=seconds, what=what, detail=detail, step=step))

    def _write(self, line: StepLine | EventLine) -> None:
        assert self._log is not None
        self._log.write(line)
        if self._observer is not None:
            self._observer(self, line)


def _model(train: TrainConfig, mix: MixConfig, base_dir: Path) -> MoEConfig:
    try:
        return model_of(train, mix, base_dir)
    except ValueError as error:
        raise ConfigError(f"the training file does not fit its mix: {error}") from error

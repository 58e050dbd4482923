"""The Supervisor: keeps a job of several ranks running, from checkpoint to checkpoint."""

from dataclasses import dataclass, field
from typing import assert_never

from omniload.base.linux.interrupts import INTERRUPTED_EXIT
from omniload.base.units import counted

__all__ = [
    "AskRanks",
    "CheckpointCommitted",
    "CheckpointDamaged",
    "Command",
    "EndJob",
    "Event",
    "RankExited",
    "RanksStopped",
    "Start",
    "StartRanks",
    "Stop",
    "StopRanks",
    "Succeed",
    "Supervisor",
]


@dataclass(frozen=True, slots=True)
class Start:
    """Begin the job."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankExited:
    """A rank's process has ended."""

    rank: int
    attempt: int
    """The attempt it was started in; an exit of an earlier attempt is old news."""
    code: int
    """Exit code; negative is the signal that killed it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointCommitted:
    """The job got further than where it was started from."""

    attempt: int
    """The attempt that saved."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointDamaged:
    """A rank found that the checkpoint of its attempt is damaged; an earlier one will be used.

    This event comes before the rank's exit. There is one checkpoint fewer each time, so it cannot repeat for ever.
    """

    attempt: int
    """The attempt that was to load it."""


@dataclass(frozen=True, slots=True)
class RanksStopped:
    """No process of the last attempt is left."""


@dataclass(frozen=True, slots=True)
class Stop:
    """The user asked for the job to end (Ctrl-C, SIGTERM). A second one, also after a time limit, ends it at once."""


Event = Start | RankExited | CheckpointCommitted | CheckpointDamaged | RanksStopped | Stop


@dataclass(frozen=True, slots=True, kw_only=True)
class StartRanks:
    """Start data plane and ranks; a later attempt starts from the latest checkpoint."""

    attempt: int


@dataclass(frozen=True, slots=True)
class StopRanks:
    """End every process of the attempt; answered by ``RanksStopped``."""

    at_once: bool = False
    """If false, wait a moment for ranks that end by themselves, because one of them may have failed more gravely."""


@dataclass(frozen=True, slots=True)
class AskRanks:
    """Ask every rank to save after its current step and to end; ``Stop`` comes again if they take too long."""


@dataclass(frozen=True, slots=True)
class Succeed:
    """All ranks are done."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EndJob:
    """End the job."""

    reason: str
    exit_code: int


Command = StartRanks | StopRanks | AskRanks | Succeed | EndJob

_CONFIG_EXIT, _STATE_EXIT, _INTEGRITY_EXIT = 2, 4, 5
_GRAVITY = (_STATE_EXIT, _CONFIG_EXIT, _INTEGRITY_EXIT)
"""Exits that a restart would repeat, the gravest last."""
_INTERRUPTED = EndJob(reason="interrupted", exit_code=INTERRUPTED_EXIT)


@dataclass(slots=True, kw_only=True)
class Supervisor:
    """Restarts the whole job when a rank dies, as often as allowed without a checkpoint in between.

    The other ranks cannot continue without the lost one, because they wait for it in a collective. A fault that a
    restart would repeat (configuration, state, integrity) is not retried. The exception is a damaged checkpoint if
    there is an earlier one; that restart does not count.
    """

    num_ranks: int
    max_restarts: int
    attempt: int = 0
    restarts: int = 0
    """Restarts since the last checkpoint."""
    done: set[int] = field(default_factory=set)
    _ending: EndJob | None = field(default=None, init=False)
    _gravity: int = field(default=-1, init=False)
    _interrupted: bool = field(default=False, init=False)
    _stopping: bool = field(default=False, init=False)
    _falls_back: bool = field(default=False, init=False)

    def handle(self, event: Event) -> tuple[Command, ...]:
        """Apply one event and return the commands to carry out, in order."""
        match event:
            case Start():
                return (StartRanks(attempt=self.attempt),)
            case RankExited():
                return self._on_exit(event)
            case CheckpointCommitted() | CheckpointDamaged():
                return self._on_checkpoint(event)
            case Stop():
                asked_before = self._interrupted or self._stopping
                self._interrupted = True
                if not asked_before:
                    return (AskRanks(),)
                self._stopping = True
                return (StopRanks(at_once=True),)
            case RanksStopped():
                return self._after_stop()
            case _:
                assert_never(event)

    def _on_checkpoint(self, event: CheckpointCommitted | CheckpointDamaged) -> tuple[Command, ...]:
        # A checkpoint of an earlier attempt may be reported late, and says nothing about this one.
        if event.attempt == self.attempt and isinstance(event, CheckpointCommitted):
            self.restarts = 0
        elif event.attempt == self.attempt:
            self._falls_back = True
        return ()

    def _on_exit(self, exited: RankExited) -> tuple[Command, ...]:
        if exited.attempt != self.attempt:
            return ()
        if exited.code == 0 and not self._stopping:
            self.done.add(exited.rank)
            if len(self.done) < self.num_ranks:
                return ()
            return (_INTERRUPTED,) if self._interrupted else (Succeed(),)
        gravity = _gravity(exited.code)
        # Ranks that are being ended fail because of each other; only a graver exit is news.
        if self._stopping and gravity <= self._gravity:
            return ()
        commands = () if self._stopping else (StopRanks(),)
        self._stopping = True
        self._ending, self._gravity = self._verdict(exited.rank, exited.code), gravity
        return commands

    def _verdict(self, rank: int, code: int) -> EndJob | None:
        cause = f"signal {-code}" if code < 0 else f"exit code {code}"
        # There is one checkpoint fewer each time, so these restarts cannot go on for ever.
        if code == _INTEGRITY_EXIT and self._falls_back:
            return None
        if code in _GRAVITY:
            return EndJob(
                reason=f"rank {rank} ended with {cause}, which a restart would repeat",
                exit_code=code,
            )
        if self.restarts >= self.max_restarts:
            after = counted(self.restarts, "restart")
            reason = (
                f"rank {rank} ended with {cause} after {after} (max_restarts {self.max_restarts})"
            )
            # A signal has no exit code of ours; use the code for faults that are worth another try.
            return EndJob(reason=reason, exit_code=code if code > 0 else 3)
        return None

    def _after_stop(self) -> tuple[Command, ...]:
        if not self._stopping:
            return ()
        if self._interrupted:
            return (_INTERRUPTED,)
        if self._ending is not None:
            return (self._ending,)
        self._stopping = False
        self.attempt += 1
        # Going back is bounded by the number of checkpoints.
        self.restarts += not self._falls_back
        self._falls_back = False
        self.done.clear()
        return (StartRanks(attempt=self.attempt),)


def _gravity(code: int) -> int:
    """Return the place of an exit code among those a restart would repeat, -1 for any other."""
    return _GRAVITY.index(code) if code in _GRAVITY else -1

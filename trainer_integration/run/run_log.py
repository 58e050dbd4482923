"""The log of a run: one JSON line per step, event and memory sample, in the run's folder.

Only the launcher writes it. After a restart, the steps since the checkpoint run again and are logged again, with a
higher ``attempt``; readers take the last.
"""

import os
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated, BinaryIO, Literal, Self

from pydantic import Field, TypeAdapter, ValidationError

from omniload.base.config import StrictModel
from omniload.base.errors import IntegrityError, StateError, system_refusals
from omniload.base.log import get_logger
from omniload.base.reading import open_file, read_kept_file
from omniload.mix.run_record import RUN_RECORD_NAME, no_run_in
from trainer_integration.training.step_figures import StepFigures
from trainer_integration.writers.opening import Writers

__all__ = [
    "LOG_NAME",
    "MOST_EXPERTS",
    "EventKind",
    "EventLine",
    "JobLog",
    "Line",
    "MemoryLine",
    "RunLog",
    "StepLine",
    "figures_of",
    "last_of_each_step",
    "no_log_in",
    "parse_line",
    "read_log",
    "show",
]

_LOG = get_logger(__name__)
LOG_NAME = "log.jsonl"
"""File in the run's folder."""
_STRIDE_BYTES = 1 << 20
_MOST_BYTES = 4 << 30
"""Largest log that is read whole: ten million steps."""
MOST_EXPERTS = 16
"""Most experts whose loads are separate figures; for more experts, ``expert_imbalance`` says enough."""


EventKind = Literal[
    "start",
    "plane",
    "resume",
    "damaged",
    "set_aside",
    "checkpoint",
    "spike",
    "profile",
    "data_end",
    "stopped",
    "exit",
    "restart",
    "end",
]
"""What can happen to a job."""


class StepLine(StepFigures):
    """One optimiser step, over all ranks."""

    kind: Literal["step"] = "step"
    version: Literal[1] = 1
    attempt: int
    """Previous starts of the job in this launch."""
    step: int
    seconds: float
    """Wall time of the step on rank 0, including the wait for data."""
    wait_s: tuple[float, ...]
    """Time each rank waited for its batch, ``[ranks]``."""
    compute_s: tuple[float, ...]
    """Time of each rank's forward and backward passes, ``[ranks]``."""
    imbalance: float
    """Planned cost of the heaviest rank over the mean."""
    bound: float
    """Least possible ``imbalance`` for the rows of the step."""
    model_flops: float | None = None
    """FLOPs of the model in the step, forward and backward, over all ranks; divided by ``seconds``, they are FLOP/s."""
    mfu: float | None = None
    """``model_flops`` relative to what all devices could do in ``seconds``; ``None`` if that is unknown."""
    evaluation: dict[str, float] | None = None
    """Loss of each source of the evaluation mix after the step, in nats per label; ``None`` if none was due."""
    tokens_by_source: dict[str, int]
    digest: str | None
    """Digest of the samples of the step as they arrived at the trainers: 16 hex digits."""


def figures_of(line: StepLine) -> dict[str, float]:
    """Return the figures of a step's line, each a number, under the names of ``StepFigures``.

    Shares of sources are ``share/NAME``, losses on the evaluation mix ``evaluation/NAME``, and rows of an expert over
    the mean ``expert_load/E``.
    """
    figures: dict[str, float] = {
        **{
            name: value
            for name in StepFigures.model_fields
            if _is_number(value := getattr(line, name))
        },
        "seconds": line.seconds,
        "tokens_per_s": line.tokens / line.seconds if line.seconds > 0 else 0.0,
        "wait_s": max(line.wait_s, default=0.0),
        "imbalance": line.imbalance,
    }
    if line.mfu is not None:
        figures["mfu"] = line.mfu
    if line.model_flops is not None and line.seconds > 0:
        figures["model_flops_per_s"] = line.model_flops / line.seconds
    slots = line.expert_slots or ()
    if 0 < len(slots) <= MOST_EXPERTS:
        # A step without a token has no row at any expert.
        mean = max(sum(slots) / len(slots), 1e-9)
        figures |= {f"expert_load/{e}": held / mean for e, held in enumerate(slots)}
    figures |= {f"evaluation/{name}": loss for name, loss in (line.evaluation or {}).items()}
    total = max(sum(line.tokens_by_source.values()), 1)
    return figures | {f"share/{name}": n / total for name, n in line.tokens_by_source.items()}


def _is_number(value: object) -> bool:
    return isinstance(value, int | float)


class EventLine(StrictModel):
    """Something that happened to the job."""

    kind: Literal["event"] = "event"
    version: Literal[1] = 1
    attempt: int
    seconds: float
    """Seconds since the launch."""
    what: EventKind
    detail: str = ""
    step: int | None = None
    took_s: float | None = None
    """Seconds that a ``checkpoint`` took; ``None`` in older logs."""
    stall_s: float | None = None
    """Seconds that training stood still for a ``checkpoint`` written in parallel; ``None`` for others."""


class MemoryLine(StrictModel):
    """Proportional set size by role."""

    kind: Literal["memory"] = "memory"
    version: Literal[1] = 1
    attempt: int
    seconds: float
    """Seconds since the launch."""
    pss_bytes: dict[str, int]


Line = Annotated[StepLine | EventLine | MemoryLine, Field(discriminator="kind")]
_LINES: TypeAdapter[StepLine | EventLine | MemoryLine] = TypeAdapter(Line)


def parse_line(text: str) -> StepLine | EventLine | MemoryLine:
    """Return the line that was written as ``text``.

    Raises:
        ValueError: The text is no line of ours.
    """
    return _LINES.validate_json(text)


def show(observe: Callable[..., None], *what: object) -> None:
    """Call a function that shows something to a person; its failure must not end the job."""
    try:
        observe(*what)
    except Exception:  # noqa: BLE001 -- it may be any code, such as one that writes to a pipe without a reader
        _LOG.exception("an observer of the job failed")


class RunLog:
    """The log of a run, appended to."""

    @system_refusals("the run's log")
    def __init__(
        self, run_dir: Path, *, fresh: bool = False, writers: Writers | None = None
    ) -> None:
        """Open the log.

        Args:
            run_dir: Folder of the run; created if it is missing.
            fresh: Drop lines of work that left no checkpoint, as the journal does.
            writers: Receive the figures of every step too.
        """
        self._writers = writers
        run_dir.mkdir(parents=True, exist_ok=True)
        path = run_dir / LOG_NAME
        if path.exists():
            with open_file(path) as kept:  # only a regular file: a pipe would block
                whole_bytes = 0 if fresh else _whole_bytes(kept)
            os.truncate(path, whole_bytes)
        # Line-buffered, so that a kill tears at most the last line.
        self._file = path.open("a", encoding="utf-8", buffering=1)
        self._lock = threading.Lock()
        self._told = False

    def write(self, line: StepLine | EventLine | MemoryLine) -> None:
        """Append one line; any thread may. A full disk loses lines, which is reported once, and never ends the job."""
        text = line.model_dump_json() + "\n"
        try:
            with self._lock:
                # A text file of Python allows one thread at a time, and the ranks' lines come from separate threads.
                self._file.write(text)
        except OSError as error:
            if not self._told:
                _LOG.warning("%s: lines are lost: %s", self._file.name, error.strerror)
            self._told = True
        if self._writers is not None and isinstance(line, StepLine):
            self._writers.write(line.step, figures_of(line))

    def close(self) -> None:
        """Close the file."""
        with suppress(OSError):  # reported before, for the line that did not fit
            self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class JobLog:
    """The log of one launch of a job, with the launch's clock and an observer that shows each line to a person."""

    def __init__(self, job: object, observe: Callable[..., None] | None) -> None:
        """Start the clock; ``observe(job, line)`` is called for every step and event."""
        self._job, self._observe = job, observe
        self._began_s = time.monotonic()
        self.file: RunLog | None = None
        """File of the log; a launch that starts nothing has none."""

    def write(self, line: StepLine | EventLine) -> None:
        """Keep and show a step or, with the present time, an event; any thread may."""
        if isinstance(line, EventLine):
            # By the clock of the launch, because the reporting rank began later.
            line = line.model_copy(update={"seconds": self._seconds()})
        if self.file is not None:
            self.file.write(line)
        # Kept first, so that everything a person has seen is in the log.
        if self._observe is not None:
            show(self._observe, self._job, line)

    def event(self, what: EventKind, detail: str, *, attempt: int, step: int | None = None) -> None:
        """Keep and show an event."""
        self.write(EventLine(attempt=attempt, seconds=0, what=what, detail=detail, step=step))

    def memory(self, pss_bytes: dict[str, int], *, attempt: int) -> None:
        """Keep the proportional set size of each role, in bytes."""
        if self.file is not None:
            seconds = self._seconds()
            self.file.write(MemoryLine(attempt=attempt, seconds=seconds, pss_bytes=pss_bytes))

    def _seconds(self) -> float:
        return time.monotonic() - self._began_s


def _whole_bytes(log: BinaryIO) -> int:
    """Return the bytes up to the last newline: a kill may leave part of a line, which the next would be joined to."""
    end = log.seek(0, os.SEEK_END)
    while end:
        begin = max(0, end - _STRIDE_BYTES)
        log.seek(begin)
        if (at := log.read(end - begin).rfind(b"\n")) >= 0:
            return begin + at + 1
        end = begin
    return 0


def no_log_in(run_dir: Path) -> StateError:
    """Return the error for a folder without a log, naming the command for runs of the user's own loop."""
    path = run_dir / LOG_NAME
    if (run_dir / RUN_RECORD_NAME).exists():
        return StateError(
            f"{path}: no such log: `omniload train run` has not trained in this folder. For a loop of your own, "
            "`omniload mix show` says how far it is, `omniload mix top` shows its roles, and `omniload mix audit` "
            "proves which samples were in a step"
        )
    return no_run_in(run_dir, LOG_NAME)


def read_log(run_dir: Path) -> list[StepLine | EventLine | MemoryLine]:
    """Return the lines of a run's log; a torn last line, as a kill leaves it, is left out.

    Raises:
        StateError: The folder has no log, or a line before the last is not one of ours.
    """
    path = run_dir / LOG_NAME
    try:
        held = read_kept_file(path, most_bytes=_MOST_BYTES, what="the log of a run")
    except FileNotFoundError:
        raise no_log_in(run_dir) from None
    except OSError as error:
        raise StateError(
            f"{path}: cannot be read: {error.strerror}; give the folder of a run"
        ) from error
    except IntegrityError as error:
        raise StateError(str(error)) from error
    # Split only at line feeds, because a detail may contain other characters that ``splitlines`` takes for line ends.
    lines, texts = [], held.decode(errors="replace").removesuffix("\n").split("\n")
    for number, text in enumerate(texts, start=1):
        try:
            lines.append(_LINES.validate_json(text))
        except ValidationError as error:
            if number == len(texts):
                break
            raise StateError(
                f"{path}:{number}: not a line of a run's log: {error.errors()[0]['msg']}"
            ) from error
    return lines


def last_of_each_step(lines: Iterable[StepLine | EventLine | MemoryLine]) -> Sequence[StepLine]:
    """Return one line per step, in step order: that of the last run of the step."""
    by_step = {line.step: line for line in lines if isinstance(line, StepLine)}
    return [by_step[step] for step in sorted(by_step)]

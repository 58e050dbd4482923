"""Summary of a run's log: attempts, shares against target, waits, imbalance. Pure arithmetic.

Shape suffixes:
    N  steps, one line each      S  sources
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np
from numpy.typing import NDArray

from omniload.mix.config import MixConfig
from omniload.mix.schedule import weights_at
from trainer_integration.run.run_lock import RUNNING_OR_CUT_OFF
from trainer_integration.run.run_log import EventLine, MemoryLine, StepLine, last_of_each_step

__all__ = [
    "Attempt",
    "Evaluated",
    "RunSummary",
    "Shares",
    "SourceShare",
    "TimedEvent",
    "attempts_of",
    "compute_imbalance",
    "events_of",
    "excess",
    "memory_by_kind",
    "role_kind",
    "shares_of",
    "source_shares",
    "summary_of",
    "wait_share",
]

AnyLine = StepLine | EventLine | MemoryLine
_ENDS_OF_LOSS = 3
"""Steps whose mean loss stands for the loss at an end of the run, because the loss of a single step is noisy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """Training between one start of the ranks and their end."""

    launch: int
    """Number of the launch, from 0; each ``train run`` is one launch."""
    number: int
    """Earlier restarts in the same launch."""
    resumed_from: int | None
    """Step of the checkpoint it started from; ``None`` without one."""
    steps: tuple[StepLine, ...]
    """Steps in the order in which they ran."""
    cause: str | None
    """How the first failing rank ended; ``None`` if none failed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedEvent:
    """An event on a clock that continues over all launches."""

    seconds: float
    line: EventLine
    after_step: int | None
    """Last step that was logged before the event."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluated:
    """Result of one evaluation."""

    step: int
    """Step after which the evaluation ran."""
    losses: Mapping[str, float]
    """Loss of each source, in nats per label."""

    @property
    def mean(self) -> float:
        """Mean over the sources, with equal weight."""
        return sum(self.losses.values()) / len(self.losses)


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceShare:
    """One source over the whole run."""

    name: str
    tokens: int
    share: float
    """Share of all tokens trained on."""
    target: float | None
    """Target of the mix file over the same steps; ``None`` if weights count samples."""

    @property
    def points_off(self) -> float | None:
        """How far the share is above its target, in percentage points, to a hundredth."""
        # Adding 0 turns -0.0 into 0.0.
        return None if self.target is None else round(100 * (self.share - self.target), 2) + 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Shares:
    """Shares of the tokens of every step, ``[N, S]`` each, with the targets of the mix."""

    names: tuple[str, ...]
    tokens_NS: NDArray[np.int64]
    step_NS: NDArray[np.float64]
    """Share of the step's tokens."""
    total_NS: NDArray[np.float64]
    """Share of all tokens up to and including the step."""
    step_target_NS: NDArray[np.float64] | None
    """Weights at the step; ``None`` if weights count samples, not tokens."""
    total_target_NS: NDArray[np.float64] | None
    """Weights so far, each step weighted by its tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSummary:
    """A run in a dozen figures; medians are over the last run of each step."""

    outcome: str
    """How the last launch ended, or whether it runs or was cut off, as far as this is known."""
    has_ended: bool
    """Whether the last launch logged its end."""
    steps: int
    """Distinct steps that were trained."""
    attempts: int
    failures: int
    """Attempts that a failing rank ended."""
    repeated_steps: int
    """Steps that were run again because their work was lost."""
    tokens: int
    seconds: float
    """Seconds from launch to the last line, over all launches."""
    first_loss: float
    """Mean of the first three steps."""
    last_loss: float
    """Mean of the last three steps."""
    tokens_per_s: float
    wait_share: float
    """Longest wait of a rank over the step's time."""
    imbalance: float
    """Planned cost of the heaviest rank over the mean."""
    over_bound: float
    """Planned cost of the heaviest rank over its bound."""
    compute_imbalance: float
    """Measured time of the slowest rank over the mean."""
    expert_imbalance: float
    """Token slots of the busiest expert over the mean, in the worst layer."""
    expert_slots: tuple[int, ...]
    """Rows that each expert computed in the last step, over all layers; empty in older logs."""
    router_entropy: float
    """Mean entropy of the routers' probabilities, in nats; NaN in older logs, like ``drop_rate``."""
    drop_rate: float
    """Mean share of expert choices that were dropped."""
    saves: int
    """Number of checkpoints, including those of lost work."""
    save_s: float
    """Time that saves stopped training; it is in no step's time."""
    longest_save_s: float
    evaluations: tuple[Evaluated, ...]
    """Evaluations in the order of their steps, each as it ran last."""
    sources: tuple[SourceShare, ...]
    peak_bytes: Mapping[str, int]
    """Peak proportional set size by kind of role."""

    @property
    def is_done(self) -> bool:
        """Whether the last launch ran to the end of its steps or of the data."""
        return self.has_ended and self.outcome.startswith("done")


def attempts_of(lines: Iterable[AnyLine]) -> tuple[Attempt, ...]:
    """Split a log at the starts of the ranks."""
    attempts: list[Attempt] = []
    launch = -1
    number, resumed, cause = 0, None, None
    steps: list[StepLine] = []

    def close() -> None:
        if launch >= 0:
            attempts.append(
                Attempt(
                    launch=launch,
                    number=number,
                    resumed_from=resumed,
                    steps=tuple(steps),
                    cause=cause,
                )
            )

    for line in lines:
        if isinstance(line, StepLine):
            launch = max(launch, 0)
            steps.append(line)
        elif isinstance(line, EventLine) and line.what in {"start", "restart"}:
            close()
            launch += line.what == "start" or launch < 0
            number, resumed, cause, steps = line.attempt, None, None, []
        elif isinstance(line, EventLine) and line.what == "resume":
            resumed = line.step
        elif isinstance(line, EventLine) and _is_failure(line) and cause is None:
            cause = line.detail
    close()
    return tuple(attempts)


def _is_failure(line: EventLine) -> bool:
    return line.what == "exit" and not line.detail.endswith(": code 0")


def events_of(lines: Iterable[AnyLine]) -> tuple[TimedEvent, ...]:
    """Return the events on one clock."""
    clock, events, step = _Clock(), [], None
    for line in lines:
        if isinstance(line, StepLine):
            step = line.step
            continue
        seconds = clock.at(line)
        if isinstance(line, EventLine):
            events.append(TimedEvent(seconds=seconds, line=line, after_step=step))
    return tuple(events)


class _Clock:
    """Joins launches, which each count seconds from their own start, into one clock."""

    def __init__(self) -> None:
        self._offset = self.latest = 0.0

    def at(self, line: EventLine | MemoryLine) -> float:
        # A restart continues its launch's clock; a launch begins its own at 0.
        if isinstance(line, EventLine) and line.what == "start":
            self._offset = self.latest
        seconds = self._offset + line.seconds
        self.latest = max(self.latest, seconds)
        return seconds


def role_kind(role: str) -> str:
    """Return the kind of a role, without its number: ``rank 0`` is a ``rank``, ``loader-3`` a ``loader``."""
    return role.rstrip("0123456789").rstrip(" -")


def memory_by_kind(
    lines: Iterable[AnyLine],
) -> tuple[NDArray[np.float64], dict[str, NDArray[np.int64]]]:
    """Return the times of the memory samples, and the bytes by kind of role, the greatest first."""
    clock, times, samples = _Clock(), [], []
    for line in lines:
        if isinstance(line, StepLine):
            continue
        seconds = clock.at(line)
        if isinstance(line, MemoryLine):
            by_kind: dict[str, int] = {}
            for role, size in line.pss_bytes.items():
                by_kind[role_kind(role)] = by_kind.get(role_kind(role), 0) + size
            times.append(seconds)
            samples.append(by_kind)
    kinds = {kind for sample in samples for kind in sample}
    series = {
        kind: np.asarray([sample.get(kind, 0) for sample in samples], np.int64) for kind in kinds
    }
    # Sorted by name too, because kinds of equal size would change places between two reports.
    ordered = sorted(series.items(), key=lambda item: (-int(item[1].max()), item[0]))
    return np.asarray(times, np.float64), dict(ordered)


def shares_of(steps: Sequence[StepLine], mix: MixConfig) -> Shares:
    """Return the shares of the sources at every step and so far.

    Args:
        steps: One line per step, in step order.
        mix: The mix that was trained on.
    """
    names = mix.names
    tokens_NS = np.asarray(
        [[line.tokens_by_source.get(name, 0) for name in names] for line in steps], np.int64
    ).reshape(len(steps), len(names))
    tokens_N1 = tokens_NS.sum(1, keepdims=True)
    # The first steps may have no token, and a share of none is 0.
    so_far_N1 = np.maximum(tokens_N1.cumsum(0), 1)
    target_NS = total_target_NS = None
    if mix.mix.level == "token":
        target_NS = np.asarray(
            [weights_at(mix.mix.stages, names, line.step) for line in steps], np.float64
        ).reshape(len(steps), len(names))
        total_target_NS = (target_NS * tokens_N1).cumsum(0) / so_far_N1
    return Shares(
        names=names,
        tokens_NS=tokens_NS,
        step_NS=tokens_NS / np.maximum(tokens_N1, 1),
        total_NS=tokens_NS.cumsum(0) / so_far_N1,
        step_target_NS=target_NS,
        total_target_NS=total_target_NS,
    )


def wait_share(line: StepLine) -> float:
    """Return the share of a step that the longest-waiting rank waited for its batch."""
    return max(line.wait_s, default=0.0) / line.seconds if line.seconds > 0 else 0.0


def compute_imbalance(line: StepLine) -> float:
    """Return the slowest rank's compute time over the mean of all ranks."""
    mean = sum(line.compute_s) / max(len(line.compute_s), 1)
    return max(line.compute_s, default=0.0) / mean if mean > 0 else 1.0


def excess(ratio: float) -> float:
    """Return how far a ratio to a least value is above 1; rounding may put it slightly below."""
    return max(0.0, ratio - 1)


def summary_of(
    lines: Sequence[AnyLine], mix: MixConfig, unended: str = RUNNING_OR_CUT_OFF
) -> RunSummary:
    """Return the figures of a run.

    Args:
        lines: Its log.
        mix: The mix that was trained on.
        unended: The outcome to return if the last launch has no end in the log.
    """
    steps = last_of_each_step(lines)
    attempts, clock = attempts_of(lines), _Clock()
    for line in lines:
        if not isinstance(line, StepLine):
            clock.at(line)
    ends: list[str] = []
    for line in lines:
        # A launch that continues after another's end has none yet.
        if isinstance(line, EventLine) and line.what in {"start", "end"}:
            ends = [line.detail] if line.what == "end" else []
    saves_s = [
        # A save in parallel with training delayed it only by the copy.
        line.took_s if line.stall_s is None else line.stall_s
        for line in lines
        if isinstance(line, EventLine) and line.took_s is not None
    ]
    _, memory = memory_by_kind(lines)
    return RunSummary(
        outcome=ends[0] if ends else unended,
        has_ended=bool(ends),
        steps=len(steps),
        attempts=len(attempts),
        failures=sum(attempt.cause is not None for attempt in attempts),
        repeated_steps=sum(len(attempt.steps) for attempt in attempts) - len(steps),
        tokens=sum(line.tokens for line in steps),
        seconds=clock.latest,
        first_loss=_mean([line.loss for line in steps[:_ENDS_OF_LOSS]]),
        last_loss=_mean([line.loss for line in steps[-_ENDS_OF_LOSS:]]),
        tokens_per_s=_median([line.tokens / line.seconds for line in steps if line.seconds > 0]),
        wait_share=_median([wait_share(line) for line in steps]),
        imbalance=_median([line.imbalance for line in steps]),
        over_bound=_median([line.imbalance / line.bound for line in steps if line.bound > 0]),
        compute_imbalance=_median([compute_imbalance(line) for line in steps]),
        expert_imbalance=_median(_known(line.expert_imbalance for line in steps)),
        expert_slots=(steps[-1].expert_slots or ()) if steps else (),
        router_entropy=_median(_known(line.router_entropy for line in steps)),
        drop_rate=_mean(_known(line.drop_rate for line in steps)),
        saves=sum(isinstance(line, EventLine) and line.what == "checkpoint" for line in lines),
        save_s=_median(saves_s),
        longest_save_s=max(saves_s, default=float("nan")),
        evaluations=tuple(
            Evaluated(step=line.step, losses=line.evaluation) for line in steps if line.evaluation
        ),
        sources=source_shares(steps, mix),
        peak_bytes={kind: int(sizes.max()) for kind, sizes in memory.items()},
    )


def source_shares(steps: Sequence[StepLine], mix: MixConfig) -> tuple[SourceShare, ...]:
    """Return every source's share of the tokens of ``steps``, in the order of the mix file."""
    if not steps:
        return ()
    shares = shares_of(steps, mix)
    targets = shares.total_target_NS
    return tuple(
        SourceShare(
            name=name,
            tokens=int(shares.tokens_NS[:, s].sum()),
            share=float(shares.total_NS[-1, s]),
            target=None if targets is None else float(targets[-1, s]),
        )
        for s, name in enumerate(shares.names)
    )


def _known(values: Iterable[float | None]) -> list[float]:
    return [value for value in values if value is not None]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else float("nan")


def _median(values: Sequence[float]) -> float:
    return median(values) if values else float("nan")

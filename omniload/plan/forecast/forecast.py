"""Forecast of a run's draws, from the weights and sizes of its sources.

Shares are linear in the step between two boundaries of the schedule, so a run of any
length costs a few array operations, not a loop over its steps.

Shape suffixes:
    S  sources        K  steps looked at
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from statistics import fmean

import numpy as np
from numpy.typing import NDArray

from omniload.base.units import format_bytes
from omniload.mix.config import LARGEST_STEP, MixConfig
from omniload.mix.schedule import boundaries, part_done, stage_at, weights_at
from omniload.plan.forecast.figures import StepFigures
from omniload.plan.forecast.sizes import SourceSizes, repetitions_of

__all__ = [
    "Forecast",
    "Span",
    "first_where",
    "forecast",
    "steps_per_epoch",
    "tokens_by_step",
    "warnings_of",
    "warnings_of_a_step",
]

_MUCH_MEMORY_BYTES = 16 << 30
"""More than the nodes of a small cluster can spare."""
_WORTH_A_WARNING = 0.01
_HALVINGS = 60  # a double has 53 bits
_ROUNDING = 1e-9
"""Tolerance for sums of shares."""
_MOST_POINTS = 1024
"""Steps of a ramp that are looked at; the rest lies between them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """The draws from step ``start`` up to step ``stop``, excluded."""

    start: int
    stop: int
    tokens_S: NDArray[np.float64]
    """Tokens of each source."""
    samples_S: NDArray[np.float64]
    """Samples of each source."""
    epochs_S: NDArray[np.float64]
    """Times each source is gone through."""

    @property
    def shares_S(self) -> NDArray[np.float64]:
        """Share of each source in the tokens of the span."""
        return self.tokens_S / max(float(self.tokens_S.sum()), 1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """The expected draws of a run."""

    stages: tuple[Span, ...]
    """One span for each stage that is reached."""
    total: Span
    """The whole run."""
    ends_early: bool
    """Whether ``mix.stop`` ends the run before the steps asked for."""
    wanted_S: NDArray[np.float64] | None = None
    """Tokens that amounts come to; ``None`` where the mix has weights."""


def tokens_by_step(mix: MixConfig, sizes: SourceSizes, step: int) -> NDArray[np.float64]:
    """Return the tokens of each source drawn before ``step``, ``[S]``.

    Args:
        mix: The declared mix.
        sizes: What its sources hold, and a step draws.
        step: First step that does not count.

    Returns:
        Tokens; exact for weights by tokens, and for weights by samples within the
        quadrature of a ramp longer than a thousand steps.
    """
    per_step = sizes.tokens_per_step(mix)
    if (wanted_S := sizes.wanted_S(mix)) is not None:
        return wanted_S * min(1.0, step * per_step / float(wanted_S.sum()))
    total = np.zeros(len(mix.names))
    edges = sorted({0, step, *(edge for edge in boundaries(mix) if edge < step)})
    for start, stop in pairwise(edges):
        first, last = (_weights(mix, k) for k in (start, stop - 1))
        constant = np.array_equal(first, last)
        points = 1 if constant else min(stop - start, _MOST_POINTS)
        done_K = np.linspace(0.0, 1.0, points) if constant else _way(mix, start, stop, points)
        shares_KS = first + (last - first) * done_K[:, None]
        if mix.mix.counted == "sample":
            shares_KS = shares_KS * sizes.tokens_per_sample_S
            shares_KS = shares_KS / shares_KS.sum(axis=1, keepdims=True)
        total += shares_KS.mean(axis=0) * (stop - start) * per_step
    return total


def forecast(
    mix: MixConfig,
    sizes: SourceSizes,
    num_steps: int,
    *,
    drawn_KS: NDArray[np.int64] | None = None,
) -> Forecast:
    """Say what a run of ``num_steps`` steps will draw.

    Args:
        mix: The declared mix.
        sizes: What its sources hold, and a step draws.
        num_steps: Steps asked for.
        drawn_KS: Tokens of each source in each step, of a run that was planned whole: nothing is left to expect.

    Raises:
        ValueError: ``num_steps`` is negative, or a size is not above 0.
    """
    if num_steps < 0:
        raise ValueError(f"num_steps is {num_steps}; it is at least 0")
    for name, column in (
        ("samples_S", sizes.samples_S),
        ("tokens_per_sample_S", sizes.tokens_per_sample_S),
    ):
        if not (np.isfinite(column) & (column > 0)).all():
            raise ValueError(f"{name} holds {float(column.min())}; every size is above 0")
    per_step, by_step = sizes.tokens_per_step(mix), partial(tokens_by_step, mix, sizes)
    wanted_S = sizes.wanted_S(mix)
    drawn_by: Callable[[int], NDArray[np.float64]]
    if drawn_KS is not None:
        drawn_by, end = partial(_sums_by, drawn_KS), len(drawn_KS)
    elif wanted_S is None:
        first_S = sizes.tokens_of(np.ones(len(mix.names)))
        drawn_by, end = _drawn_by(mix, first_S, num_steps, per_step, by_step)
    else:
        drawn_by, end = by_step, min(num_steps, math.ceil(float(wanted_S.sum()) / per_step))
    starts = [stage.from_step for stage in mix.mix.stages if stage.from_step < end] or [0]
    edges = [*starts, end]

    def span(start: int, stop: int) -> Span:
        tokens_S = drawn_by(stop) - drawn_by(start)
        return Span(
            start=start,
            stop=stop,
            tokens_S=tokens_S,
            samples_S=tokens_S / sizes.tokens_per_sample_S,
            epochs_S=tokens_S / sizes.epoch_tokens_S,
        )

    return Forecast(
        stages=tuple(span(a, b) for a, b in pairwise(edges)),
        total=span(0, end),
        ends_early=end < num_steps,
        wanted_S=wanted_S,
    )


def steps_per_epoch(mix: MixConfig, sizes: SourceSizes) -> list[int | None]:
    """Return after how many steps each source was gone through once; ``None`` for one that never is.

    An epoch of a source is every record of it once.
    """
    epoch_S = sizes.tokens_of(np.ones(len(mix.names)))
    if (wanted_S := sizes.wanted_S(mix)) is not None:
        parts = (epoch_S / wanted_S * (1 - _ROUNDING)).tolist()
        num_steps = float(wanted_S.sum()) / sizes.tokens_per_step(mix)
        return [math.ceil(part * num_steps) if part <= 1 else None for part in parts]
    drawn_by = partial(tokens_by_step, mix, sizes)
    edges = sorted({0, *boundaries(mix), LARGEST_STEP})
    drawn_KS = np.stack([drawn_by(edge) for edge in edges])
    constant = [np.array_equal(_weights(mix, a), _weights(mix, b - 1)) for a, b in pairwise(edges)]

    def first(s: int) -> int | None:
        at = int(np.searchsorted(drawn_KS[:, s], epoch_S[s] * (1 - _ROUNDING)))
        if at == len(edges):
            return None
        low, high, before = edges[at - 1], edges[at], drawn_KS[at - 1, s]
        if constant[at - 1]:
            rate = (drawn_KS[at, s] - before) / (high - low)
            return low + math.ceil(float((epoch_S[s] - before) / rate) * (1 - _ROUNDING))
        return first_where(lambda step: bool(drawn_by(step)[s] >= epoch_S[s]), low, high)

    return [first(s) for s in range(len(epoch_S))]


def warnings_of(mix: MixConfig, expected: Forecast, steps: Sequence[StepFigures]) -> list[str]:
    """Return what a user should know before starting, each with its remedy.

    Args:
        mix: The declared mix.
        expected: What the run will draw.
        steps: Some of its steps, planned.
    """
    pack = mix.pack
    warnings = repetitions_of(mix.names, expected.total.epochs_S.tolist())
    if expected.ends_early and expected.wanted_S is None:
        warnings.append(
            f"mix.stop ends the run before step {expected.total.stop:,}; raise weights evenly with the "
            "sources' sizes, or set mix.stop to never"
        )
    bound = fmean(step.bound for step in steps)
    if bound > 1 + _WORTH_A_WARNING:
        warnings.append(
            f"the heaviest row costs {bound:.2f} times the mean of a rank, so balancing cannot reach 1; "
            "raise batch.tokens, shorten pack.length or use fewer ranks"
        )
    waste = 1 - sum(step.tokens for step in steps) / sum(step.capacity for step in steps)
    if waste > _WORTH_A_WARNING:
        best_fit = (
            f"raise pack.lookahead_rows, {pack.lookahead_rows} now"
            if pack.method == "best_fit"
            else "set pack.method to best_fit"
        )
        cut = ", or set pack.method to concat_and_split, which cuts documents and leaves none"
        if (packing := mix.own_packing) is not None and (packing.own_S | packing.alone_S).any():
            kept = packing.own_S | packing.alone_S
            names = [name for name, own in zip(mix.names, kept.tolist(), strict=True) if own]
            said = (
                f"{', '.join(names[:8])} {'has' if len(names) == 1 else 'have'} rows that no other source shares: say "
                "rows: shared where that need not be"
            )
            best_fit, cut = f"{said}, or raise pack.lookahead_rows, {pack.lookahead_rows} now", ""
        warnings.append(
            f"{waste:.1%} of the rows is padding; {best_fit}{cut * _may_cut_anywhere(mix)}"
        )
    return warnings


def _may_cut_anywhere(mix: MixConfig) -> bool:
    """Return whether ``concat_and_split`` is a remedy: images, pairs and sequences that are counted are never cut.

    For answers it is not a remedy either: padding is cheaper than an answer that is cut off from its prompt.
    """
    whole = any(
        source.images_transform is not None or source.is_nested for source in mix.sources.values()
    )
    return not whole and mix.mix.level != "sequence"


def warnings_of_a_step(mix: MixConfig, sizes: SourceSizes) -> list[str]:
    """Return what is odd about a single step: sources it goes through more than once, and its memory.

    Args:
        mix: The declared mix.
        sizes: What its sources hold, estimated; no step has been planned.
    """
    per_step = float(mix.batch.tokens)
    if mix.pack.method == "none":
        per_step = min(per_step, mix.rows_per_step * float(sizes.tokens_per_sample_S.max()))
    most_S = np.zeros(len(mix.names))
    for step in boundaries(mix):
        most_S = np.maximum(most_S, _tokens_at(mix, sizes, step, per_step) / sizes.epoch_tokens_S)
    warnings = [
        f"a single step goes through {name} {'over ' * (epochs > 1e6)}{min(epochs, 1e6):,.1f} times: it holds "
        f"{sizes.samples_S[s]:,.0f} records of about {sizes.tokens_per_sample_S[s]:,.0f} tokens; add data, lower its "
        f"weight, or lower batch.tokens {mix.batch.tokens:,}"
        for s, (name, epochs) in enumerate(zip(mix.names, most_S.tolist(), strict=True))
        if epochs > 1
    ]
    ahead = mix.rows_per_step * mix.steps_ahead + mix.pack.lookahead_rows
    held_bytes = ahead * mix.pack.length * np.dtype(np.int32).itemsize
    if held_bytes > _MUCH_MEMORY_BYTES:
        warnings.append(
            f"token ids of {ahead:,} rows are held ahead, {format_bytes(held_bytes)}: {mix.steps_ahead} "
            f"steps of {mix.rows_per_step:,} rows and pack.lookahead_rows {mix.pack.lookahead_rows:,}, of pack.length "
            f"{mix.pack.length:,}; lower one of them unless the loaders have that much"
        )
    return warnings


def _way(mix: MixConfig, start: int, stop: int, points: int) -> NDArray[np.float64]:
    """Return the progress of a ramp, from 0 to 1, at ``points`` points between step ``start`` and step ``stop - 1``."""
    stage = mix.mix.stages[stage_at(mix.mix.stages, start)]
    done_K = np.linspace(start, stop - 1, points) - stage.from_step + 1
    parts_K = np.array([part_done(stage, done) for done in done_K.tolist()], np.float64)
    way_K: NDArray[np.float64] = (parts_K - parts_K[0]) / (parts_K[-1] - parts_K[0])
    return way_K


def _tokens_at(mix: MixConfig, sizes: SourceSizes, step: int, total: float) -> NDArray[np.float64]:
    """Return the tokens of each source drawn in a step of ``total``, ``[S]``, whatever was drawn before it."""
    if mix.mix.amounts is not None:  # every step draws alike, as long as there is enough
        return tokens_by_step(mix, replace(sizes, planned_tokens=total), 1)
    shares_S = _weights(mix, step)
    if mix.mix.counted == "sample":
        shares_S = shares_S * sizes.tokens_per_sample_S
        shares_S = shares_S / shares_S.sum()
    return shares_S * total


def _weights(mix: MixConfig, step: int) -> NDArray[np.float64]:
    return np.asarray(weights_at(mix.mix.stages, mix.names, step))


def _drawn_by(
    mix: MixConfig,
    epoch_S: NDArray[np.float64],
    num_steps: int,
    per_step: float,
    by_step: Callable[[int], NDArray[np.float64]],
) -> tuple[Callable[[int], NDArray[np.float64]], int]:
    """Return the tokens drawn before a step as a function, by the stop policy, and the first step there is not.

    Args:
        mix: The declared mix.
        epoch_S: Tokens of the first epoch of each source.
        num_steps: Steps asked for.
        per_step: Tokens of a step.
        by_step: Tokens drawn before a step where no source ends.
    """
    if mix.mix.stop == "never":
        return by_step, num_steps

    def at(time: float) -> NDArray[np.float64]:
        low = int(time)
        before = by_step(low)
        return before if low == time else before + (time - low) * (by_step(low + 1) - before)

    if mix.mix.stop == "each_once":
        end = min(num_steps, math.ceil(float(epoch_S.sum()) / per_step))
        return lambda step: _of_each_at_most(epoch_S, at, step * per_step), end
    every = np.any if mix.mix.stop == "first_exhausted" else np.all
    end = first_where(lambda step: bool(every(by_step(step) >= epoch_S)), 0, num_steps)
    if not every(by_step(end) >= epoch_S):
        return by_step, end
    # The last step is as long as it takes to reach the end: the sooner or the later of the ends in it.
    before_S = by_step(max(end - 1, 0))
    parts_S = (epoch_S - before_S) / np.maximum(by_step(end) - before_S, 1e-300)
    within = parts_S.min() if mix.mix.stop == "first_exhausted" else parts_S.max()
    last = max(end - 1, 0) + min(max(float(within), 0.0), 1.0)
    return lambda step: at(min(step, last)), end


def _sums_by(drawn_KS: NDArray[np.int64], step: int) -> NDArray[np.float64]:
    drawn_S: NDArray[np.float64] = drawn_KS[:step].sum(axis=0, dtype=np.float64)
    return drawn_S


def _of_each_at_most(
    epoch_S: NDArray[np.float64], at: Callable[[float], NDArray[np.float64]], total: float
) -> NDArray[np.float64]:
    """Return ``total`` tokens, of no source more than it has; the others share what it does not give.

    Sources that are left go on in proportion, as if the time of the schedule ran faster.
    """
    if total >= float(epoch_S.sum()):
        return epoch_S

    def held(time: float) -> NDArray[np.float64]:
        return np.minimum(at(time), epoch_S)

    low, high = 0.0, 1.0
    while float(held(high).sum()) < total:  # each_once: all have weights
        low, high = high, 2 * high
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if float(held(middle).sum()) < total else (low, middle)
    return held(high)


def first_where(holds: Callable[[int], bool], low: int, high: int) -> int:
    """Return the least step from ``low`` on for which ``holds``, which once true stays true; or ``high``."""
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if holds(middle) else (middle + 1, high)
    return low

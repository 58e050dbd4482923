"""The draw of a step from its candidates, also at the end of a run with a finite number of epochs.

The order of drawing alone decides the end: it is the draw after which ``mix.stop`` says
that enough was drawn. It depends neither on how a run is cut into steps, nor on ranks, nor
on how many samples happen to be known ahead.

Shape suffixes:
    S  sources        A  pieces of a source that may be drawn        N  draws, in order        C  candidates
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from omniload.mix.config import MixConfig
from omniload.mix.deficit import Drawn, draw, integer_weights
from omniload.mix.schedule import GOES_ON, MixSchedule, weights_at
from omniload.mix.state import MixState
from omniload.plan.rows.by_source import sizes_of

__all__ = ["Known", "Starved", "StepDraw", "draw_candidates", "draw_step", "ending_of"]


@dataclass(frozen=True, slots=True)
class Starved:
    """A step cannot be planned yet: more of ``source`` must be known."""

    source: int
    ran_out: int | None = None
    """Source that was due and had no known sample, if another one is named; with more of it known, this may change."""

    @property
    def sources(self) -> tuple[int, ...]:
        """The sources that this depends on: more samples of any other source change nothing."""
        return (self.source,) if self.ran_out is None else (self.source, self.ran_out)


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """The pieces of a source from its cursor on, as far as they are known; a draw takes one of them."""

    lengths_A: NDArray[Any]
    """Tokens of each piece."""
    counted_A: NDArray[np.int64]
    """What each piece counts for the weights, or for an amount."""
    samples_A: NDArray[np.integer[Any]]
    """Sample of each piece, as an index into ``positions_N``."""
    positions_N: NDArray[np.int64]
    """Raw position of each sample."""
    end: int
    """Raw position before which the first epoch ends, or the epochs of an amount."""
    is_whole: bool
    """Whether every piece up to there is known, or all that is left of an amount."""

    @property
    def left(self) -> int:
        """Number of pieces before ``end``; looked up only when asked for, as there may be hundreds of sources."""
        samples = np.searchsorted(self.positions_N, self.end)
        return int(np.searchsorted(self.samples_A, samples))


@dataclass(frozen=True, slots=True, kw_only=True)
class StepDraw:
    """The draw of a step."""

    drawn: Drawn
    is_last: bool
    """Whether no later step draws anything."""


def draw_step(
    mix: MixConfig,
    state: MixState,
    weights_S: Sequence[int],
    known_S: Sequence[Known],
    budget: int,
) -> StepDraw | Starved:
    """Draw what a step needs, or what there is before the end.

    Args:
        mix: The declared mix.
        state: State before the step.
        weights_S: Integer weights of the step.
        known_S: What is known of each source.
        budget: What to draw where the run does not end: tokens, or rows where ``pack.method`` is ``none``.

    Returns:
        The draw; or the source that needs more known samples, because it is due or because it is
        still unknown whether its last piece was drawn.
    """
    lengths = [known.lengths_A for known in known_S]
    counted = [known.counted_A for known in known_S]
    sizes = sizes_of(mix, lengths)
    is_by_token, goes_on = mix.mix.level == "token", mix.mix.stop in GOES_ON
    # Only a source that is known to its end; any other may be drawn up because its loader is behind.
    skipped = [s for s, k in enumerate(known_S) if k.is_whole and goes_on]

    def drawing(size: int) -> Drawn:
        other = None if is_by_token and sizes is lengths else sizes  # one column is both
        return draw(counted, weights_S, state.credits_S, budget=size, sizes=other, ended=skipped)

    drawn = drawing(budget)
    # Returned before ends are looked up: no source ends, and there may be hundreds.
    if mix.mix.stop == "never":
        return _unless_starved(drawn, is_last=False)
    counts = drawn.counts_S.tolist()
    ending_S = ending_of(mix, state, weights_S)
    for s in ending_S:
        # It is unknown yet whether that was its last piece, and the end must not depend on how far loaders have read.
        if counts[s] == len(lengths[s]) and not known_S[s].is_whole:
            return Starved(s, drawn.starved)
    if goes_on:
        return _unless_starved(drawn, is_last=_size_of(sizes, counts) < budget)
    if mix.mix.stop == "all_exhausted" and drawn.starved is not None:
        return Starved(drawn.starved)
    # Sources whose last piece is drawn in this step, or was drawn before: then nothing is left of them.
    over = [s for s in ending_S if counts[s] >= known_S[s].left]
    if len(over) < (1 if mix.mix.stop == "first_exhausted" else len(ending_S)):
        return _unless_starved(drawn, is_last=False)
    ends = [_place_of_last(drawn, s, known_S[s].left) for s in over]
    stop = 1 + (min(ends) if mix.mix.stop == "first_exhausted" else max(ends))
    head = np.bincount(drawn.sources_N[:stop], minlength=len(known_S)).tolist()
    # Drawn again up to there, and not cut off: credits depend on where a draw ends.
    return StepDraw(drawn=drawing(_size_of(sizes, head)), is_last=True)


def _unless_starved(drawn: Drawn, *, is_last: bool) -> StepDraw | Starved:
    if drawn.starved is not None:
        return Starved(drawn.starved)
    return StepDraw(drawn=drawn, is_last=is_last)


def ending_of(mix: MixConfig, state: MixState, weights_S: Sequence[int]) -> list[int]:
    """Return the sources whose ends decide the end of the run.

    With ``first_exhausted`` these are the sources that were ever drawn from; otherwise the sources
    that are drawn from now or in a later stage, because no other will ever end.
    """
    if mix.mix.stop == "first_exhausted":
        return [s for s, weight in enumerate(weights_S) if weight > 0 or state.drawn_S[s] > 0]
    now = weights_at(mix.mix.stages, mix.names, state.step)
    later = [stage for stage in mix.mix.stages if stage.from_step > state.step]
    return [
        s
        for s, name in enumerate(mix.names)
        if now[s] > 0 or any(stage.weights.get(name, 0.0) > 0 for stage in later)
    ]


def _place_of_last(drawn: Drawn, source: int, left: int) -> int:
    """Return which draw takes the last of the ``left`` pieces of a source; -1 if an earlier step did."""
    return int(np.flatnonzero(drawn.sources_N == source)[left - 1]) if left else -1


def _size_of(sizes: Sequence[NDArray[Any]], counts: Sequence[int]) -> int:
    return sum(
        int(column[:count].sum(dtype=np.int64)) for column, count in zip(sizes, counts, strict=True)
    )


def draw_candidates(
    schedule: MixSchedule,
    lengths_C: NDArray[Any],
    sources_C: NDArray[Any],
    *,
    step: int,
    budget: int,
    credits_S: Sequence[int] | None = None,
) -> tuple[NDArray[np.int64], Drawn]:
    """Draw samples until they hold ``budget`` tokens.

    Args:
        schedule: Weights over time.
        lengths_C: Tokens in each candidate.
        sources_C: Number of each candidate's source; the candidates of a source are drawn in this order.
        step: Number of the step.
        budget: Tokens to draw; the last sample may exceed it.
        credits_S: Credits left by the step before; zeros at the start.

    Returns:
        The candidates drawn, in drawing order ``[N]``, and the draw with the credits for the next step.

    Raises:
        ValueError: A source is not in the schedule, ``step`` is negative, the credits are
            not one for each source, or the candidates of a source ran out before the
            budget was reached.
    """
    num = len(schedule.names)
    if step < 0:
        raise ValueError(f"step is {step}; steps are numbered from 0")
    if credits_S is not None and len(credits_S) != num:
        raise ValueError(f"credits_S has {len(credits_S)} values for {num} sources; give one each")
    if len(sources_C) and not 0 <= sources_C.min() <= sources_C.max() < num:
        raise ValueError(
            f"sources are numbered {int(sources_C.min())} to {int(sources_C.max())}; the schedule names "
            f"{num}, numbered from 0"
        )
    by_source = np.argsort(sources_C, kind="stable")
    cuts = np.cumsum(np.bincount(sources_C, minlength=num))[:-1]
    queues = np.split(by_source, cuts)
    lengths = [lengths_C[queue] for queue in queues]
    by_sample = schedule.level == "sample"
    drawn = draw(
        [np.ones_like(column) for column in lengths] if by_sample else lengths,
        integer_weights(weights_at(schedule.stages, schedule.names, step)),
        [0] * num if credits_S is None else credits_S,
        budget=budget,
        sizes=lengths if by_sample else None,
    )
    if drawn.starved is not None:
        raise ValueError(
            f"source {schedule.names[drawn.starved]!r} has {len(queues[drawn.starved])} candidates, too few "
            f"for a budget of {budget} tokens; load more of it"
        )
    heads = [queue[:n] for queue, n in zip(queues, drawn.counts_S.tolist(), strict=True)]
    # Samples of a source come in its order, so a stable sort by source lines both up.
    chosen_N = np.empty(len(drawn.sources_N), np.int64)
    chosen_N[np.argsort(drawn.sources_N, kind="stable")] = np.concatenate(heads)
    return chosen_N, drawn

"""What steps train on: drawn by the mix, packed into rows. Ranks play no part in it.

The one place where weights, cursors and packing meet. It works on metadata: tables of
sample lengths for the positions ahead of every cursor.

Small steps cost more in calls than in tokens: looking at every source, and setting up the
draw, takes as long for one sample as for a thousand. The order of drawing does not depend
on where it is cut, so one draw serves the next few steps, and each step takes its part::

    drawn   a a b a c | b a a | c a b a |          cut where a step's budget is reached
            step 7      step 8  step 9

Shape suffixes:
    S  sources        N  samples of a source that are known ahead
    U  units drawn    P  pieces        R  rows
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from omniload.mix.config import MixConfig
from omniload.mix.deficit import draw, integer_weights
from omniload.mix.pieces import PieceTable
from omniload.mix.samples import SampleTable
from omniload.mix.schedule import GOES_ON, amounts_S, draw_weights_at, steps_alike, weights_at
from omniload.mix.state import MixState
from omniload.plan.drawing import Known, Starved, draw_step
from omniload.plan.packing import packed
from omniload.plan.units import Units, pieces_of, units_of_sources

__all__ = [
    "Exhausted",
    "Membership",
    "Starved",
    "membership_of",
    "window_of",
]

_NO_END = 1 << 62


@dataclass(frozen=True, slots=True, kw_only=True)
class Membership:
    """The rows of one step, and the state after it."""

    pieces: PieceTable
    """Pieces of all rows, grouped by row."""
    row_offsets: NDArray[np.int64]
    """Boundaries of the rows in ``pieces``, ``[R + 1]``; the last step of a run may have fewer."""
    finished_S: NDArray[np.int64]
    """Samples at the head of each source that are used up."""
    served_S: tuple[int, ...]
    """What was drawn of each source, in the unit of the weights."""
    dropped_S: NDArray[np.int64]
    """Samples among them left out because they are longer than a row and ``overlong`` is ``drop``."""
    lost_S: NDArray[np.int64]
    """Tokens of them that were cut off or left out with them."""
    after: MixState
    """State before the next step."""


@dataclass(frozen=True, slots=True)
class Exhausted:
    """There is no such step: all that ``mix.stop`` lets a run draw is in the rows of earlier ones."""


def membership_of(
    mix: MixConfig,
    state: MixState,
    ahead: Sequence[SampleTable],
    epochs_S: Sequence[int] | None = None,
) -> Membership | Starved | Exhausted:
    """Draw and pack the step that ``state`` stands before.

    Args:
        mix: The declared mix.
        state: State before the step.
        ahead: For each source the known samples from its cursor on, ``[S]``.
        epochs_S: Raw records of each source, ``[S]``; needed unless sources are repeated for ever.

    Returns:
        The step's rows, equal however many more samples ``ahead`` knows; or the source
        whose samples are missing; or that the run has ended.
    """
    weights_S = draw_weights_at(mix, state, epochs_S)
    ends_S = _ends(mix, epochs_S)
    if mix.mix.stop in ("first_exhausted", *GOES_ON):
        ahead = [_before(table, end) for table, end in zip(ahead, ends_S, strict=True)]
    units = units_of_sources(mix, state, ahead)
    known_S = _known(mix, state, units, ends_S)
    found = draw_step(mix, state, weights_S, known_S, _budget_of(mix, state))
    if isinstance(found, Starved):
        return found
    drawn = found.drawn
    fresh = pieces_of(ahead, units, drawn)
    if found.is_last and not len(fresh) and not len(state.carried):
        return Exhausted()

    pieces, row_offsets, carried = packed(mix, state.carried, fresh, is_last=found.is_last)
    counts = drawn.counts_S.tolist()
    cursors = [
        u.cursor_after(n) or c for u, n, c in zip(units, counts, state.cursors_S, strict=True)
    ]
    finished = [u.finished_by(n) for u, n in zip(units, counts, strict=True)]
    for s in _ended(mix, known_S, counts):
        if ends_S[s] != _NO_END:
            cursors[s], finished[s] = (ends_S[s], 0, 0), len(ahead[s])
    dropped_S, lost_S = _losses(mix, units, [(s, 0, stop) for s, stop in enumerate(finished)])
    return Membership(
        pieces=pieces,
        row_offsets=row_offsets,
        finished_S=np.asarray(finished, np.int64),
        served_S=drawn.served_S,
        dropped_S=dropped_S,
        lost_S=lost_S,
        after=state.after(
            cursors_S=cursors,
            served_S=drawn.served_S,
            weights_S=weights_S,
            carried=carried,
        ),
    )


def _budget_of(mix: MixConfig, state: MixState) -> int:
    """Return what a step draws, as ``draw_step`` counts it: tokens, or rows where each unit has one to itself."""
    if mix.pack.method == "none":
        return mix.rows_per_step
    rows = mix.rows_per_step + mix.pack.rows_ahead
    return rows * mix.pack.length - int(state.carried.lengths_P.sum())


def _ends(mix: MixConfig, epochs_S: Sequence[int] | None) -> Sequence[int]:
    if epochs_S is not None and mix.mix.amounts is not None:
        kinds = [(amount := mix.mix.amounts.get(name)) and amount.kind for name in mix.names]
        wanted = zip(kinds, amounts_S(mix, epochs_S), strict=True)
        return [n if kind == "epochs" else _NO_END for kind, n in wanted]
    if epochs_S is not None:
        return epochs_S
    if mix.mix.stop != "never":
        raise ValueError(f"mix.stop is {mix.mix.stop!r}; give the records of every source")
    return [_NO_END] * len(mix.names)


def _known(
    mix: MixConfig, state: MixState, units_S: Sequence[Units], ends_S: Sequence[int]
) -> list[Known]:
    """Return what is known of each source, counted as weights or amounts count it."""
    if (amounts := mix.mix.amounts) is None:
        return [u.known(end, mix.mix.level) for u, end in zip(units_S, ends_S, strict=True)]
    return [
        units_S[s].known_of(amounts.get(name), state.cursors_S[s], state.drawn_S[s], ends_S[s])
        for s, name in enumerate(mix.names)
    ]


def _ended(mix: MixConfig, known_S: Sequence[Known], counts: Sequence[int]) -> list[int]:
    """Return the sources that the run goes on without and that have nothing left."""
    if mix.mix.stop not in GOES_ON:
        return []
    return [
        s
        for s, (known, count) in enumerate(zip(known_S, counts, strict=True))
        if known.is_whole and count == known.left
    ]


def _before(table: SampleTable, end: int) -> SampleTable:
    """Return the samples before position ``end``."""
    stop = int(np.searchsorted(table.positions_N, end))
    if stop == len(table):
        return table
    return SampleTable(
        start=table.start,
        stop=table.stop,
        positions_N=table.positions_N[:stop],
        subs_N=table.subs_N[:stop],
        lengths_N=table.lengths_N[:stop],
    )


def _losses(
    mix: MixConfig, units_S: Sequence[Units], used: Iterable[tuple[int, int, int]]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return what each source loses to the policy for overlong documents: samples and tokens, ``[S]``.

    Args:
        mix: The declared mix; of a source that splits such documents, nothing is lost.
        units_S: The units of each source.
        used: Sources, and which of their samples are used up: from, to before.
    """
    dropped_S, lost_S = (np.zeros(len(units_S), np.int64) for _ in range(2))
    loses_S = [overlong != "split" for overlong in mix.overlong_S]
    for s, first, stop in used if any(loses_S) else ():
        if loses_S[s]:
            dropped_S[s] = np.count_nonzero(units_S[s].kept_N[first:stop] == 0)
            lost_S[s] = units_S[s].lost_N(first, stop).sum()
    return dropped_S, lost_S


def window_of(
    mix: MixConfig,
    state: MixState,
    ahead: Sequence[SampleTable],
    epochs_S: Sequence[int] | None = None,
    *,
    most: int,
) -> list[Membership] | Starved | Exhausted:
    """Draw and pack the steps from the one that ``state`` stands before.

    Args:
        mix: The declared mix.
        state: State before the first of them.
        ahead: For each source the known samples from its cursor on, ``[S]``.
        epochs_S: Raw records of each source, ``[S]``; needed unless sources are repeated for ever.
        most: Steps wanted.

    Returns:
        One step at least and ``most`` at most, each as ``membership_of`` gives it; or the source
        whose samples are missing for the first; or that the run has ended.
    """
    # A run that ends is drawn step by step: its end is sought in each.
    most = min(most, steps_alike(mix.mix.stages, state.step)) if mix.mix.stop == "never" else 1
    if most > 1 and (steps := _drawn_together(mix, state, ahead, most)):
        return steps
    found = membership_of(mix, state, ahead, epochs_S)
    return [found] if isinstance(found, Membership) else found


def _drawn_together(
    mix: MixConfig, state: MixState, ahead: Sequence[SampleTable], most: int
) -> list[Membership]:
    """Return as many steps as are known whole; none where samples of the first are missing."""
    pass_ = _Pass.of(mix, state, ahead, most)
    steps: list[Membership] = []
    begin = 0
    for _ in range(most):
        end = pass_.end_of_step(begin, _budget_of(mix, state))
        if end is None:
            break
        step = pass_.step(state, begin, end)
        steps.append(step)
        state, begin = step.after, end
    return steps


@dataclass(slots=True, kw_only=True)
class _Pass:
    """One draw, and how far steps have taken it."""

    mix: MixConfig
    weights_S: Sequence[int]
    units_S: Sequence[Units]
    fresh: PieceTable
    """All pieces drawn."""
    served_P: NDArray[np.int64]
    """Each piece in the unit of the weights."""
    ends_P: NDArray[np.int64]
    """What was drawn up to and with each piece, in the unit of the budget."""
    counts_S: list[int]
    """Units of each source in the steps so far."""
    finished_S: list[int]
    """Samples of each source used up by them."""

    @classmethod
    def of(
        cls, mix: MixConfig, state: MixState, ahead: Sequence[SampleTable], most: int
    ) -> "_Pass":
        """Draw enough for ``most`` steps, or what is known."""
        weights_S = integer_weights(weights_at(mix.mix.stages, mix.names, state.step))
        units_S = units_of_sources(mix, state, ahead)
        lengths = [units.stops_U - units.starts_U for units in units_S]
        by_sample, unpacked = mix.mix.level == "sample", mix.pack.method == "none"
        counted = [units.first_U.astype(np.int64) for units in units_S] if by_sample else lengths
        sizes = [np.ones(len(column), np.int64) for column in lengths] if unpacked else lengths
        # Each step draws what the one before packed; the last unit may go over by a row.
        later = (most - 1) * mix.rows_per_step * (1 if unpacked else mix.pack.length)
        over = 0 if unpacked else mix.pack.length
        drawn = draw(
            counted,
            weights_S,
            state.credits_S,
            budget=_budget_of(mix, state) + later + over,
            sizes=None if sizes is counted else sizes,
        )
        fresh = pieces_of(ahead, units_S, drawn)
        lengths_P = fresh.lengths_P.astype(np.int64)
        num_sources = len(units_S)
        return cls(
            mix=mix,
            weights_S=weights_S,
            units_S=units_S,
            fresh=fresh,
            served_P=(fresh.starts_P == 0).astype(np.int64) if by_sample else lengths_P,
            ends_P=np.arange(1, len(fresh) + 1) if unpacked else np.cumsum(lengths_P),
            counts_S=[0] * num_sources,
            finished_S=[0] * num_sources,
        )

    def end_of_step(self, begin: int, budget: int) -> int | None:
        """Return the piece that a step from ``begin`` on ends before; ``None`` where too little is known."""
        if budget <= 0:
            return begin
        target = budget + (int(self.ends_P[begin - 1]) if begin else 0)
        end = int(np.searchsorted(self.ends_P, target)) + 1
        return end if end <= len(self.fresh) else None

    def step(self, state: MixState, begin: int, end: int) -> Membership:
        """Return the step of the pieces ``begin`` to ``end`` and those carried."""
        sources_P = self.fresh.sources_P[begin:end]
        drawn_S = np.bincount(sources_P, minlength=len(self.units_S))
        served_S = _sums_by(sources_P, self.served_P[begin:end], len(self.units_S))
        cursors, finished = list(state.cursors_S), [0] * len(self.units_S)
        touched = np.flatnonzero(drawn_S).tolist()
        lost = [(s, self.finished_S[s]) for s in touched]
        for s in touched:
            units, self.counts_S[s] = self.units_S[s], self.counts_S[s] + int(drawn_S[s])
            cursors[s] = units.cursor_after(self.counts_S[s]) or cursors[s]
            before, self.finished_S[s] = self.finished_S[s], units.finished_by(self.counts_S[s])
            finished[s] = self.finished_S[s] - before
        pieces, row_offsets, carried = packed(
            self.mix, state.carried, self.fresh.part(begin, end), is_last=False
        )
        dropped_S, lost_S = _losses(
            self.mix, self.units_S, [(s, first, self.finished_S[s]) for s, first in lost]
        )
        return Membership(
            pieces=pieces,
            row_offsets=row_offsets,
            finished_S=np.asarray(finished, np.int64),
            served_S=served_S,
            dropped_S=dropped_S,
            lost_S=lost_S,
            after=state.after(
                cursors_S=cursors, served_S=served_S, weights_S=self.weights_S, carried=carried
            ),
        )


def _sums_by(
    sources_P: NDArray[np.integer[Any]], values_P: NDArray[np.int64], num_sources: int
) -> tuple[int, ...]:
    # In floating point exact up to 2**53, more tokens than any step has.
    sums_S = np.bincount(sources_P, weights=values_P, minlength=num_sources)
    return tuple(sums_S.astype(np.int64).tolist())

"""Draws several steps in one pass: the same rows as step by step, with less work.

Small steps cost more in calls than in tokens: looking at every source, and setting up the
draw, takes as long for one sample as for a thousand. The order of drawing does not depend
on where it is cut, so one draw serves several steps, and each step takes its part::

    drawn   a a b a c | b a a | c a b a |          cut where a step's budget is reached
            step 7      step 8  step 9

Shape suffixes:
    S  sources        P  pieces drawn, in order
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from omniload.mix.config import MixConfig
from omniload.mix.deficit import Drawn, draw
from omniload.mix.edits.history import History
from omniload.mix.edits.stages import with_begun
from omniload.mix.pieces import PieceTable
from omniload.mix.samples import SampleTable
from omniload.mix.schedule import steps_alike
from omniload.mix.state import Cursor, MixState
from omniload.plan.drawable import Drawable, first_refused, pieces_of, places_of
from omniload.plan.membership import (
    Candidates,
    Exhausted,
    Membership,
    Starved,
    budget_of,
    candidates_of,
    lost_of,
    membership_from,
)
from omniload.plan.packing import packed
from omniload.plan.rows.by_source import room_of, sizes_of

__all__ = ["steps_together", "window_of"]


def steps_together(
    history: History,
    state: MixState,
    ahead: Sequence[SampleTable],
    records_S: Sequence[int],
    *,
    most: int,
) -> list[Membership] | Starved | Exhausted:
    """Draw steps that are planned together. They end before the next edit, because one draw has one set of weights.

    Args:
        history: The mix and its edits.
        state: State before the first of them.
        ahead: For each source, including those that later edits add, the known samples from its cursor on.
        records_S: Raw records of each source.
        most: Steps wanted.

    Returns:
        As ``window_of``.
    """
    mix, state = history.entered(state)
    sources, most = len(mix.names), int(min(most, history.steps_alike(state.step)))
    found = window_of(mix, state, ahead[:sources], records_S[:sources], most=most)
    if not mix.mix.waits or not isinstance(found, list):
        return found
    # A window also ends before the step at which a stage is due that waited for epochs.
    due = (
        i for i, m in enumerate(found, 1) if with_begun(history, m.after, records_S) is not history
    )
    return found[: next(due, None)]


def window_of(
    mix: MixConfig,
    state: MixState,
    ahead: Sequence[SampleTable],
    records_S: Sequence[int] | None = None,
    *,
    most: int,
) -> list[Membership] | Starved | Exhausted:
    """Draw and pack the steps from the one that ``state`` stands before.

    Args:
        mix: The declared mix.
        state: State before the first of them.
        ahead: For each source the known samples from its cursor on, ``[S]``.
        records_S: Raw records of each source, ``[S]``; needed unless sources are repeated for ever.
        most: Steps wanted.

    Returns:
        One step at least and ``most`` at most, each as ``membership_of`` gives it; or the source
        whose samples are missing for the first; or that the run has ended.
    """
    most = min(most, steps_alike(mix.mix.stages, state.step))
    given = candidates_of(mix, state, ahead, records_S)
    if most > 1 and (steps := _drawn_together(mix, state, given, most)):
        return steps
    found = membership_from(mix, state, given)
    return [found] if isinstance(found, Membership) else found


def _drawn_together(
    mix: MixConfig, state: MixState, given: Candidates, most: int
) -> list[Membership]:
    """Return as many steps as are known whole, and in which no source ends; there may be none.

    The step in which a source ends is drawn by itself, because what it draws depends on that end.
    """
    limits_S = given.before_ends(mix, state)
    if limits_S is None:
        return []
    pass_ = _Pass.of(mix, state, given, limits_S, most)
    steps: list[Membership] = []
    begin = 0
    for _ in range(most):
        end = pass_.end_of_step(begin, budget_of(mix, state))
        # Complete steps are returned, so that ranks neither wait for the rest nor are refused earlier steps.
        if end is None or first_refused(mix, fresh := pass_.fresh.part(begin, end)) is not None:
            break
        step = pass_.step(state, fresh, begin)
        steps.append(step)
        state, begin = step.after, end
    return steps


@dataclass(slots=True, kw_only=True)
class _Pass:
    """One draw for several steps, with running sums over its pieces, to cut it into steps."""

    mix: MixConfig
    weights_S: Sequence[int]
    drawable_S: Sequence[Drawable]
    fresh: PieceTable
    """All pieces drawn, in order."""
    served_P: NDArray[np.int64]
    """What each piece counts for the weights."""
    ends_P: NDArray[np.int64]
    """Amount drawn up to and including each piece, in the unit of the budget."""
    sources_P: list[int]
    """Source of each piece."""
    cursors_P: list[Cursor]
    """Cursor of the piece's source once the piece is drawn."""
    finished_P: list[int]
    """Samples of the piece's source that are used up by then."""
    finished_S: list[int]
    """Samples of each source that the steps so far have used up."""
    stop: int
    """First piece that is a source's last one; steps end before it."""

    @classmethod
    def of(
        cls,
        mix: MixConfig,
        state: MixState,
        given: Candidates,
        limits_S: Sequence[int],
        most: int,
    ) -> "_Pass":
        """Draw enough for ``most`` steps, or what is known; no step draws ``limits_S`` pieces of a source."""
        weights_S, drawable_S, unpacked = (
            given.weights_S,
            given.drawable_S,
            mix.pack.method == "none",
        )
        lengths = [known.lengths_A for known in given.known_S]
        counted = [known.counted_A for known in given.known_S]
        is_by_token = mix.mix.level == "token"
        sizes = sizes_of(mix, lengths)
        # Each step draws what the one before packed; the last piece may go over by a row.
        later = (most - 1) * mix.rows_per_step * (1 if unpacked else mix.pack.length)
        over = 0 if unpacked else mix.pack.length
        drawn = draw(
            counted,
            weights_S,
            state.credits_S,
            budget=budget_of(mix, state) + later + over,
            sizes=None if is_by_token and sizes is lengths else sizes,
        )
        # Starved or not: steps are taken as far as they are whole, and the first that is not is asked for by itself.
        places_P = places_of(drawn)
        fresh = pieces_of(given.ahead, drawable_S, drawn, places_P)
        lengths_P = fresh.lengths_P
        # The tokens of a sample that continues in another piece are still needed.
        counted_S = list(zip(drawable_S, drawn.counts_S.tolist(), strict=True))
        is_end_P = np.concatenate([each.ends(n) for each, n in counted_S])[places_P]
        samples_P = np.concatenate([each.samples_A[:n] for each, n in counted_S])[places_P]
        tokens_P = np.where(is_end_P, 0, fresh.stops_P)
        cursors = (fresh.positions_P, fresh.subs_P + is_end_P, tokens_P)
        served_P = lengths_P
        if not is_by_token:
            counts = drawn.counts_S.tolist()
            heads = [column[:n] for column, n in zip(counted, counts, strict=True)]
            served_P = np.concatenate(heads)[places_P]
        return cls(
            mix=mix,
            weights_S=weights_S,
            drawable_S=drawable_S,
            fresh=fresh,
            served_P=served_P,
            ends_P=np.arange(1, len(fresh) + 1)
            if unpacked
            else np.cumsum(room_of(mix, fresh.sources_P, lengths_P)),
            sources_P=fresh.sources_P.tolist(),
            cursors_P=list(zip(*(column.tolist() for column in cursors), strict=True)),
            finished_P=(samples_P + is_end_P).tolist(),
            finished_S=[0] * len(drawable_S),
            stop=_first_last(drawn, places_P, limits_S),
        )

    def end_of_step(self, begin: int, budget: int) -> int | None:
        """Return the piece that a step from ``begin`` on ends before; ``None`` where too little is known."""
        # The carried pieces fill the step by themselves.
        if budget <= 0:
            return begin
        # The piece that reaches the budget is the step's last, as where a draw of its own ends.
        target = budget + (int(self.ends_P[begin - 1]) if begin else 0)
        end = int(self.ends_P.searchsorted(target)) + 1
        return end if end <= self.stop else None

    def step(self, state: MixState, fresh: PieceTable, begin: int) -> Membership:
        """Return the step of the pieces ``fresh``, which lie from ``begin`` on, and those carried."""
        end = begin + len(fresh)
        served_S = _sums_by(fresh.sources_P, self.served_P[begin:end], len(self.drawable_S))
        cursors, finished = list(state.cursors_S), [0] * len(self.drawable_S)
        used = []
        # The last piece of each source; sources that were not drawn from cost nothing.
        for s, at in dict(zip(self.sources_P[begin:end], range(begin, end), strict=True)).items():
            cursors[s] = self.cursors_P[at]
            before, self.finished_S[s] = self.finished_S[s], self.finished_P[at]
            finished[s] = self.finished_S[s] - before
            used.append((s, before, self.finished_S[s]))
        # Packed step by step: what a row takes depends on what the step before carried on.
        pieces, row_offsets, carried = packed(self.mix, state.carried, fresh, is_last=False)
        return Membership(
            pieces=pieces,
            row_offsets=row_offsets,
            finished_S=np.asarray(finished, np.int64),
            served_S=served_S,
            lost_S=lost_of(self.mix, self.drawable_S, used),
            after=state.after(
                cursors_S=cursors, served_S=served_S, weights_S=self.weights_S, carried=carried
            ),
        )


def _first_last(drawn: Drawn, places_P: NDArray[np.int64], limits_S: Sequence[int]) -> int:
    """Return the first draw that takes the last piece before the end of a source; the number of draws if none does."""
    behind_S = np.cumsum(drawn.counts_S) - drawn.counts_S
    left_P = np.asarray(limits_S)[drawn.sources_N] - (places_P - behind_S[drawn.sources_N])
    found = np.flatnonzero(left_P <= 1)
    return int(found[0]) if len(found) else len(places_P)


def _sums_by(
    sources_P: NDArray[np.integer[Any]], values_P: NDArray[np.int64], num_sources: int
) -> tuple[int, ...]:
    # In floating point exact up to 2**53, more tokens than any step has.
    sums_S = np.bincount(sources_P, weights=values_P, minlength=num_sources)
    return tuple(sums_S.astype(np.int64).tolist())

"""Membership: the samples of a step, drawn by the mix and packed into rows, independent of the ranks.

The one place where weights, cursors and packing meet. It works on metadata: tables of
sample lengths for the positions ahead of every cursor.

Shape suffixes:
    S  sources        N  samples of a source that are known ahead
    P  pieces        R  rows
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from omniload.base.errors import ConfigError
from omniload.mix.config import MixConfig
from omniload.mix.pieces import PieceTable
from omniload.mix.samples import SampleTable
from omniload.mix.schedule import GOES_ON, amounts_S, draw_weights_at
from omniload.mix.state import MixState
from omniload.plan.drawable import Drawable, drawable_of, first_refused, pieces_of, places_of
from omniload.plan.drawing import Known, Starved, draw_step, ending_of
from omniload.plan.packing import packed
from omniload.plan.rows.by_source import room_of

__all__ = [
    "Candidates",
    "Exhausted",
    "Membership",
    "Starved",
    "budget_of",
    "candidates_of",
    "lost_of",
    "membership_from",
    "membership_of",
]

_NO_END = 1 << 62  # above any position, and a sum of two still fits 64 bits


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
    """Amount drawn from each source, in the unit of the weights."""
    lost_S: NDArray[np.int64]
    """Tokens of them that are cut off or left out because a sample is longer than a row; see ``overlong``."""
    after: MixState
    """State before the next step."""


@dataclass(frozen=True, slots=True)
class Exhausted:
    """There is no such step: all that ``mix.stop`` lets a run draw is in the rows of earlier ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidates:
    """What a step may draw, and by which weights."""

    weights_S: tuple[int, ...]
    """Integer weights; 0 for a source that the run goes on without."""
    ends_S: Sequence[int]
    """Raw position before which the epochs of each source end that decide its end, if any do."""
    ahead: Sequence[SampleTable]
    """For each source the known samples from its cursor on, before its end where none is drawn after it."""
    drawable_S: Sequence[Drawable]
    known_S: Sequence[Known]

    def before_ends(self, mix: MixConfig, state: MixState) -> list[int] | None:
        """Return how many pieces of each source may be drawn without the end of any source, ``[S]``.

        ``None`` if an end may decide the very next step. No number limits a source that is repeated for ever, or until
        the last one ends.
        """
        if mix.mix.stop == "never":
            return [_NO_END] * len(self.known_S)
        limits_S = [known.left for known in self.known_S]
        ending_S = ending_of(mix, state, self.weights_S)
        for s in ending_S:
            if not limits_S[s]:
                if not self.known_S[s].is_whole or mix.mix.stop == "first_exhausted":
                    return None
                limits_S[s] = _NO_END
        # A source that ends by records without samples is moved to its end by the next step.
        for s in _ended(mix, self.known_S, [0] * len(self.known_S)):
            if self.ends_S[s] not in (_NO_END, state.cursors_S[s][0]):
                return None
        return limits_S if any(limits_S[s] < _NO_END for s in ending_S) else None


def candidates_of(
    mix: MixConfig,
    state: MixState,
    ahead: Sequence[SampleTable],
    records_S: Sequence[int] | None,
) -> Candidates:
    """Return what a step may draw; the arguments are those of ``membership_of``."""
    ends_S = _ends(mix, records_S)
    # Loaders may have read past the end; with `all_exhausted` that is drawn, as sources repeat until the last ends.
    if mix.mix.stop in ("first_exhausted", *GOES_ON):
        ahead = [_before(table, end) for table, end in zip(ahead, ends_S, strict=True)]
    drawable_S = drawable_of(mix, state, ahead)
    return Candidates(
        weights_S=draw_weights_at(mix, state, records_S),
        ends_S=ends_S,
        ahead=ahead,
        drawable_S=drawable_S,
        known_S=_known(mix, state, drawable_S, ends_S),
    )


def membership_of(
    mix: MixConfig,
    state: MixState,
    ahead: Sequence[SampleTable],
    records_S: Sequence[int] | None = None,
) -> Membership | Starved | Exhausted:
    """Draw and pack the step that ``state`` stands before.

    Args:
        mix: The declared mix.
        state: State before the step.
        ahead: For each source the known samples from its cursor on, ``[S]``.
        records_S: Raw records of each source, ``[S]``; needed unless sources are repeated for ever.

    Returns:
        The step's rows, equal however many more samples ``ahead`` knows; or the source
        whose samples are missing; or that the run has ended.

    Raises:
        ConfigError: It draws a document that is longer than a row, and whose source refuses such.
    """
    return membership_from(mix, state, candidates_of(mix, state, ahead, records_S))


def membership_from(
    mix: MixConfig, state: MixState, given: Candidates
) -> Membership | Starved | Exhausted:
    """Draw and pack a step from its candidates; returns and raises as ``membership_of``."""
    ahead, drawable_S, known_S, ends_S = given.ahead, given.drawable_S, given.known_S, given.ends_S
    weights_S = given.weights_S
    found = draw_step(mix, state, weights_S, known_S, budget_of(mix, state))
    if isinstance(found, Starved):
        return found
    drawn = found.drawn
    fresh = pieces_of(ahead, drawable_S, drawn, places_of(drawn))
    _require_none_refused(mix, fresh, state.step)
    # Pieces that still wait for a row get a step of their own.
    if found.is_last and not len(fresh) and not len(state.carried):
        return Exhausted()

    pieces, row_offsets, carried = packed(mix, state.carried, fresh, is_last=found.is_last)
    counts = drawn.counts_S.tolist()
    cursors = [
        each.cursor_after(n) or c
        for each, n, c in zip(drawable_S, counts, state.cursors_S, strict=True)
    ]
    finished = [each.finished_by(n) for each, n in zip(drawable_S, counts, strict=True)]
    for s in _ended(mix, known_S, counts):
        # The cursor tells that a source has ended, and records without samples may follow its last sample.
        if ends_S[s] != _NO_END:
            cursors[s], finished[s] = (ends_S[s], 0, 0), len(ahead[s])
    return Membership(
        pieces=pieces,
        row_offsets=row_offsets,
        finished_S=np.asarray(finished, np.int64),
        served_S=drawn.served_S,
        lost_S=lost_of(mix, drawable_S, [(s, 0, stop) for s, stop in enumerate(finished)]),
        after=state.after(
            cursors_S=cursors, served_S=drawn.served_S, weights_S=weights_S, carried=carried
        ),
    )


def _require_none_refused(mix: MixConfig, fresh: PieceTable, step: int) -> None:
    """End a run that draws a document which is longer than a row, where its source refuses such."""
    if (refused := first_refused(mix, fresh)) is None:
        return
    source, position, sub, _, _, size = refused
    name = mix.names[source]
    whose = "its overlong" if mix.sources[name].overlong else "pack.overlong"
    raise ConfigError(
        f"sources.{name}: step {step} draws sample {sub} of record {position}, {size:,} tokens, more than pack.length "
        f"{mix.pack.length:,}, and {whose} is refuse; leave it out (transforms: a filter by max_tokens, overlong: "
        "drop), cut it (split, truncate), or use longer rows"
    )


def budget_of(mix: MixConfig, state: MixState) -> int:
    """Return what a step draws, as ``draw_step`` counts it: tokens, or rows where each piece has one to itself."""
    if mix.pack.method == "none":
        return mix.rows_per_step
    # Less what is carried: with the same budget for every step, pieces that wait would become more with each.
    rows = mix.rows_per_step + mix.rows_ahead
    carried = room_of(mix, state.carried.sources_P, state.carried.lengths_P)
    return rows * mix.pack.length - int(carried.sum())


def _ends(mix: MixConfig, records_S: Sequence[int] | None) -> Sequence[int]:
    if records_S is not None and mix.mix.amounts is not None:
        kinds = [(amount := mix.mix.amounts.get(name)) and amount.kind for name in mix.names]
        wanted = zip(kinds, amounts_S(mix, records_S), strict=True)
        return [n if kind == "epochs" else _NO_END for kind, n in wanted]
    if records_S is not None:
        return records_S
    if mix.mix.stop != "never":
        raise ValueError(f"mix.stop is {mix.mix.stop!r}; give the records of every source")
    return [_NO_END] * len(mix.names)


def _known(
    mix: MixConfig, state: MixState, drawable_S: Sequence[Drawable], ends_S: Sequence[int]
) -> list[Known]:
    """Return what is known of each source, counted as weights or amounts count it."""
    if (amounts := mix.mix.amounts) is None:
        return [
            each.known(end, mix.mix.counted) for each, end in zip(drawable_S, ends_S, strict=True)
        ]
    return [
        drawable_S[s].known_of(amounts.get(name), state.cursors_S[s], state.drawn_S[s], ends_S[s])
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
    stop = int(table.positions_N.searchsorted(end))
    if stop == len(table):
        return table
    return table.of_samples(slice(stop))


def lost_of(
    mix: MixConfig, drawable_S: Sequence[Drawable], used: Iterable[tuple[int, int, int]]
) -> NDArray[np.int64]:
    """Return the tokens that each source loses to the policy for overlong documents, ``[S]``.

    Args:
        mix: The declared mix; a source that splits such documents loses nothing.
        drawable_S: What may be drawn of each source.
        used: Sources, and which of their samples are used up: from, to before.
    """
    lost_S = np.zeros(len(drawable_S), np.int64)
    overlong_S = mix.overlong_S
    # Mostly nothing is lost, and there may be hundreds of sources.
    for s, first, stop in used:
        if overlong_S[s] != "split":
            lost_S[s] = drawable_S[s].lost_N(first, stop).sum()
    return lost_S

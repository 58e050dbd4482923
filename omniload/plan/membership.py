"""What a step trains on: drawn by the mix, packed into rows. Ranks play no part in it.

The one place where weights, cursors and packing meet. It works on metadata: tables of
sample lengths for the positions ahead of every cursor.

Shape suffixes:
    S  sources        N  samples of a source that are known ahead
    U  units drawn    P  pieces        R  rows
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from omniload.mix.config import MixConfig
from omniload.mix.deficit import Drawn, integer_weights
from omniload.mix.pieces import PieceTable
from omniload.mix.samples import SampleTable
from omniload.mix.schedule import weights_at
from omniload.mix.state import Cursor, MixState
from omniload.plan.packing import CARRIED, best_fit, fill_in_order
from omniload.plan.passes import Known, Starved, draw_step

__all__ = ["Exhausted", "Membership", "Starved", "membership_of"]

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
    weights_S = integer_weights(weights_at(mix.mix.stages, mix.names, state.step))
    ends_S = _ends(mix, epochs_S)
    if mix.mix.stop in ("first_exhausted", "each_once"):
        ahead = [_before(table, end) for table, end in zip(ahead, ends_S, strict=True)]
    units = [
        _units_of(mix, cursor, table) for cursor, table in zip(state.cursors_S, ahead, strict=True)
    ]
    known_S = [u.known(end) for u, end in zip(units, ends_S, strict=True)]
    found = draw_step(mix, state, state.live_weights(weights_S), known_S, _budget(mix, state))
    if isinstance(found, Starved):
        return found
    drawn = found.drawn
    fresh = _pieces_of(ahead, units, drawn)
    if found.is_last and not len(fresh) and not len(state.carried):
        return Exhausted()

    pieces, row_offsets, carried = _pack(mix, state.carried, fresh, is_last=found.is_last)
    counts = drawn.counts_S.tolist()
    cursors = [
        u.cursor_after(n) or c for u, n, c in zip(units, counts, state.cursors_S, strict=True)
    ]
    finished = [u.finished_by(n) for u, n in zip(units, counts, strict=True)]
    for s in _ended(mix, known_S, counts):
        cursors[s], finished[s] = (ends_S[s], 0, 0), len(ahead[s])
    return Membership(
        pieces=pieces,
        row_offsets=row_offsets,
        finished_S=np.asarray(finished, np.int64),
        served_S=drawn.served_S,
        dropped_S=_sums(mix, [u.kept_N[:m] == 0 for u, m in zip(units, finished, strict=True)]),
        lost_S=_sums(mix, [u.lost_N(m) for u, m in zip(units, finished, strict=True)]),
        after=state.after(
            cursors_S=cursors,
            served_S=drawn.served_S,
            weights_S=weights_S,
            carried=carried,
        ),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Units:
    """What the mix draws of one source: its samples, cut to at most a row each.

    Drawing a long document row by row, and not at once, keeps a source within a row of
    its share and keeps one document from filling whole steps.
    """

    table: SampleTable
    kept_N: NDArray[np.int64]
    """Tokens of each sample that the policy for overlong documents keeps."""
    samples_U: NDArray[np.int64]
    """Sample of each unit."""
    starts_U: NDArray[np.int64]
    stops_U: NDArray[np.int64]
    first_U: NDArray[np.bool_]
    """Whether the unit is the first of its sample."""

    def known(self, end: int) -> Known:
        """Return what is known of the source, whose first epoch ends before position ``end``."""
        return Known(
            lengths_U=self.stops_U - self.starts_U,
            firsts_U=self.first_U,
            samples_U=self.samples_U,
            positions_N=self.table.positions_N,
            end=end,
            is_whole=self.table.stop >= end,
        )

    def lost_N(self, count: int) -> NDArray[np.int64]:
        """Return the tokens of each of the first ``count`` samples that the policy does not keep."""
        lost: NDArray[np.int64] = self.table.lengths_N[:count] - self.kept_N[:count]
        return lost

    def finished_by(self, count: int) -> int:
        """Return how many samples are used up once ``count`` units are drawn."""
        if count == 0:
            return 0
        sample = int(self.samples_U[count - 1])
        return sample + int(self.stops_U[count - 1] == self.kept_N[sample])

    def cursor_after(self, count: int) -> Cursor | None:
        """Return the cursor once ``count`` units are drawn; ``None`` when that is none."""
        if count == 0:
            return None
        sample, stop = int(self.samples_U[count - 1]), int(self.stops_U[count - 1])
        position, sub = int(self.table.positions_N[sample]), int(self.table.subs_N[sample])
        return (position, sub + 1, 0) if stop == self.kept_N[sample] else (position, sub, stop)


def _budget(mix: MixConfig, state: MixState) -> int:
    """Return what a step draws, as ``draw_step`` counts it: tokens, or rows where each unit has one to itself."""
    if mix.pack.method == "none":
        return mix.rows_per_step
    rows = mix.rows_per_step + mix.pack.rows_ahead
    return rows * mix.pack.length - int(state.carried.lengths_P.sum())


def _ends(mix: MixConfig, epochs_S: Sequence[int] | None) -> Sequence[int]:
    if epochs_S is not None:
        return epochs_S
    if mix.mix.stop != "never":
        raise ValueError(f"mix.stop is {mix.mix.stop!r}; give the records of every source")
    return [_NO_END] * len(mix.names)


def _ended(mix: MixConfig, known_S: Sequence[Known], counts: Sequence[int]) -> list[int]:
    """Return the sources that are not repeated and have nothing left."""
    if mix.mix.stop != "each_once":
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


def _units_of(mix: MixConfig, cursor: Cursor, table: SampleTable) -> _Units:
    length = mix.pack.length
    kept_N = table.lengths_N.astype(np.int64)
    if mix.pack.overlong == "truncate":
        kept_N = np.minimum(kept_N, length)
    elif mix.pack.overlong == "drop":
        kept_N = np.where(kept_N > length, 0, kept_N)
    begins_N = np.zeros_like(kept_N)
    whole = cursor[2] == 0 and kept_N.min(initial=1) > 0 and kept_N.max(initial=1) <= length
    if whole:  # the usual case, and there may be hundreds of sources
        return _Units(
            table=table,
            kept_N=kept_N,
            samples_U=np.arange(len(table)),
            starts_U=begins_N,
            stops_U=kept_N,
            first_U=np.ones(len(table), np.bool_),
        )
    if len(table) and (int(table.positions_N[0]), int(table.subs_N[0])) == cursor[:2]:
        begins_N[0] = cursor[2]
    parts_N = -(-(kept_N - begins_N) // length)
    samples_U = np.repeat(np.arange(len(table)), parts_N)
    part_U = np.arange(len(samples_U)) - np.repeat(np.cumsum(parts_N) - parts_N, parts_N)
    starts_U = begins_N[samples_U] + part_U * length
    return _Units(
        table=table,
        kept_N=kept_N,
        samples_U=samples_U,
        starts_U=starts_U,
        stops_U=np.minimum(starts_U + length, kept_N[samples_U]),
        first_U=starts_U == 0,
    )


def _sums(mix: MixConfig, columns: Sequence[NDArray[Any]]) -> NDArray[np.int64]:
    """Sum what each source loses to the policy for overlong documents; splitting loses nothing."""
    if mix.pack.overlong == "split":
        return np.zeros(len(columns), np.int64)
    return np.asarray([int(column.sum()) for column in columns], np.int64)


def _pieces_of(ahead: Sequence[SampleTable], units: Sequence[_Units], drawn: Drawn) -> PieceTable:
    """Return the drawn units as pieces, in drawing order."""
    # Units of one source come in its order: a stable sort by source lines both up.
    place = np.empty(len(drawn.sources_N), np.int64)
    place[np.argsort(drawn.sources_N, kind="stable")] = np.arange(len(drawn.sources_N))
    heads = [u.samples_U[:n] for u, n in zip(units, drawn.counts_S.tolist(), strict=True)]
    counted = list(zip(units, drawn.counts_S.tolist(), strict=True))
    columns: dict[str, list[NDArray[Any]]] = {
        "positions_P": [t.positions_N[head] for t, head in zip(ahead, heads, strict=True)],
        "subs_P": [t.subs_N[head] for t, head in zip(ahead, heads, strict=True)],
        "starts_P": [u.starts_U[:n].astype(np.int32) for u, n in counted],
        "stops_P": [u.stops_U[:n].astype(np.int32) for u, n in counted],
        "sizes_P": [t.lengths_N[head] for t, head in zip(ahead, heads, strict=True)],
    }
    return PieceTable(
        sources_P=drawn.sources_N,
        **{name: np.concatenate(parts)[place] for name, parts in columns.items()},
    )


def _pack(
    mix: MixConfig, carried: PieceTable, fresh: PieceTable, *, is_last: bool
) -> tuple[PieceTable, NDArray[np.int64], PieceTable]:
    """Return the pieces grouped by row, the rows' boundaries, and what is carried on, oldest first.

    Where nothing is drawn after them, rows that stay empty are left out.
    """
    pool = PieceTable.concatenated([carried, fresh])
    num_rows, capacity = mix.rows_per_step, mix.pack.length
    if mix.pack.method == "best_fit":
        rows_P = best_fit(
            pool.lengths_P.tolist(), num_first=len(carried), num_rows=num_rows, capacity=capacity
        )
    elif mix.pack.method == "none":
        rows_P = np.arange(len(pool), dtype=np.int32)
    else:
        piece, starts, stops, rows = fill_in_order(
            pool.lengths_P, num_rows=num_rows, capacity=capacity
        )
        cut = pool.take(piece)
        pool = PieceTable(
            sources_P=cut.sources_P,
            positions_P=cut.positions_P,
            subs_P=cut.subs_P,
            starts_P=(cut.starts_P + starts).astype(np.int32),
            stops_P=(cut.starts_P + stops).astype(np.int32),
            sizes_P=cut.sizes_P,
        )
        rows_P = rows.astype(np.int32)
    if is_last:
        num_rows = (
            int(rows_P.max()) + 1
        )  # every method begins a row only when those before it are full
    order = np.argsort(rows_P, kind="stable")
    num_carried = int((rows_P == CARRIED).sum())
    row_offsets = np.searchsorted(rows_P[order[num_carried:]], np.arange(num_rows + 1)).astype(
        np.int64
    )
    return pool.take(order[num_carried:]), row_offsets, pool.take(order[:num_carried])

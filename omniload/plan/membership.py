"""What a step trains on: drawn by the mix, packed into rows. Ranks play no part in it.

The one place where weights, cursors and packing meet. It works on metadata: tables of
sample lengths for the positions ahead of every cursor.

Shape suffixes:
    S  sources        P  pieces        N  samples drawn        R  rows
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from omniload.mix.config import MixConfig
from omniload.mix.deficit import Drawn, draw, integer_weights
from omniload.mix.pieces import PieceTable
from omniload.mix.samples import SampleTable
from omniload.mix.schedule import weights_at
from omniload.mix.state import Cursor, MixState
from omniload.plan.packing import CARRIED, best_fit, fill_in_order

__all__ = ["Membership", "Starved", "membership_of"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Membership:
    """The rows of one step, and the state after it."""

    pieces: PieceTable
    """Pieces of all rows, grouped by row."""
    row_offsets: NDArray[np.int64]
    """Boundaries of the rows in ``pieces``, ``[R + 1]``."""
    counts_S: NDArray[np.int64]
    """Samples drawn from each source."""
    served_S: tuple[int, ...]
    """What was drawn of each source, in the unit of the weights."""
    dropped_S: NDArray[np.int64]
    """Samples left out because they are longer than a row and ``overlong`` is ``drop``."""
    truncated_S: NDArray[np.int64]
    """Tokens cut off because ``overlong`` is ``truncate``, or lost with dropped samples."""
    after: MixState
    """State before the next step."""


@dataclass(frozen=True, slots=True)
class Starved:
    """A step cannot be planned yet: ``source`` is due and no more of its samples are known."""

    source: int


def membership_of(
    mix: MixConfig, state: MixState, ahead: Sequence[SampleTable]
) -> Membership | Starved:
    """Draw and pack the step that ``state`` stands before.

    Args:
        mix: The declared mix.
        state: State before the step.
        ahead: For each source the known samples from its cursor on, ``[S]``.

    Returns:
        The step's rows, equal however many more samples ``ahead`` knows; or the source
        whose samples are missing.
    """
    weights_S = integer_weights(weights_at(mix.mix.stages, mix.names, state.step))
    kept = [_kept_lengths(mix, table.lengths_N) for table in ahead]
    lookahead = mix.pack.lookahead_rows if mix.pack.method == "best_fit" else 0
    budget = (mix.rows_per_step + lookahead) * mix.pack.length - int(state.carried.lengths_P.sum())
    by_sample = mix.mix.level == "sample"
    drawn = draw(
        [np.ones_like(k) for k in kept] if by_sample else kept,
        weights_S,
        state.credits_S,
        budget=budget,
        sizes=kept if by_sample else None,
    )
    if drawn.starved is not None:
        return Starved(drawn.starved)

    fresh = _pieces_of(mix, ahead, kept, drawn)
    pieces, row_offsets, carried = _pack(mix, state.carried, fresh)
    counts = drawn.counts_S.tolist()
    lost = [t.lengths_N[:n] - k[:n] for t, k, n in zip(ahead, kept, counts, strict=True)]
    return Membership(
        pieces=pieces,
        row_offsets=row_offsets,
        counts_S=drawn.counts_S,
        served_S=drawn.served_S,
        dropped_S=np.asarray(
            [int((k[:n] == 0).sum()) for k, n in zip(kept, counts, strict=True)], np.int64
        ),
        truncated_S=np.asarray([int(column.sum()) for column in lost], np.int64),
        after=state.after(
            cursors_S=[
                _cursor_after(state.cursors_S[s], ahead[s], n) for s, n in enumerate(counts)
            ],
            served_S=drawn.served_S,
            weights_S=weights_S,
            carried=carried,
        ),
    )


def _kept_lengths(mix: MixConfig, lengths_N: NDArray[np.int32]) -> NDArray[np.int32]:
    """Return the tokens of each sample that the policy for overlong documents keeps."""
    if mix.pack.method == "concat_and_split" or mix.pack.overlong == "split":
        return lengths_N
    if mix.pack.overlong == "truncate":
        return np.minimum(lengths_N, mix.pack.length)
    return np.where(lengths_N > mix.pack.length, 0, lengths_N)


def _cursor_after(cursor: Cursor, table: SampleTable, count: int) -> Cursor:
    if count == 0:
        return cursor
    return int(table.positions_N[count - 1]), int(table.subs_N[count - 1]) + 1


def _pieces_of(
    mix: MixConfig, ahead: Sequence[SampleTable], kept: Sequence[NDArray[np.int32]], drawn: Drawn
) -> PieceTable:
    """Return the drawn samples as pieces in drawing order, overlong ones cut to rows."""
    counts = drawn.counts_S
    # Samples of one source come in its order: a stable sort by source lines both up.
    place = np.empty(len(drawn.sources_N), np.int64)
    place[np.argsort(drawn.sources_N, kind="stable")] = np.arange(len(drawn.sources_N))
    head = [slice(0, n) for n in counts.tolist()]
    lengths = np.concatenate([k[h] for k, h in zip(kept, head, strict=True)])[place]
    columns = {
        "positions_P": np.concatenate([t.positions_N[h] for t, h in zip(ahead, head, strict=True)])[
            place
        ],
        "subs_P": np.concatenate([t.subs_N[h] for t, h in zip(ahead, head, strict=True)])[place],
        "sizes_P": np.concatenate([t.lengths_N[h] for t, h in zip(ahead, head, strict=True)])[
            place
        ],
    }
    whole = mix.pack.method == "best_fit"
    parts_N = (
        -(-lengths // mix.pack.length) if whole else np.ones_like(lengths)
    )  # 0 for a dropped sample
    sample = np.repeat(np.arange(len(lengths)), parts_N)
    part = np.arange(len(sample)) - np.repeat(np.cumsum(parts_N) - parts_N, parts_N)
    if whole:
        starts = part * mix.pack.length
        stops = np.minimum(starts + mix.pack.length, lengths[sample])
    else:
        starts, stops = np.zeros_like(sample), lengths[sample]
    return PieceTable(
        sources_P=drawn.sources_N[sample],
        starts_P=starts.astype(np.int32),
        stops_P=stops.astype(np.int32),
        **{name: column[sample] for name, column in columns.items()},
    )


def _pack(
    mix: MixConfig, carried: PieceTable, fresh: PieceTable
) -> tuple[PieceTable, NDArray[np.int64], PieceTable]:
    """Return the pieces grouped by row, the rows' boundaries, and what is carried on, oldest first."""
    pool = PieceTable.concatenated([carried, fresh])
    num_rows, capacity = mix.rows_per_step, mix.pack.length
    if mix.pack.method == "best_fit":
        rows_P = best_fit(
            pool.lengths_P.tolist(), num_first=len(carried), num_rows=num_rows, capacity=capacity
        )
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
    order = np.argsort(rows_P, kind="stable")
    num_carried = int((rows_P == CARRIED).sum())
    row_offsets = np.searchsorted(rows_P[order[num_carried:]], np.arange(num_rows + 1)).astype(
        np.int64
    )
    return pool.take(order[num_carried:]), row_offsets, pool.take(order[:num_carried])

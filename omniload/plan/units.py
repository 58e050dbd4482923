"""Units that a mix draws: the samples of each source, cut to at most a row each.

Shape suffixes:
    S  sources        N  samples of a source that are known ahead
    U  units of a source        P  pieces
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from omniload.mix.config import MixConfig
from omniload.mix.deficit import Drawn
from omniload.mix.pieces import PIECE_COLUMNS, PieceTable
from omniload.mix.samples import SampleTable
from omniload.mix.schema.amounts import Amount
from omniload.mix.schema.records import Overlong
from omniload.mix.state import Cursor, MixState
from omniload.plan.drawing import Known

__all__ = ["Units", "first_refused", "pieces_of", "places_of", "units_of_sources"]

_COUNTING, _ZEROS, _TRUE = np.arange(1 << 14), np.zeros(1 << 14, np.int64), np.ones(1 << 14, bool)
for _column in (_COUNTING, _ZEROS, _TRUE):
    _column.flags.writeable = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Units:
    """Units of one source: its samples, cut to at most a row each.

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

    def known(self, end: int, level: Literal["token", "sample"]) -> Known:
        """Return what is known of the source, whose first epoch ends before position ``end``."""
        lengths_U = self.stops_U - self.starts_U
        return Known(
            lengths_U=lengths_U,
            counted_U=lengths_U if level == "token" else self.first_U.astype(np.int64),
            samples_U=self.samples_U,
            positions_N=self.table.positions_N,
            end=end,
            is_whole=self.table.stop >= end,
        )

    def known_of(self, amount: Amount | None, cursor: Cursor, drawn: int, end: int) -> Known:
        """Return what is known of a source up to the end of its amount, counted in the unit of it.

        Args:
            amount: What the run draws of it; ``None`` for no more than it has.
            cursor: Its next token; the table begins there.
            drawn: What was drawn of it, in that unit.
            end: Position that its epochs end before, where they are its amount.
        """
        if amount is None:
            return replace(self._first(self.known(end, "sample"), 0), is_whole=True)
        known = self.known(end, "token" if amount.kind == "tokens" else "sample")
        if amount.kind == "epochs":
            return replace(known, counted_U=self._records_U(cursor))
        left = amount.units(0) - drawn
        reached_U = np.cumsum(known.counted_U)
        if amount.kind == "tokens":
            # The unit that reaches the amount is its last.
            count = int(np.searchsorted(reached_U, left)) + 1 if left > 0 else 0
        else:
            # Samples count with their first unit: the others of the last sample still belong to the amount.
            count = int(np.searchsorted(reached_U, left, side="right"))
        have = int(reached_U[-1]) if len(reached_U) else 0
        # The rest of a sample that was begun may be all that is left, and not be known yet.
        is_begun = amount.kind == "samples" and cursor[2] > 0 and not len(reached_U)
        return replace(self._first(known, count), is_whole=have >= left and not is_begun)

    @staticmethod
    def _first(known: Known, count: int) -> Known:
        """Return what is known of the first ``count`` units."""
        return replace(
            known,
            lengths_U=known.lengths_U[:count],
            counted_U=known.counted_U[:count],
            samples_U=known.samples_U[:count],
        )

    def _records_U(self, cursor: Cursor) -> NDArray[np.int64]:
        """Return how many records each unit goes forward: those without a sample count with the next one."""
        positions_U = self.table.positions_N[self.samples_U]
        position, sub, token = cursor
        # A record that is begun was counted with the unit that began it.
        before = position - 1 + (sub > 0 or token > 0)
        return np.diff(positions_U, prepend=np.int64(before))

    def lost_N(self, first: int, stop: int) -> NDArray[np.int64]:
        """Return the tokens of each of the samples ``first`` to ``stop`` that the policy does not keep."""
        lost: NDArray[np.int64] = self.table.lengths_N[first:stop] - self.kept_N[first:stop]
        return lost

    def ends(self, count: int) -> NDArray[np.bool_]:
        """Return whether each of the first ``count`` units is the last of its sample."""
        is_last: NDArray[np.bool_] = self.stops_U[:count] == self.kept_N[self.samples_U[:count]]
        return is_last

    def finished_by(self, count: int) -> int:
        """Return how many samples are used up once ``count`` units are drawn."""
        if count == 0:
            return 0
        sample = int(self.samples_U[count - 1])
        # The tokens of a sample that continues in another step are still needed.
        return sample + int(self.stops_U[count - 1] == self.kept_N[sample])

    def cursor_after(self, count: int) -> Cursor | None:
        """Return the cursor once ``count`` units are drawn; ``None`` when that is none."""
        if count == 0:
            return None
        sample, stop = int(self.samples_U[count - 1]), int(self.stops_U[count - 1])
        position, sub = int(self.table.positions_N[sample]), int(self.table.subs_N[sample])
        return (position, sub + 1, 0) if stop == self.kept_N[sample] else (position, sub, stop)


def _units_of(length: int, overlong: Overlong, cursor: Cursor, table: SampleTable) -> Units:
    """Return the units of the samples in ``table``, from ``cursor`` on.

    Args:
        length: Tokens of a row.
        overlong: What becomes of samples that are longer.
        cursor: The source's next token.
        table: Its samples from there on.
    """
    count, kept_N = len(table.lengths_N), table.lengths_N.astype(np.int64)
    if overlong == "truncate":
        kept_N = np.minimum(kept_N, length)
    elif overlong == "drop":
        kept_N = np.where(kept_N > length, 0, kept_N)
    # A sample has a token at least, and loses all of them to one policy alone.
    is_each_kept = overlong != "drop" or kept_N.min(initial=1) > 0
    if cursor[2] == 0 and is_each_kept and kept_N.max(initial=1) <= length:
        # The usual case, and there may be hundreds of sources: what is the same for all of them is made once.
        is_few = count <= len(_COUNTING)
        return Units(
            table=table,
            kept_N=kept_N,
            samples_U=_COUNTING[:count] if is_few else np.arange(count),
            starts_U=_ZEROS[:count] if is_few else np.zeros(count, np.int64),
            stops_U=kept_N,
            first_U=_TRUE[:count] if is_few else np.ones(count, np.bool_),
        )
    begins_N = np.zeros(count, np.int64)
    # If the cursor's record gives no sample, the table begins with a later one, which is drawn from its start.
    if len(table) and (int(table.positions_N[0]), int(table.subs_N[0])) == cursor[:2]:
        begins_N[0] = cursor[2]
    # None for a sample that is dropped, of which nothing is kept: it gives no unit, and the next one passes over it.
    parts_N = -(-(kept_N - begins_N) // length)
    samples_U = np.arange(count).repeat(parts_N)
    firsts_N = parts_N.cumsum() - parts_N
    starts_U = begins_N[samples_U] + (np.arange(len(samples_U)) - firsts_N[samples_U]) * length
    return Units(
        table=table,
        kept_N=kept_N,
        samples_U=samples_U,
        starts_U=starts_U,
        stops_U=np.minimum(starts_U + length, kept_N[samples_U]),
        first_U=starts_U == 0,
    )


def units_of_sources(mix: MixConfig, state: MixState, ahead: Sequence[SampleTable]) -> list[Units]:
    """Return the units of every source, of the samples that are known from its cursor on."""
    length = mix.pack.length
    return [
        _units_of(length, overlong, cursor, table)
        for overlong, cursor, table in zip(mix.overlong_S, state.cursors_S, ahead, strict=True)
    ]


def first_refused(mix: MixConfig, pieces: PieceTable) -> list[int] | None:
    """Return the first piece of a sample that is longer than a row where its source refuses such, as a row of it."""
    if mix.refusing_S is None:
        return None
    refused_P = np.asarray(mix.refusing_S)[pieces.sources_P] & (pieces.sizes_P > mix.pack.length)
    found = np.flatnonzero(refused_P)[:1]
    return pieces.take(found).rows()[0] if len(found) else None


def places_of(drawn: Drawn) -> NDArray[np.int64]:
    """Return the index of each drawn unit in the concatenation of all sources' units."""
    # Units of one source come in its order: a stable sort by source lines both up.
    places_P = np.empty(len(drawn.sources_N), np.int64)
    places_P[drawn.sources_N.argsort(kind="stable")] = np.arange(len(drawn.sources_N))
    return places_P


def pieces_of(
    ahead: Sequence[SampleTable],
    units: Sequence[Units],
    drawn: Drawn,
    places_P: NDArray[np.int64],
) -> PieceTable:
    """Return the drawn units, which lie at ``places_of``, as pieces, in drawing order."""
    counted = list(zip(units, drawn.counts_S.tolist(), strict=True))
    heads = [(t, u.samples_U[:n]) for t, (u, n) in zip(ahead, counted, strict=True)]
    columns_CP = np.empty((len(PIECE_COLUMNS), len(places_P)), np.int64)
    columns_CP[0] = np.arange(len(counted)).repeat(drawn.counts_S)
    columns_CP[1] = np.concatenate([t.positions_N[head] for t, head in heads])
    columns_CP[2] = np.concatenate([t.subs_N[head] for t, head in heads])
    columns_CP[3] = np.concatenate([u.starts_U[:n] for u, n in counted])
    columns_CP[4] = np.concatenate([u.stops_U[:n] for u, n in counted])
    columns_CP[5] = np.concatenate([t.lengths_N[head] for t, head in heads])
    return PieceTable(columns_CP).take(places_P)

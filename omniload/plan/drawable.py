"""What a mix may draw: the samples of each source, cut into pieces of at most a row.

Shape suffixes:
    S  sources        N  samples of a source that are known ahead
    A  pieces of a source that may be drawn        P  drawn pieces
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

__all__ = ["Drawable", "drawable_of", "first_refused", "pieces_of", "places_of"]

_COUNTING, _ZEROS, _TRUE = np.arange(1 << 14), np.zeros(1 << 14, np.int64), np.ones(1 << 14, bool)
for _column in (_COUNTING, _ZEROS, _TRUE):
    _column.flags.writeable = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawable:
    """What may be drawn of one source: its samples, cut into pieces of at most a row.

    Drawing a long document row by row, and not at once, keeps a source within a row of
    its share and keeps one document from filling whole steps.
    """

    table: SampleTable
    kept_N: NDArray[np.int64]
    """Tokens of each sample that the policy for overlong documents keeps."""
    samples_A: NDArray[np.int64]
    """Sample of each piece."""
    starts_A: NDArray[np.int64]
    stops_A: NDArray[np.int64]
    first_A: NDArray[np.bool_]
    """Whether the piece is the first of its sample."""

    def known(self, end: int, level: Literal["token", "sample"]) -> Known:
        """Return what is known of the source, whose first epoch ends before position ``end``."""
        lengths_A = self.stops_A - self.starts_A
        return Known(
            lengths_A=lengths_A,
            counted_A=lengths_A if level == "token" else self.first_A.astype(np.int64),
            samples_A=self.samples_A,
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
            return replace(known, counted_A=self._records_A(cursor))
        left = amount.units(0) - drawn
        reached_A = np.cumsum(known.counted_A)
        if amount.kind == "tokens":
            # The piece that reaches the amount is its last.
            count = int(np.searchsorted(reached_A, left)) + 1 if left > 0 else 0
        else:
            # Samples count with their first piece: the others of the last sample still belong to the amount.
            count = int(np.searchsorted(reached_A, left, side="right"))
        have = int(reached_A[-1]) if len(reached_A) else 0
        # The rest of a sample that was begun may be all that is left, and not be known yet.
        is_begun = amount.kind == "samples" and cursor[2] > 0 and not len(reached_A)
        return replace(self._first(known, count), is_whole=have >= left and not is_begun)

    @staticmethod
    def _first(known: Known, count: int) -> Known:
        """Return what is known of the first ``count`` pieces."""
        return replace(
            known,
            lengths_A=known.lengths_A[:count],
            counted_A=known.counted_A[:count],
            samples_A=known.samples_A[:count],
        )

    def _records_A(self, cursor: Cursor) -> NDArray[np.int64]:
        """Return how many records each piece goes forward: those without a sample count with the next one."""
        positions_A = self.table.positions_N[self.samples_A]
        position, sub, token = cursor
        # A record that is begun was counted with the piece that began it.
        before = position - 1 + (sub > 0 or token > 0)
        return np.diff(positions_A, prepend=np.int64(before))

    def lost_N(self, first: int, stop: int) -> NDArray[np.int64]:
        """Return the tokens of each of the samples ``first`` to ``stop`` that the policy does not keep."""
        lost: NDArray[np.int64] = self.table.lengths_N[first:stop] - self.kept_N[first:stop]
        return lost

    def ends(self, count: int) -> NDArray[np.bool_]:
        """Return whether each of the first ``count`` pieces is the last of its sample."""
        is_last: NDArray[np.bool_] = self.stops_A[:count] == self.kept_N[self.samples_A[:count]]
        return is_last

    def finished_by(self, count: int) -> int:
        """Return how many samples are used up once ``count`` pieces are drawn."""
        if count == 0:
            return 0
        sample = int(self.samples_A[count - 1])
        # The tokens of a sample that continues in another step are still needed.
        return sample + int(self.stops_A[count - 1] == self.kept_N[sample])

    def cursor_after(self, count: int) -> Cursor | None:
        """Return the cursor once ``count`` pieces are drawn; ``None`` when that is none."""
        if count == 0:
            return None
        sample, stop = int(self.samples_A[count - 1]), int(self.stops_A[count - 1])
        position, sub = int(self.table.positions_N[sample]), int(self.table.subs_N[sample])
        return (position, sub + 1, 0) if stop == self.kept_N[sample] else (position, sub, stop)


def _cut(length: int, overlong: Overlong, cursor: Cursor, table: SampleTable) -> Drawable:
    """Cut the samples in ``table`` into pieces, from ``cursor`` on.

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
        return Drawable(
            table=table,
            kept_N=kept_N,
            samples_A=_COUNTING[:count] if is_few else np.arange(count),
            starts_A=_ZEROS[:count] if is_few else np.zeros(count, np.int64),
            stops_A=kept_N,
            first_A=_TRUE[:count] if is_few else np.ones(count, np.bool_),
        )
    begins_N = np.zeros(count, np.int64)
    # If the cursor's record gives no sample, the table begins with a later one, which is drawn from its start.
    if len(table) and (int(table.positions_N[0]), int(table.subs_N[0])) == cursor[:2]:
        begins_N[0] = cursor[2]
    # None for a sample that is dropped, of which nothing is kept: it gives no piece, and the next one passes over it.
    parts_N = -(-(kept_N - begins_N) // length)
    samples_A = np.arange(count).repeat(parts_N)
    firsts_N = parts_N.cumsum() - parts_N
    starts_A = begins_N[samples_A] + (np.arange(len(samples_A)) - firsts_N[samples_A]) * length
    return Drawable(
        table=table,
        kept_N=kept_N,
        samples_A=samples_A,
        starts_A=starts_A,
        stops_A=np.minimum(starts_A + length, kept_N[samples_A]),
        first_A=starts_A == 0,
    )


def drawable_of(mix: MixConfig, state: MixState, ahead: Sequence[SampleTable]) -> list[Drawable]:
    """Return what may be drawn of every source, of the samples that are known from its cursor on."""
    length = mix.pack.length
    return [
        _cut(length, overlong, cursor, table)
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
    """Return the index of each drawn piece in the concatenation of all sources' pieces."""
    # Pieces of one source come in its order: a stable sort by source lines both up.
    places_P = np.empty(len(drawn.sources_N), np.int64)
    places_P[drawn.sources_N.argsort(kind="stable")] = np.arange(len(drawn.sources_N))
    return places_P


def pieces_of(
    ahead: Sequence[SampleTable],
    drawable_S: Sequence[Drawable],
    drawn: Drawn,
    places_P: NDArray[np.int64],
) -> PieceTable:
    """Return the drawn pieces, which lie at ``places_of``, in drawing order."""
    counted = list(zip(drawable_S, drawn.counts_S.tolist(), strict=True))
    heads = [(t, u.samples_A[:n]) for t, (u, n) in zip(ahead, counted, strict=True)]
    columns_CP = np.empty((len(PIECE_COLUMNS), len(places_P)), np.int64)
    columns_CP[0] = np.arange(len(counted)).repeat(drawn.counts_S)
    columns_CP[1] = np.concatenate([t.positions_N[head] for t, head in heads])
    columns_CP[2] = np.concatenate([t.subs_N[head] for t, head in heads])
    columns_CP[3] = np.concatenate([u.starts_A[:n] for u, n in counted])
    columns_CP[4] = np.concatenate([u.stops_A[:n] for u, n in counted])
    columns_CP[5] = np.concatenate([t.lengths_N[head] for t, head in heads])
    return PieceTable(columns_CP).take(places_P)

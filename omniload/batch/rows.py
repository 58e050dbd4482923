"""Packed rows from pieces and their tokens; and the documents of rows, as a model sees them and as pieces.

A piece may be several documents to a model: a preference pair is two, and a sample that joins documents and keeps them
apart is as many as it joins.

Shape suffixes:
    R  rows        T  tokens in a row        K  pieces        D  documents, a row's padding among them
    M  microbatches        P  pairs
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from omniload.base.errors import ConfigError, IntegrityError
from omniload.base.ragged import Ragged, Ranges, gather_across
from omniload.batch.absent import is_absent
from omniload.batch.microbatch import IGNORE_LABEL, CpSlice, Microbatch
from omniload.batch.starts import starts_inside, with_starts
from omniload.mix.columns import (
    IMAGES,
    LOSS_MASK,
    NO_COLUMNS,
    REJECTED_AT,
    column_kind,
    name_outside,
)
from omniload.mix.pieces import PieceTable

__all__ = [
    "Documents",
    "Piece",
    "RowBuilder",
    "build_rows",
    "documents_of",
    "pieces_of",
    "split_rows",
    "stops_with_next",
    "unshifted",
    "work_of",
]


class RowBuilder(Protocol):
    """Lays pieces out in rows, as ``build_rows`` does."""

    def __call__(
        self,
        pieces: PieceTable,
        row_offsets: NDArray[np.int64],
        fetched_K: Ranges,
        *,
        length: int,
        others_K: Mapping[str, Ranges],
    ) -> Microbatch:
        """Return the rows; see ``build_rows``."""
        ...


def stops_with_next(pieces: PieceTable) -> NDArray[np.int64]:
    """Return where to stop reading each piece: one token later if its sample goes on, for the last label."""
    return np.minimum(pieces.stops_P + 1, pieces.sizes_P)


def build_rows(
    pieces: PieceTable,
    row_offsets: NDArray[np.int64],
    fetched_K: Ranges,
    *,
    length: int,
    others_K: Mapping[str, Ranges] = NO_COLUMNS,
) -> Microbatch:
    """Lay pieces out in rows of ``length`` tokens.

    Args:
        pieces: Pieces grouped by row, in their order within it, ``[K]``.
        row_offsets: Boundaries of the rows in ``pieces``, ``[R + 1]``.
        fetched_K: Tokens of each piece (int32), from its first to the end of ``stops_with_next``.
        length: Tokens in a row, ``T``.
        others_K: Further columns of each piece; an aligned one over the same tokens as ``fetched_K``.

    Returns:
        The rows, right-padded. No label is of another document; the last token of a cut piece has the token after the
        cut as its label. A token that ``loss_mask`` leaves out is no label. A column of yours is 0 in the padding, and
        one of labels also where there is no label.

    Raises:
        IntegrityError: A sample has another length than its source had reported.
    """
    _require_planned(pieces, fetched_K)
    num_rows = len(row_offsets) - 1
    laid = _laid_out(pieces.lengths_P.astype(np.int64), row_offsets, length)
    sources_D = np.full(len(laid.lengths_D), -1, np.int16)
    sources_D[laid.places_K] = pieces.sources_P
    # Padding is gathered like pieces, in the same call: from one blank row that serves all rows.
    tokens, bounds_D = _gathered(fetched_K, laid, np.zeros(length, np.int32))
    # If a sample continues after the row, one more token was fetched: the label of the row's last token.
    cut = (fetched_K.lengths_N > pieces.lengths_P).nonzero()[0]
    next_D = np.full(len(laid.lengths_D), IGNORE_LABEL, np.int32)
    next_D[laid.places_K[cut]] = _last_values(fetched_K.take(cut))
    trained_RT = None
    if (mask_K := others_K.get(LOSS_MASK)) is not None:
        _require_planned(pieces, mask_K)
        kept, _ = _gathered(mask_K, laid, np.zeros(length, np.bool_))
        # The mask says which tokens are learned. A label is the next token, so the mask moves one place to the left.
        trained = np.append(kept[1:], False)
        trained[bounds_D[laid.places_K[cut] + 1] - 1] = _last_values(mask_K.take(cut))
        trained_RT = trained.reshape(num_rows, length)
    is_there_D = laid.lengths_D > 0  # padding may be empty
    rows = Microbatch(
        tokens_RT=tokens.reshape(num_rows, length),
        cu_seqlens=bounds_D[np.append(is_there_D, True)].astype(np.int32),
        sources_D=sources_D[is_there_D],
        next_D=next_D[is_there_D],
        trained_RT=trained_RT,
        keys_K4=_keys(pieces),
        columns_K={
            name_outside(n): _shown(r, others_K) if n == IMAGES else r.packed()
            for n, r in others_K.items()
            if not column_kind(n).aligned
        },
    )
    own_K = {n: r for n, r in others_K.items() if column_kind(n).aligned and n != LOSS_MASK}
    return _with_own(rows, own_K, pieces, laid, cut) if own_K else rows


def _shown(images_K: Ranges, others_K: Mapping[str, Ranges]) -> Ragged:
    """Return the images of pieces copied end to end: a pair has one copy of them, and shows it on both sides."""
    if (rejected_K := others_K.get(REJECTED_AT)) is None:
        return images_K.packed()
    counts_K = 1 + (rejected_K.lengths_N > 0)
    each = images_K.take(np.arange(len(counts_K)).repeat(counts_K)).packed()
    return Ragged(values_V=each.values_V, offsets=each.offsets[np.append(0, counts_K.cumsum())])


@dataclass(frozen=True, slots=True, kw_only=True)
class _LaidOut:
    """The documents of all rows: the pieces of each row, followed by its padding, which may be empty."""

    lengths_D: NDArray[np.int64]
    places_K: NDArray[np.int64]
    """Which documents are pieces."""
    places_R: NDArray[np.int64]
    """Which documents are padding."""


def _with_own(
    rows: Microbatch,
    own_K: Mapping[str, Ranges],
    pieces: PieceTable,
    laid: _LaidOut,
    cut: NDArray[np.int64],
) -> Microbatch:
    """Return rows with the user's columns that have a value for each token; ``cut`` are pieces whose samples go on."""
    shape, aligned_RT = rows.tokens_RT.shape, {}
    for name, values_K in own_K.items():
        _require_planned(pieces, values_K)
        kind = column_kind(name)
        values, bounds_D = _gathered(values_K, laid, np.zeros(shape[1], kind.dtype))
        if kind.of_labels:
            values = np.append(values[1:], values[:1])
            # The last token of a document has no label, unless the document goes on behind a cut.
            values[bounds_D[1:] - 1] = values[rows.document_starts - 1] = 0
            values[bounds_D[laid.places_K[cut] + 1] - 1] = _last_values(values_K.take(cut))
        aligned_RT[name_outside(name)] = values.reshape(shape)
    return replace(rows, aligned_RT=aligned_RT)


def _laid_out(
    lengths_K: NDArray[np.int64], row_offsets: NDArray[np.int64], length: int
) -> _LaidOut:
    num_rows = len(row_offsets) - 1
    begins_R = np.concatenate(([0], lengths_K.cumsum()))[row_offsets]
    # Every row has one document more, its padding, even if that is empty: so places are arithmetic, and full rows no
    # special case.
    places_K = np.arange(len(lengths_K)) + np.arange(num_rows).repeat(
        row_offsets[1:] - row_offsets[:-1]
    )
    places_R = row_offsets[1:] + np.arange(num_rows)
    lengths_D = np.empty(len(lengths_K) + num_rows, np.int64)
    lengths_D[places_K], lengths_D[places_R] = lengths_K, length - (begins_R[1:] - begins_R[:-1])
    return _LaidOut(lengths_D=lengths_D, places_K=places_K, places_R=places_R)


def _gathered(
    ranges_K: Ranges, laid: _LaidOut, blank_T: NDArray[Any]
) -> tuple[NDArray[Any], NDArray[np.int64]]:
    """Return the concatenated values of all documents, with ``blank_T`` as padding, and their bounds."""
    firsts_D, which_D = np.zeros((2, len(laid.lengths_D)), np.int64)
    firsts_D[laid.places_K], which_D[laid.places_K] = ranges_K.starts_N, ranges_K.which_N
    which_D[laid.places_R] = len(ranges_K.columns)
    return gather_across([*ranges_K.columns, blank_T], which_D, firsts_D, firsts_D + laid.lengths_D)


def _last_values(ranges: Ranges) -> list[Any]:
    """Return the last value of each range, in a loop: a row cuts at most one document."""
    ends = zip(ranges.which_N.tolist(), ranges.stops_N.tolist(), strict=True)
    return [ranges.columns[which][stop - 1] for which, stop in ends]


def _require_planned(pieces: PieceTable, fetched_K: Ranges) -> None:
    """Refuse pieces of another length than was planned."""
    wanted_K = (stops_with_next(pieces) - pieces.starts_P).astype(np.int64)
    found_K = fetched_K.lengths_N
    if not np.array_equal(found_K, wanted_K):
        at = int(np.flatnonzero(found_K != wanted_K)[0])
        raise IntegrityError(
            f"sample {_key_of(pieces, at)} gave {int(found_K[at])} tokens where {int(wanted_K[at])} were "
            "planned; the source changed while it was read"
        )


def _keys(pieces: PieceTable) -> NDArray[np.int64]:
    columns: list[NDArray[Any]] = [
        pieces.sources_P,
        pieces.positions_P,
        pieces.subs_P,
        pieces.starts_P,
    ]
    return np.column_stack(columns).astype(np.int64, copy=False)


def split_rows(
    rows: Microbatch, counts_M: Sequence[int], row_offsets: NDArray[np.int64]
) -> tuple[Microbatch, ...]:
    """Cut rows that were built together into microbatches, which share their memory.

    Args:
        rows: What ``build_rows`` gave.
        counts_M: Rows of each microbatch; they sum to ``R``.
        row_offsets: Boundaries of the rows in the pieces, ``[R + 1]``.
    """
    length = rows.tokens_RT.shape[1]
    cuts = np.concatenate(([0], np.cumsum(counts_M))).astype(np.int64)
    # Every row begins a document, because padding ends each row: so its start is among the bounds.
    document_cuts = rows.cu_seqlens.searchsorted(cuts * length)
    return tuple(
        Microbatch(
            tokens_RT=rows.tokens_RT[a:b],
            cu_seqlens=rows.cu_seqlens[first : last + 1] - np.int32(a * length),
            sources_D=rows.sources_D[first:last],
            next_D=rows.next_D[first:last],
            trained_RT=None if rows.trained_RT is None else rows.trained_RT[a:b],
            keys_K4=rows.keys_K4[row_offsets[a] : row_offsets[b]],
            columns_K={
                name: column.between(int(row_offsets[a]), int(row_offsets[b]))
                for name, column in rows.columns_K.items()
            },
            aligned_RT={name: values_RT[a:b] for name, values_RT in rows.aligned_RT.items()},
        )
        for (a, b), (first, last) in zip(
            pairwise(cuts.tolist()), pairwise(document_cuts.tolist()), strict=True
        )
    )


def _key_of(pieces: PieceTable, at: int) -> str:
    return f"(source {pieces.sources_P[at]}, position {pieces.positions_P[at]}, sub {pieces.subs_P[at]})"


def unshifted(labels_RT: NDArray[Any]) -> NDArray[Any]:
    """Return labels for a model that shifts them itself.

    Such a model compares the logits of token ``t`` with the label at ``t + 1``, so the label
    that belongs to ``t`` moves one place to the right. The first column is compared with
    nothing, and the label of a row's last token (if its document goes on) has no place.
    """
    moved = np.full_like(labels_RT, IGNORE_LABEL)
    moved[:, 1:] = labels_RT[:, :-1]
    return moved


@dataclass(frozen=True, slots=True, kw_only=True)
class Documents:
    """The documents of some rows, as a model sees them."""

    cu_seqlens: NDArray[np.int32]
    """Bounds in the flattened rows, ``[D + 1]``; also those between the sides of a pair, and between documents that a
    sample joins and keeps apart."""
    positions: NDArray[np.int32]
    """Place of each token in its document; for a cp peer, only the tokens of its slice."""
    pairs_P2: NDArray[np.int64]
    """Which documents are the chosen and the rejected side of each pair."""


def documents_of(part: Microbatch | CpSlice) -> Documents:
    """Return the documents of some rows: each side of a pair is one, and each that a sample joins and keeps apart.

    Raises:
        ConfigError: Pairs lie in rows that are shared among cp peers.
    """
    rejected_K = part.columns_K.get(REJECTED_AT)
    # In a step without pairs the column may exist and be empty, because another step of its window had a pair.
    none = rejected_K is None or not len(rejected_K.values_V)
    if isinstance(part, CpSlice):
        if not none:
            raise ConfigError(
                "rows of preference pairs are shared among cp peers, which no pair is laid out for; set cp to 1"
            )
        starts = starts_inside(part.cu_seqlens, part.sources_D, part.columns_K)
        return _without_pairs(with_starts(part.cu_seqlens, starts), part.positions_RC)
    bounds = with_starts(part.cu_seqlens, part.document_starts)
    if rejected_K is None or none:
        return _without_pairs(bounds, part.positions_RT)
    starts_D = part.cu_seqlens[:-1]
    is_piece_D = part.sources_D >= 0
    is_pair_K = rejected_K.lengths_N > 0
    starts_P = starts_D[is_piece_D][is_pair_K]
    stops_P = part.cu_seqlens[1:][is_piece_D][is_pair_K]
    between_P = starts_P + rejected_K.values_V
    bounds = with_starts(bounds, between_P)
    # Positions begin anew at the second side: its tokens lose the length of the first side, up to the pair's end.
    back = np.zeros(part.positions_RT.size + 1, np.int32)
    back[between_P] = rejected_K.values_V
    back[stops_P] -= rejected_K.values_V
    positions = part.positions_RT - np.cumsum(back[:-1], dtype=np.int32).reshape(
        part.positions_RT.shape
    )
    # By a search, because each pair moves the numbers of all documents after it by one.
    second_P = np.searchsorted(bounds, between_P)
    return Documents(
        cu_seqlens=bounds,
        positions=positions,
        pairs_P2=np.column_stack((second_P - 1, second_P)).astype(np.int64),
    )


def work_of(part: Microbatch | CpSlice) -> tuple[int, int]:
    """Return the tokens of the documents of some rows, and the sum of their squared lengths, as costs count them.

    Documents that a sample joins and keeps apart count one by one; both sides of a pair are one, and padding is none.
    """
    starts = starts_inside(part.cu_seqlens, part.sources_D, part.columns_K)
    bounds = with_starts(part.cu_seqlens, starts)
    # A start inside a piece begins no padding: what is padding begins and ends at bounds of the rows.
    holds = part.sources_D[part.cu_seqlens.searchsorted(bounds[:-1], side="right") - 1] >= 0
    lengths = np.diff(bounds)[holds].astype(np.int64)
    return int(lengths.sum()), int((lengths**2).sum())


def _without_pairs(cu_seqlens: NDArray[np.int32], positions: NDArray[np.int32]) -> Documents:
    return Documents(
        cu_seqlens=cu_seqlens, positions=positions, pairs_P2=np.empty((0, 2), np.int64)
    )


# Compared by identity: arrays have no truth value, and pieces are distinguished by their keys.
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Piece:
    """A document, or the part of one that lies in a row; or the documents that one sample joins."""

    key: tuple[int, int, int, int]
    """Number of its source, position in the source's order, sub (of records that hold several samples), and the token
    of the document that it begins with: no other piece of a run has the same."""
    tokens: NDArray[np.int32]
    """Its tokens, without padding."""
    columns: Mapping[str, NDArray[Any]] = field(default_factory=dict)
    """Whole-sample columns by name; in a pipeline, those that the rank's stage gets."""

    @property
    def source(self) -> int:
        """Number of its source: its place among ``source_names``, and in ``source_tags`` of the batch."""
        return self.key[0]


def pieces_of(part: Microbatch | CpSlice) -> list[Piece]:
    """Return the pieces of some rows, in their order.

    Raises:
        ConfigError: The rows are shared among cp peers.
    """
    if isinstance(part, CpSlice):
        raise ConfigError(
            f"cp peers share these rows, and this one has {part.tokens_RC.shape[1]} tokens of each: no document is "
            "whole; use cp 1"
        )
    tokens = part.tokens_RT.reshape(-1)
    bounds = part.cu_seqlens.tolist()
    holds_D = part.sources_D >= 0
    columns_K = {n: column for n, column in part.columns_K.items() if not is_absent(column)}
    found = []
    for i, (document, key) in enumerate(
        zip(np.flatnonzero(holds_D).tolist(), part.keys_K4.tolist(), strict=True)
    ):
        source, position, sub, first = key
        found.append(
            Piece(
                key=(source, position, sub, first),
                # Copied: a prompt outlives the batch, whose memory is shared.
                tokens=tokens[bounds[document] : bounds[document + 1]].copy(),
                columns={name: column[i] for name, column in columns_K.items()},
            )
        )
    return found

"""Slices of rows for context parallelism: every peer of a cp group gets its part of the same rows.

And what was cut put together again: the slices of all peers, and the microbatches of a rank.

Shape suffixes:
    R  rows        T  tokens in a row        C  tokens in a peer's slice, T / cp
    P  peers
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from omniload.base.ragged import Ragged, offsets_of
from omniload.batch.absent import is_absent, stacked
from omniload.batch.microbatch import IGNORE_LABEL, CpSlice, Microbatch, aligned_of, rows_of
from omniload.mix.columns import NO_COLUMNS

__all__ = ["cp_indices", "cp_places", "joined", "slice_for_cp", "whole_rows"]


def cp_indices(length: int, cp_rank: int, cp_size: int) -> NDArray[np.int64]:
    """Return the columns of a row that one peer holds, in zig-zag order.

    A row is cut into ``2 * cp_size`` equal parts; peer ``i`` takes part ``i`` and part
    ``2 * cp_size - 1 - i``, so that with causal attention an early, cheap part is
    paired with a late, dear one::

        cp_size 2, 8 tokens:   peer 0  0 1 . . . . 6 7
                               peer 1  . . 2 3 4 5 . .

    Raises:
        ValueError: The row cannot be cut evenly, or the rank is out of range.
    """
    if not 0 <= cp_rank < cp_size:
        raise ValueError(f"cp_rank is {cp_rank}, outside 0 to {cp_size - 1}")
    if cp_size == 1:
        return np.arange(length)
    if length % (2 * cp_size):
        raise ValueError(
            f"row length {length} is not a multiple of 2 * cp = {2 * cp_size}; change pack.length"
        )
    part = length // (2 * cp_size)
    early = np.arange(cp_rank * part, (cp_rank + 1) * part)
    late_at = 2 * cp_size - 1 - cp_rank
    return np.concatenate((early, np.arange(late_at * part, (late_at + 1) * part)))


def cp_places(length: int, cp_size: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return which peer holds each column of a row, ``[T]``, and where in its slice: the inverse of ``cp_indices``.

    Raises:
        ValueError: As for ``cp_indices``.
    """
    columns_PC = np.stack([cp_indices(length, peer, cp_size) for peer in range(cp_size)])
    peers_T, places_T = np.empty(length, np.int64), np.empty(length, np.int64)
    peers_T[columns_PC] = np.arange(cp_size)[:, None]
    places_T[columns_PC] = np.arange(columns_PC.shape[1])
    return peers_T, places_T


def slice_for_cp(microbatch: Microbatch, cp_rank: int, cp_size: int) -> CpSlice:
    """Return one peer's part of the rows.

    Raises:
        ValueError: As for ``cp_indices``.
    """
    indices = cp_indices(microbatch.tokens_RT.shape[1], cp_rank, cp_size)
    share = microbatch.encoding
    return CpSlice(
        tokens_RC=microbatch.tokens_RT[:, indices],
        labels_RC=microbatch.labels_RT[:, indices],
        positions_RC=microbatch.positions_RT[:, indices],
        indices_C=indices,
        cu_seqlens=microbatch.cu_seqlens,
        sources_D=microbatch.sources_D,
        keys_K4=microbatch.keys_K4,
        columns_K=microbatch.columns_K,
        aligned_RC={name: each[:, indices] for name, each in microbatch.aligned_RT.items()},
        encoding=None if share is None else share.of_place(cp_rank, cp_size),
    )


def whole_rows(
    piece: CpSlice,
    tokens_PRC: NDArray[np.int32],
    labels_PRC: NDArray[np.int32],
    aligned_PRC: Mapping[str, NDArray[Any]] = NO_COLUMNS,
) -> Microbatch:
    """Put the rows of all peers together again: the inverse of ``slice_for_cp``.

    Args:
        piece: The slice of any peer; what is no token of it is the same for all.
        tokens_PRC: Token ids of the slices of all ``P`` peers.
        labels_PRC: Their labels.
        aligned_PRC: Their columns of a user's own, by name.
    """
    peers, rows, columns = tokens_PRC.shape
    length = peers * columns
    at_PC = [cp_indices(length, peer, peers) for peer in range(peers)]

    def whole(slices_PRC: NDArray[Any]) -> NDArray[Any]:
        rows_RT = np.empty((rows, length), slices_PRC.dtype)
        for at, each in zip(at_PC, slices_PRC, strict=True):
            rows_RT[:, at] = each
        return rows_RT

    tokens_RT, labels_RT = whole(tokens_PRC), whole(labels_PRC)
    return Microbatch(
        tokens_RT=tokens_RT,
        cu_seqlens=piece.cu_seqlens,
        sources_D=piece.sources_D,
        # The token behind a cut lies in no row: only the labels tell it.
        next_D=labels_RT.reshape(-1)[piece.cu_seqlens[1:] - 1],
        # A mask went into the labels before they were sliced, and is read off them.
        trained_RT=np.not_equal(labels_RT, IGNORE_LABEL),
        keys_K4=piece.keys_K4,
        columns_K=piece.columns_K,
        aligned_RT={name: whole(slices) for name, slices in aligned_PRC.items()},
    )


def joined(parts: Sequence[Microbatch | CpSlice]) -> Microbatch | CpSlice:
    """Return all rows as one part; the rows of the parts lie end to end."""
    if len(parts) == 1:
        return parts[0]
    first = parts[0]
    bounds = [np.zeros(1, np.int32)]
    end = 0
    for part in parts:
        bounds.append(part.cu_seqlens[1:] + end)
        end += int(part.cu_seqlens[-1])
    cu_seqlens = np.concatenate(bounds).astype(np.int32)
    columns_K = {
        name: column if is_absent(column) else _end_to_end([p.columns_K[name] for p in parts])
        for name, column in first.columns_K.items()
    }
    aligned = {name: stacked([aligned_of(p)[name] for p in parts]) for name in aligned_of(first)}
    if isinstance(first, CpSlice):
        slices = [p for p in parts if isinstance(p, CpSlice)]
        return CpSlice(
            tokens_RC=stacked([rows_of(p, "tokens") for p in parts]),
            labels_RC=stacked([rows_of(p, "labels") for p in parts]),
            positions_RC=stacked([rows_of(p, "positions") for p in parts]),
            # The same of every part: a peer holds the same columns of all rows.
            indices_C=first.indices_C,
            cu_seqlens=cu_seqlens,
            sources_D=np.concatenate([p.sources_D for p in slices]),
            keys_K4=np.concatenate([p.keys_K4 for p in slices]),
            columns_K=columns_K,
            aligned_RC=aligned,
        )
    whole = [p for p in parts if isinstance(p, Microbatch)]
    return Microbatch(
        tokens_RT=stacked([p.tokens_RT for p in whole]),
        cu_seqlens=cu_seqlens,
        sources_D=np.concatenate([p.sources_D for p in whole]),
        next_D=stacked([p.next_D for p in whole]),
        trained_RT=_trained(whole),
        keys_K4=np.concatenate([p.keys_K4 for p in whole]),
        columns_K=columns_K,
        aligned_RT=aligned,
        label_tokens_RT=None
        if first.label_tokens_RT is None
        else np.concatenate([p.label_tokens_RT for p in whole if p.label_tokens_RT is not None]),
    )


def _end_to_end(columns: Sequence[Ragged]) -> Ragged:
    """Return the columns of some parts as one: whole ones are copied, for a gather takes longer to find its ranges."""
    return Ragged(
        values_V=np.concatenate([c.values_V[c.offsets[0] : c.offsets[-1]] for c in columns]),
        offsets=offsets_of(np.concatenate([c.lengths_N for c in columns])),
    )


def _trained(parts: Sequence[Microbatch]) -> NDArray[np.bool_] | None:
    """Return which labels no mask leaves out; ``None`` where no part has a mask."""
    if all(part.trained_RT is None for part in parts):
        return None
    return np.concatenate(
        [
            np.ones(part.tokens_RT.shape, np.bool_) if part.trained_RT is None else part.trained_RT
            for part in parts
        ]
    )

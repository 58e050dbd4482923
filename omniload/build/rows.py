"""Packed rows from pieces and their tokens.

Shape suffixes:
    R  rows        T  tokens in a row        K  pieces        D  documents
"""

import numpy as np
from numpy.typing import NDArray

from omniload.base.errors import IntegrityError
from omniload.build.microbatch import IGNORE_LABEL, Microbatch
from omniload.mix.pieces import PieceTable

__all__ = ["build_rows", "stops_with_next"]


def stops_with_next(pieces: PieceTable) -> NDArray[np.int32]:
    """Return where to stop reading each piece: one token on, where the sample goes on, to be its last label."""
    return np.minimum(pieces.stops_P + 1, pieces.sizes_P)


def build_rows(
    pieces: PieceTable,
    row_offsets: NDArray[np.int64],
    values_V: NDArray[np.int32],
    bounds_K2: NDArray[np.int64],
    *,
    length: int,
) -> Microbatch:
    """Lay pieces out in rows of ``length`` tokens.

    Args:
        pieces: Pieces grouped by row, in their order within it, ``[K]``.
        row_offsets: Boundaries of the rows in ``pieces``, ``[R + 1]``.
        values_V: Tokens fetched from the source loaders.
        bounds_K2: Where each piece lies in ``values_V``: first token, and the end of ``stops_with_next``.
        length: Tokens in a row, ``T``.

    Returns:
        The rows, right-padded. Labels never cross a document; a piece that was cut
        predicts the token that follows the cut.

    Raises:
        IntegrityError: A source handed out a sample of another length than it had reported.
    """
    num_rows = len(row_offsets) - 1
    lengths_K = pieces.lengths_P.astype(np.int64)
    wanted_K = (stops_with_next(pieces) - pieces.starts_P).astype(np.int64)
    found_K = bounds_K2[:, 1] - bounds_K2[:, 0]
    if not np.array_equal(found_K, wanted_K):
        at = int(np.flatnonzero(found_K != wanted_K)[0])
        raise IntegrityError(
            f"sample {_key_of(pieces, at)} gave {int(found_K[at])} tokens where {int(wanted_K[at])} were "
            "planned; the source changed while it was read"
        )
    row_of_K = np.repeat(np.arange(num_rows), np.diff(row_offsets))
    ends_K = np.cumsum(lengths_K)
    before_row = np.concatenate(([0], ends_K))[row_offsets[:-1]]
    begins_K = ends_K - lengths_K - before_row[row_of_K] + row_of_K * length

    size = num_rows * length
    out = np.zeros(size, np.int32)
    labels = np.full(size, IGNORE_LABEL, np.int32)
    positions = np.zeros(size, np.int32)
    source_ids = np.full(size, -1, np.int16)
    count = np.arange(length, dtype=np.int32)
    # One memcpy per piece and column; an index array would cost eight bytes per token.
    for begin, n, source, first, n_read in zip(
        begins_K.tolist(),
        lengths_K.tolist(),
        pieces.sources_P.tolist(),
        bounds_K2[:, 0].tolist(),
        wanted_K.tolist(),
        strict=True,
    ):
        end = begin + n
        out[begin:end] = values_V[first : first + n]
        labels[begin : begin + n_read - 1] = values_V[first + 1 : first + n_read]
        positions[begin:end] = count[:n]
        source_ids[begin:end] = source
    shape = (num_rows, length)
    return Microbatch(
        tokens_RT=out.reshape(shape),
        labels_RT=labels.reshape(shape),
        positions_RT=positions.reshape(shape),
        source_ids_RT=source_ids.reshape(shape),
        cu_seqlens=_boundaries(begins_K, lengths_K, size=size, length=length),
        keys_K4=np.column_stack(
            [pieces.sources_P, pieces.positions_P, pieces.subs_P, pieces.starts_P],
        ).astype(np.int64, copy=False),
    )


def _boundaries(
    begins_K: NDArray[np.int64], lengths_K: NDArray[np.int64], *, size: int, length: int
) -> NDArray[np.int32]:
    """Return every document's boundary, a row's padding counting as a document."""
    row_starts = np.arange(0, size + 1, length, dtype=np.int64)
    return np.unique(np.concatenate((row_starts, begins_K, begins_K + lengths_K))).astype(np.int32)


def _key_of(pieces: PieceTable, at: int) -> str:
    return f"(source {pieces.sources_P[at]}, position {pieces.positions_P[at]}, sub {pieces.subs_P[at]})"

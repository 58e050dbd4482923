"""Documents of packed rows: their bounds as a model sees them, each by name, and what was lost on each.

A preference pair is one piece of a row, and two documents to a model.

Shape suffixes:
    R  rows      T  tokens in a row      D  documents, with padding      K  pieces, without      P  pairs
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from omniload.base.errors import ConfigError
from omniload.batch.microbatch import IGNORE_LABEL, CpSlice, Microbatch
from omniload.mix.columns import REJECTED_AT

__all__ = [
    "DocumentLosses",
    "Documents",
    "Piece",
    "documents_of",
    "losses_by_document",
    "pieces_of",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Documents:
    """The documents of some rows, as a model shall see them."""

    cu_seqlens: NDArray[np.int32]
    """Bounds in the flattened rows, ``[D + 1]``; of a pair also the one between its sides."""
    positions: NDArray[np.int32]
    """Place of each token in its document; of cp peers, those of the slice."""
    pairs_P2: NDArray[np.int64]
    """Documents that are the chosen and the rejected side of each pair."""


def documents_of(part: Microbatch | CpSlice) -> Documents:
    """Return the documents of some rows, each side of a pair as one.

    Raises:
        ConfigError: Pairs lie in rows that are shared among cp peers.
    """
    rejected_K = part.columns_K.get(REJECTED_AT)
    none = rejected_K is None or not len(rejected_K.values_V)
    if isinstance(part, CpSlice):
        if not none:
            raise ConfigError(
                "rows of preference pairs are shared among cp peers, which no pair is laid out for; set cp to 1"
            )
        return _without_pairs(part.cu_seqlens, part.positions_RC)
    if rejected_K is None or none:
        return _without_pairs(part.cu_seqlens, part.positions_RT)
    starts_D = part.cu_seqlens[:-1]
    is_piece_D = part.sources_D >= 0
    is_pair_K = rejected_K.lengths_N > 0
    starts_P = starts_D[is_piece_D][is_pair_K]
    stops_P = part.cu_seqlens[1:][is_piece_D][is_pair_K]
    between_P = starts_P + rejected_K.values_V
    bounds = np.sort(np.concatenate((part.cu_seqlens, between_P)))
    # Steps whose sum is taken off: by the length of the first side from the second on, and back at the pair's end.
    back = np.zeros(part.positions_RT.size + 1, np.int32)
    back[between_P] = rejected_K.values_V
    back[stops_P] -= rejected_K.values_V
    positions = part.positions_RT - np.cumsum(back[:-1], dtype=np.int32).reshape(
        part.positions_RT.shape
    )
    second_P = np.searchsorted(bounds, between_P)
    return Documents(
        cu_seqlens=bounds.astype(np.int32),
        positions=positions,
        pairs_P2=np.column_stack((second_P - 1, second_P)).astype(np.int64),
    )


def _without_pairs(cu_seqlens: NDArray[np.int32], positions: NDArray[np.int32]) -> Documents:
    return Documents(
        cu_seqlens=cu_seqlens, positions=positions, pairs_P2=np.empty((0, 2), np.int64)
    )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Piece:
    """A document, or the part of one that lies in a row."""

    key: tuple[int, int, int, int]
    """Number of its source, position in the source's order, sub (of records that hold several samples), and the token
    of the document that it begins with: no other piece of a run has the same."""
    tokens: NDArray[np.int32]
    """Its tokens, without padding."""
    columns: Mapping[str, NDArray[Any]] = field(default_factory=dict)
    """Columns of the whole sample, by name."""

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
                columns={name: column[i] for name, column in part.columns_K.items()},
            )
        )
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class DocumentLosses:
    """What was lost on each piece of a microbatch."""

    keys_K4: NDArray[np.int64]
    """Source, position, sub and first token."""
    sums_K: NDArray[np.float64]
    """Sum over its labels."""
    labels_K: NDArray[np.int64]
    """Labels; 0 for a piece that none is trained on of."""


def losses_by_document(
    rows: Microbatch | CpSlice, labels_RT: NDArray[Any], losses_RT: NDArray[Any]
) -> DocumentLosses:
    """Sum losses by document.

    Args:
        rows: The microbatch.
        labels_RT: Its labels as the trainer has them.
        losses_RT: Loss of each label, any values where there is none; also flat, ``[R*T]``.

    Raises:
        ConfigError: The losses have another shape, or the rows are shared among cp peers.
    """
    if isinstance(rows, CpSlice):
        raise ConfigError("rows shared among cp peers have no loss by document; report with cp 1")
    # Losses [T, R] hold as many values, in the order of other documents.
    if losses_RT.shape not in {labels_RT.shape, (labels_RT.size,)}:
        raise ConfigError(
            f"losses have shape {list(losses_RT.shape)}, labels {list(labels_RT.shape)}; give one loss for each label, "
            "as cross_entropy(..., reduction='none') does"
        )
    labelled = labels_RT.reshape(-1) != IGNORE_LABEL
    losses = np.where(labelled, losses_RT.reshape(-1), 0.0).astype(np.float64)
    starts_D = rows.cu_seqlens[:-1]
    holds_D = rows.sources_D >= 0
    return DocumentLosses(
        keys_K4=rows.keys_K4,
        sums_K=np.add.reduceat(losses, starts_D)[holds_D],
        labels_K=np.add.reduceat(labelled.astype(np.int64), starts_D)[holds_D],
    )

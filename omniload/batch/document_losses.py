"""Loss of each document of a microbatch, from the loss of each label.

Shape suffixes:
    R  rows        T  tokens in a row        D  documents, with padding        K  pieces, without
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from omniload.base.errors import ConfigError
from omniload.batch.microbatch import IGNORE_LABEL, CpSlice, Microbatch

__all__ = ["DocumentLosses", "losses_by_document"]


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

"""Rows of a rank as arrays: of several microbatches as one, and with labels for models that shift by themselves.

Shape suffixes:
    R  rows      T  tokens in a row
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from omniload.base.ragged import Ranges
from omniload.batch.microbatch import IGNORE_LABEL, CpSlice, Microbatch

__all__ = ["joined", "rows_of", "unshifted"]


def rows_of(part: Microbatch | CpSlice, column: str) -> NDArray[Any]:
    """Return a column of tokens, whole or a slice of cp peers."""
    suffix = "RC" if isinstance(part, CpSlice) else "RT"
    rows: NDArray[Any] = getattr(part, f"{column}_{suffix}")
    return rows


def unshifted(labels_RT: NDArray[Any]) -> NDArray[Any]:
    """Return labels that a model which shifts by itself compares rightly.

    Such a model compares the logits of token ``t`` with the label of ``t + 1``: the label that
    belongs to ``t`` moves one to the right. The first column is compared with nothing, and the
    last label of a row (its document goes on in another row) has no place.
    """
    moved = np.full_like(labels_RT, IGNORE_LABEL)
    moved[:, 1:] = labels_RT[:, :-1]
    return moved


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
        name: Ranges.of([p.columns_K[name] for p in parts], column.values_V.dtype.type).packed()
        for name, column in first.columns_K.items()
    }
    if isinstance(first, CpSlice):
        slices = [p for p in parts if isinstance(p, CpSlice)]
        return CpSlice(
            tokens_RC=np.concatenate([rows_of(p, "tokens") for p in parts]),
            labels_RC=np.concatenate([rows_of(p, "labels") for p in parts]),
            positions_RC=np.concatenate([rows_of(p, "positions") for p in parts]),
            indices_C=first.indices_C,
            cu_seqlens=cu_seqlens,
            sources_D=np.concatenate([p.sources_D for p in slices]),
            keys_K4=np.concatenate([p.keys_K4 for p in slices]),
            columns_K=columns_K,
        )
    whole = [p for p in parts if isinstance(p, Microbatch)]
    return Microbatch(
        tokens_RT=np.concatenate([p.tokens_RT for p in whole]),
        cu_seqlens=cu_seqlens,
        sources_D=np.concatenate([p.sources_D for p in whole]),
        next_D=np.concatenate([p.next_D for p in whole]),
        trained_RT=_trained(whole),
        keys_K4=np.concatenate([p.keys_K4 for p in whole]),
        columns_K=columns_K,
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

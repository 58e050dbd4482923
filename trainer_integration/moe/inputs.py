"""A microbatch as the model takes it: tensors, end to end, without padding.

Shape suffixes:
    R  rows        T  tokens in a row        N  tokens that are not padding
"""

from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from omniload.batch.microbatch import IGNORE_LABEL, Microbatch
from trainer_integration.moe.documents import DocumentGroups

__all__ = ["ModelInputs"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInputs:
    """All tokens of a microbatch; padding costs nothing because it is gone."""

    tokens_N: Tensor
    """Token ids, int64."""
    labels_N: Tensor
    """Next tokens, int64; ``IGNORE_LABEL`` where nothing is predicted."""
    positions_N: Tensor
    """Place within the piece, int64, from 0."""
    rows_N: Tensor
    """Row of the microbatch, int64, never falling."""
    num_rows: int
    """Rows of the microbatch."""
    documents: DocumentGroups
    """Which tokens may see each other."""

    @classmethod
    def of(cls, microbatch: Microbatch) -> Self:
        """Drop the padding of ``microbatch`` and lay its tokens end to end.

        Padding is what belongs to no source. A row's padding is a document of its own,
        so it leaves whole.
        """
        num_rows, row_length = microbatch.tokens_RT.shape
        real = microbatch.source_ids_RT.reshape(-1) >= 0
        kept = np.flatnonzero(real)
        before = np.concatenate(([0], np.cumsum(real)))
        return cls(
            tokens_N=_long(microbatch.tokens_RT.reshape(-1)[kept]),
            labels_N=_long(microbatch.labels_RT.reshape(-1)[kept]),
            positions_N=_long(microbatch.positions_RT.reshape(-1)[kept]),
            rows_N=_long(kept // max(1, row_length)),
            num_rows=num_rows,
            documents=DocumentGroups.of(before[microbatch.cu_seqlens]),
        )

    @property
    def num_tokens(self) -> int:
        """Tokens that are not padding."""
        return len(self.tokens_N)

    def labels_in_rows_R(self) -> Tensor:
        """Return how many labels each row predicts, float32."""
        predicted_N = (self.labels_N != IGNORE_LABEL).float()
        return predicted_N.new_zeros(self.num_rows).index_add_(0, self.rows_N, predicted_N)


def _long(values: NDArray[np.integer[Any]]) -> Tensor:
    return torch.from_numpy(values.astype(np.int64))

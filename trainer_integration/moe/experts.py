"""SwiGLU experts.

Shape suffixes:
    N  tokens        K  experts of a token        S  slots, N * K, sorted by expert
    E  experts       D  width of the model        F  width of an expert
"""

import torch
from torch import Tensor, nn
from torch.nn import functional
from typing_extensions import override

from trainer_integration.moe.config import MoEShape
from trainer_integration.moe.grouped_gemm import grouped_gemm
from trainer_integration.moe.row_map import RowMap, combine, dispatch

__all__ = ["Experts"]


class Experts(nn.Module):
    """All experts of a layer: ``fc2((silu(fc1 x) * fc3 x) * gate)``, summed over a token's experts.

    The gate weights the expert's inside rather than its output, as the paper places it
    in BF16 training: the output then needs no copy for backward.
    """

    def __init__(self, shape: MoEShape) -> None:
        super().__init__()
        self.fc13_EXD = nn.Parameter(torch.empty(shape.num_experts, 2 * shape.hidden, shape.dim))
        self.fc2_EDF = nn.Parameter(torch.empty(shape.num_experts, shape.dim, shape.hidden))

    @override
    def forward(self, x_ND: Tensor, gates_NK: Tensor, row_map: RowMap) -> Tensor:
        """Return the weighted sum of each token's experts, ``[N, D]``."""
        gates_S = gates_NK.reshape(-1).index_select(0, row_map.choices_of_slots_S)
        rows_SD = dispatch(x_ND, row_map)
        fc1_SF, fc3_SF = grouped_gemm(rows_SD, self.fc13_EXD, row_map.counts_E).chunk(2, dim=-1)
        inside_SF = functional.silu(fc1_SF) * fc3_SF * gates_S.to(x_ND.dtype).unsqueeze(1)
        return combine(grouped_gemm(inside_SF, self.fc2_EDF, row_map.counts_E), row_map)

"""SwiGLU experts.

Shape suffixes:
    N  tokens        K  experts of a token        S  slots, sorted by expert
    E  experts       D  width of the model        F  width of an expert
"""

import torch
from torch import Tensor, nn
from torch.nn import functional
from typing_extensions import override

from trainer_integration.moe.config import MoEShape
from trainer_integration.moe.grouped_gemm import grouped_gemm
from trainer_integration.moe.parallel.ep_transport import Transport

__all__ = ["Experts"]


class Experts(nn.Module):
    """The experts of a layer that one rank holds: ``fc2((silu(fc1 x) * fc3 x) * gate)``, summed over a token's experts.

    The gate weights the expert's inside rather than its output, as the paper places it
    in BF16 training: the output then needs no copy for backward.
    """

    def __init__(self, shape: MoEShape, num_held: int | None = None) -> None:
        super().__init__()
        held = shape.num_experts if num_held is None else num_held
        self.fc13_EXD = nn.Parameter(torch.empty(held, 2 * shape.hidden, shape.dim))
        self.fc2_EDF = nn.Parameter(torch.empty(held, shape.dim, shape.hidden))

    @override
    def forward(
        self, x_ND: Tensor, gates_NK: Tensor, experts_NK: Tensor, transport: Transport
    ) -> Tensor:
        """Return the weighted sum of each token's experts, ``[N, D]``."""
        slots = transport.there(x_ND, gates_NK, experts_NK)
        fc13_EXD, fc2_EDF = self.fc13_EXD.to(x_ND.dtype), self.fc2_EDF.to(x_ND.dtype)
        fc1_SF, fc3_SF = grouped_gemm(slots.rows_SD, fc13_EXD, slots.ends_E).chunk(2, dim=-1)
        inside_SF = functional.silu(fc1_SF) * fc3_SF * slots.gates_S.to(x_ND.dtype).unsqueeze(1)
        return transport.back(grouped_gemm(inside_SF, fc2_EDF, slots.ends_E))

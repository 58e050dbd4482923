"""One layer: attention, then experts, each on a normed copy of the residual stream.

Shape suffixes:
    N  tokens        D  width
"""

from torch import Tensor, nn
from typing_extensions import override

from trainer_integration.moe.attention import Attention
from trainer_integration.moe.config import MoEShape
from trainer_integration.moe.documents import DocumentGroups
from trainer_integration.moe.experts import Experts
from trainer_integration.moe.norm import RMSNorm
from trainer_integration.moe.rope import Rotation
from trainer_integration.moe.router import Router, Routing

__all__ = ["Block"]


class Block(nn.Module):
    """A transformer layer with routed experts."""

    def __init__(self, shape: MoEShape) -> None:
        super().__init__()
        self.norm1 = RMSNorm(shape.dim, shape.norm_epsilon)
        self.attention = Attention(shape)
        self.norm2 = RMSNorm(shape.dim, shape.norm_epsilon)
        self.router = Router(shape)
        self.experts = Experts(shape)

    @override
    def forward(
        self, x_ND: Tensor, rotation: Rotation, documents: DocumentGroups
    ) -> tuple[Tensor, Routing]:
        """Return the residual stream after the layer, and what its router decided."""
        x_ND = x_ND + self.attention(self.norm1(x_ND), rotation, documents)
        normed_ND = self.norm2(x_ND)
        routing: Routing = self.router(normed_ND)
        x_ND = x_ND + self.experts(normed_ND, routing.gates_NK, routing.row_map)
        return x_ND, routing

"""One layer: attention, then experts, each on a normed copy of the residual stream.

Shape suffixes:
    N  tokens        D  width
"""

from torch import Tensor, nn
from typing_extensions import override

from trainer_integration.moe.attention import Attention
from trainer_integration.moe.balance import within_capacity
from trainer_integration.moe.config import MoEShape
from trainer_integration.moe.experts import Experts
from trainer_integration.moe.inputs import ModelInputs
from trainer_integration.moe.norm import RMSNorm
from trainer_integration.moe.parallel.collectives import ALONE, Peers
from trainer_integration.moe.parallel.crossover_table import TransportName
from trainer_integration.moe.parallel.ep_transport import (
    AllGatherReduceScatter,
    AllToAll,
    Local,
    Transport,
)
from trainer_integration.moe.rope import Rotation
from trainer_integration.moe.router import Router, Routing

__all__ = ["Block"]


class Block(nn.Module):
    """A transformer layer with routed experts."""

    def __init__(
        self, shape: MoEShape, peers: Peers = ALONE, transport: TransportName = "a2a"
    ) -> None:
        super().__init__()
        self._shape, self._peers, self._transport = shape, peers, transport
        self.norm1 = RMSNorm(shape.dim, shape.norm_epsilon)
        self.attention = Attention(shape, peers)
        self.norm2 = RMSNorm(shape.dim, shape.norm_epsilon)
        self.router = Router(shape)
        self.experts = Experts(shape, shape.num_experts // peers.size)

    @override
    def forward(
        self, x_ND: Tensor, rotation: Rotation, inputs: ModelInputs
    ) -> tuple[Tensor, Routing]:
        """Return the residual stream after the layer, and what its router decided."""
        x_ND = x_ND + self.attention(self.norm1(x_ND), rotation, inputs)
        normed_ND = self.norm2(x_ND)
        routing: Routing = self.router(normed_ND)
        shape = self._shape
        if shape.capacity_factor is not None:
            routing = within_capacity(
                routing, inputs, self._peers, shape.groups, shape.capacity_factor
            )
        transport = self._moved_by(inputs)
        x_ND = x_ND + self.experts(normed_ND, routing.gates_NK, routing.served_NK(), transport)
        return x_ND, routing

    def _moved_by(self, inputs: ModelInputs) -> Transport:
        """Return what brings tokens to experts."""
        num_experts, drops = self._shape.num_experts, self._shape.capacity_factor is not None
        if self._peers.size == 1:
            return Local(num_experts, drops=drops)
        if self._transport == "a2a":
            return AllToAll(num_experts, self._peers, drops=drops)
        return AllGatherReduceScatter(num_experts, self._peers, inputs.tokens_of_peers)

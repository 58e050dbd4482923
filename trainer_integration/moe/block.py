"""One layer: causal attention within documents, then experts, each on a normed copy of the residual stream.

Shape suffixes:
    N  tokens        D  width of the model        C  width of a head
    H  query heads   G  KV heads                  P  places in the padded layout
"""

import torch
from torch import Tensor, nn
from torch.nn import functional
from typing_extensions import override

from trainer_integration.moe.balance import within_capacity
from trainer_integration.moe.config import MoEShape
from trainer_integration.moe.documents import DocumentGroups
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
from trainer_integration.moe.parallel.sp_attention import to_heads, to_tokens
from trainer_integration.moe.rope import Rotation
from trainer_integration.moe.router import Router, Routing

__all__ = ["Attention", "Block", "attend"]


def attend(qkv_NXC: Tensor, documents: DocumentGroups, num_heads: int) -> Tensor:
    """Attend causally within each document; the cost is the square of each length.

    Sequence parallelism exchanges heads for tokens just before and just after this
    function, which then sees whole documents and some of the heads.

    Args:
        qkv_NXC: ``H`` query heads, then the key heads, then the value heads, ``X = H + 2 G``.
        documents: Layout of the documents.
        num_heads: ``H``.

    Returns:
        Attended values, ``[N, H, C]``.
    """
    padded_PXC = documents.pad(qkv_NXC)
    num_kv_heads = (padded_PXC.shape[1] - num_heads) // 2
    if documents.varlen:
        return documents.unpad(_attend_varlen(padded_PXC, documents, num_heads))
    sizes = [count * length for count, length in documents.groups]
    outputs = []
    for (count, length), part in zip(documents.groups, torch.split(padded_PXC, sizes), strict=True):
        heads = part.view(count, length, *part.shape[1:]).transpose(1, 2)
        q, k, v = torch.split(heads, [num_heads, num_kv_heads, num_kv_heads], dim=1)
        attended = functional.scaled_dot_product_attention(
            q, k, v, is_causal=True, enable_gqa=num_heads != num_kv_heads
        )
        outputs.append(attended.transpose(1, 2).flatten(0, 1))
    if not outputs:
        # No token, and still a part of the graph: ranks of a sharded model make every backward pass together.
        return qkv_NXC[:, :num_heads]
    return documents.unpad(outputs[0] if len(outputs) == 1 else torch.cat(outputs))


def _attend_varlen(qkv_NXC: Tensor, documents: DocumentGroups, num_heads: int) -> Tensor:
    """Attend by one kernel over documents that lie end to end: on a GPU, in BF16 or FP16."""
    # Imported here: it brings torch's compiler, a sixth of the start of a rank that has no GPU.
    from torch.nn.attention.varlen import varlen_attn  # noqa: PLC0415

    num_kv_heads = (qkv_NXC.shape[1] - num_heads) // 2
    q, k, v = torch.split(qkv_NXC, [num_heads, num_kv_heads, num_kv_heads], dim=1)
    attended = varlen_attn(
        q.contiguous(),
        k.contiguous(),
        v.contiguous(),
        documents.cu_seqlens,
        documents.cu_seqlens,
        documents.longest,
        documents.longest,
        window_size=(-1, 0),  # causal
        enable_gqa=num_heads != num_kv_heads,
    )
    assert isinstance(attended, Tensor), "no auxiliary output was asked for"
    return attended


class Attention(nn.Module):
    """QKV projection, rotary positions, attention, output projection."""

    def __init__(self, shape: MoEShape, peers: Peers = ALONE) -> None:
        super().__init__()
        self._peers = peers
        self.num_heads = shape.num_heads
        self.num_kv_heads = shape.num_kv_heads
        self.head_dim = shape.head_dim
        num_qkv_heads = shape.num_heads + 2 * shape.num_kv_heads
        self.qkv = nn.Linear(shape.dim, num_qkv_heads * shape.head_dim, bias=False)
        self.output = nn.Linear(shape.dim, shape.dim, bias=False)

    @override
    def forward(self, x_ND: Tensor, rotation: Rotation, inputs: ModelInputs) -> Tensor:
        """Mix tokens within documents, ``[N, D]``."""
        num_turned = self.num_heads + self.num_kv_heads
        num_heads = num_turned + self.num_kv_heads
        qkv_ND = functional.linear(x_ND, self.qkv.weight.to(x_ND.dtype))
        qkv_NXC = qkv_ND.view(len(x_ND), num_heads, self.head_dim)
        qkv_NXC = torch.cat(
            (rotation.apply(qkv_NXC[:, :num_turned]), qkv_NXC[:, num_turned:]), dim=1
        )
        peers, sizes = self._peers, inputs.tokens_of_peers
        if peers.size == 1:
            attended_NHC = attend(qkv_NXC, inputs.documents, self.num_heads)
        else:
            qkv_MXC = to_heads(qkv_NXC, self.num_heads, sizes, peers)
            attended_MHC = attend(qkv_MXC, inputs.documents, self.num_heads // peers.size)
            attended_NHC = to_tokens(attended_MHC, sizes, peers)
        return functional.linear(
            attended_NHC.reshape(x_ND.shape), self.output.weight.to(x_ND.dtype)
        )


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

"""One layer: causal attention within documents, then experts, each on a normed copy of the residual stream.

Shape suffixes:
    N  tokens        D  width of the model        C  width of a head
    H  query heads   G  KV heads                  P  places in the padded layout
    E  experts       K  experts of a token        S  slots, sorted by expert
    F  width of an expert                         I, O  inputs, outputs of a product
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional
from typing_extensions import override

from trainer_integration.moe.balance import within_capacity
from trainer_integration.moe.config import MoEShape
from trainer_integration.moe.documents import DocumentGroups
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
from trainer_integration.moe.varlen import attend_varlen

__all__ = ["Attention", "Block", "Experts", "attend", "grouped_gemm"]

_GROUPED = (torch.float32, torch.bfloat16, torch.float16)
"""Types that torch's own product supports; float64, for tests, goes expert by expert."""
_ALIGNED_BYTES = 16
"""Required divisor of the bytes of a row: four float32, eight BF16."""


class Experts(nn.Module):
    """The experts of a layer that one rank holds: ``fc2((silu(fc1 x) * fc3 x) * gate)``, summed over a token's experts.

    The gate scales the expert's inner values rather than its output, as in the paper's BF16 training, so that the
    output needs no copy for backward.
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
        # Both in one matrix, so that rows are read once.
        fc1_SF, fc3_SF = grouped_gemm(slots.rows_SD, fc13_EXD, slots.ends_E).chunk(2, dim=-1)
        inside_SF = functional.silu(fc1_SF) * fc3_SF * slots.gates_S.to(x_ND.dtype).unsqueeze(1)
        return transport.back(grouped_gemm(inside_SF, fc2_EDF, slots.ends_E))


def grouped_gemm(x_SI: Tensor, weight_EOI: Tensor, ends_E: Tensor) -> Tensor:
    """Multiply each expert's rows by its matrix: ``x[rows of e] @ weight[e].T``, ``[S, O]``.

    The ends stay on the device. torch's own code waits for a GPU only if its fast kernel is unavailable, which needs
    BF16 on Hopper or later. Rows beyond the last end are not computed, forward or backward, and their values are
    undefined.

    Args:
        x_SI: Rows, expert by expert.
        weight_EOI: One matrix per expert.
        ends_E: Where the rows of each expert end, int32.
    """
    widths = weight_EOI.shape[1:]
    if x_SI.dtype in _GROUPED and all(
        w * x_SI.element_size() % _ALIGNED_BYTES == 0 for w in widths
    ):
        return functional.grouped_mm(x_SI, weight_EOI.transpose(1, 2), offs=ends_E)
    output_SO: Tensor = _ByExpert.apply(x_SI, weight_EOI, ends_E)  # type: ignore[no-untyped-call]
    return output_SO


def _ranges(ends_E: Tensor) -> Iterator[tuple[int, slice]]:
    start = 0
    for expert, end in enumerate(ends_E.tolist()):
        yield expert, slice(start, end)
        start = end


class _ByExpert(torch.autograd.Function):
    @staticmethod
    @override
    def forward(ctx: Any, x_SI: Tensor, weight_EOI: Tensor, ends_E: Tensor) -> Tensor:
        ctx.save_for_backward(x_SI, weight_EOI, ends_E)
        output_SO = x_SI.new_empty(len(x_SI), weight_EOI.shape[1])
        for expert, rows in _ranges(ends_E):
            torch.mm(x_SI[rows], weight_EOI[expert].t(), out=output_SO[rows])
        return output_SO

    @staticmethod
    @override
    @once_differentiable
    def backward(ctx: Any, grad_SO: Tensor) -> tuple[Tensor, Tensor, None]:
        x_SI, weight_EOI, ends_E = ctx.saved_tensors
        grad_x_SI, grad_weight_EOI = torch.empty_like(x_SI), torch.empty_like(weight_EOI)
        for expert, rows in _ranges(ends_E):
            torch.mm(grad_SO[rows], weight_EOI[expert], out=grad_x_SI[rows])
            # For an expert without rows, this product gives zeros, where ``empty_like`` left arbitrary values.
            torch.mm(grad_SO[rows].t(), x_SI[rows], out=grad_weight_EOI[expert])
        return grad_x_SI, grad_weight_EOI, None


def attend(qkv_NXC: Tensor, documents: DocumentGroups, num_heads: int) -> Tensor:
    """Attend causally within each document; the cost is the square of each length.

    Sequence parallelism exchanges heads for tokens just before and just after this function, which then sees whole
    documents and some of the heads.

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
        q, k, v = torch.split(padded_PXC, [num_heads, num_kv_heads, num_kv_heads], dim=1)
        bounds_D, longest = documents.cu_seqlens, documents.longest
        return documents.unpad(attend_varlen(q, k, v, bounds_D, longest, causal=True))
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
        # There is no token, but the result must be in the graph: ranks of a sharded model share every backward pass.
        return qkv_NXC[:, :num_heads]
    return documents.unpad(outputs[0] if len(outputs) == 1 else torch.cat(outputs))


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
        # One product for queries, keys and values: tokens are read once.
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
        """Return the residual stream after the layer, and the router's decisions."""
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
        """Return the transport that brings tokens to experts."""
        num_experts, drops = self._shape.num_experts, self._shape.capacity_factor is not None
        if self._peers.size == 1:
            return Local(num_experts, drops=drops)
        if self._transport == "a2a":
            return AllToAll(num_experts, self._peers, drops=drops)
        return AllGatherReduceScatter(num_experts, self._peers, inputs.tokens_of_peers)

"""SwiGLU experts, and one matrix product per expert over contiguous rows.

Shape suffixes:
    N  tokens        K  experts of a token        S  slots, sorted by expert
    E  experts       D  width of the model        F  width of an expert
    I  inputs        O  outputs
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional
from typing_extensions import override

from trainer_integration.moe.config import MoEShape
from trainer_integration.moe.parallel.ep_transport import Transport

__all__ = ["Experts", "grouped_gemm"]

_GROUPED = (torch.float32, torch.bfloat16, torch.float16)
"""What torch's own product takes; float64, for tests, goes expert by expert."""
_ALIGNED_BYTES = 16
"""What the bytes of a row must be a multiple of for it: four float32, eight BF16."""


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


def grouped_gemm(x_SI: Tensor, weight_EOI: Tensor, ends_E: Tensor) -> Tensor:
    """Multiply each expert's rows by its matrix: ``x[rows of e] @ weight[e].T``, ``[S, O]``.

    The ends stay on the device: by torch's own code, a GPU is waited for where its kernel is not the fast one, which
    takes BF16 on Hopper and later. Rows beyond the last end are not computed, forward or backward:
    what stands there is no number to rely on.

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
            # Of an expert without rows this is a product over nothing: zeros, where ``empty_like`` left anything.
            torch.mm(grad_SO[rows].t(), x_SI[rows], out=grad_weight_EOI[expert])
        return grad_x_SI, grad_weight_EOI, None

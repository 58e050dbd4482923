"""One matrix product per expert over contiguous rows.

Shape suffixes:
    S  slots, sorted by expert        E  experts        I  inputs        O  outputs
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from typing_extensions import override

__all__ = ["grouped_gemm"]


def grouped_gemm(x_SI: Tensor, weight_EOI: Tensor, counts_E: Sequence[int]) -> Tensor:
    """Multiply each expert's rows by its matrix: ``x[rows of e] @ weight[e].T``, ``[S, O]``.

    Forward and both products of backward write into one output each. Autograd's own
    slicing would make a full-size gradient of the weights for every expert.

    Args:
        x_SI: Rows, expert by expert.
        weight_EOI: One matrix per expert.
        counts_E: Rows of each expert; they sum to ``S``.
    """
    output_SO: Tensor = _GroupedGemm.apply(x_SI, weight_EOI, counts_E)  # type: ignore[no-untyped-call]
    return output_SO


def _ranges(counts_E: Sequence[int]) -> Iterator[tuple[int, slice]]:
    start = 0
    for expert, count in enumerate(counts_E):
        if count:
            yield expert, slice(start, start + count)
        start += count


class _GroupedGemm(torch.autograd.Function):
    @staticmethod
    @override
    def forward(ctx: Any, x_SI: Tensor, weight_EOI: Tensor, counts_E: Sequence[int]) -> Tensor:
        ctx.save_for_backward(x_SI, weight_EOI)
        ctx.counts_E = counts_E
        output_SO = x_SI.new_empty(len(x_SI), weight_EOI.shape[1])
        for expert, rows in _ranges(counts_E):
            torch.mm(x_SI[rows], weight_EOI[expert].t(), out=output_SO[rows])
        return output_SO

    @staticmethod
    @override
    @once_differentiable
    def backward(ctx: Any, grad_SO: Tensor) -> tuple[Tensor, Tensor, None]:
        x_SI, weight_EOI = ctx.saved_tensors
        grad_x_SI = torch.empty_like(x_SI)
        grad_weight_EOI = torch.empty_like(weight_EOI)
        for expert, rows in _ranges(ctx.counts_E):
            torch.mm(grad_SO[rows], weight_EOI[expert], out=grad_x_SI[rows])
            torch.mm(grad_SO[rows].t(), x_SI[rows], out=grad_weight_EOI[expert])
        for expert, count in enumerate(ctx.counts_E):
            if count == 0:
                grad_weight_EOI[expert].zero_()
        return grad_x_SI, grad_weight_EOI, None

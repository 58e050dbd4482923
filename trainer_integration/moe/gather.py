"""Rows moved to other places, forward and backward by a gather.

Autograd's own backward of ``index_select`` sums. It is several times slower, and on a GPU it sums by atomics, in
another order each time. If the gradient of a row comes from one place, there is nothing to sum.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from typing_extensions import override

__all__ = ["gather"]


def gather(rows: Tensor, order_S: Tensor, inverse_N: Tensor) -> Tensor:
    """Put row ``order[s]`` in place ``s``, ``[S, ...]``.

    Args:
        rows: The rows, ``[N, ...]``.
        order_S: The row of each place.
        inverse_N: The place from which each row's gradient is taken. A row may also be in other places, such as
            padding, if nothing depends on them.
    """
    moved: Tensor = _Gather.apply(rows, order_S, inverse_N)  # type: ignore[no-untyped-call]
    return moved


class _Gather(torch.autograd.Function):
    @staticmethod
    @override
    def forward(ctx: Any, rows: Tensor, order_S: Tensor, inverse_N: Tensor) -> Tensor:
        ctx.save_for_backward(inverse_N)
        return rows.index_select(0, order_S)

    @staticmethod
    @override
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (inverse_N,) = ctx.saved_tensors
        return grad.index_select(0, inverse_N), None, None

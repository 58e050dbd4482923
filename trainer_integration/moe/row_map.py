"""Where the router sends tokens: rows sorted by expert, and the way back.

Shape suffixes:
    N  tokens        K  experts of a token        S  slots, N * K, sorted by expert
    E  experts       D  width
"""

from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from typing_extensions import override

__all__ = ["RowMap", "combine", "dispatch"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RowMap:
    """The routing of one layer, computed once and used by every copy of rows.

    Slots of one expert are contiguous, and in the order of their tokens. Both
    directions are plain gathers, forward and backward; nothing is added through
    unordered indices, so results do not depend on the order of threads.
    """

    slots_of_tokens_NK: Tensor
    """Slots that hold a token."""
    tokens_of_slots_S: Tensor
    """Token in each slot."""
    choices_of_slots_S: Tensor
    """Entry of the flattened ``[N, K]`` choices that each slot serves."""
    counts_E: tuple[int, ...]
    """Slots of each expert."""

    @classmethod
    def of(cls, experts_NK: Tensor, num_experts: int) -> Self:
        """Sort the choices ``experts_NK`` by expert."""
        chosen_S = experts_NK.reshape(-1)
        order_S = torch.argsort(chosen_S, stable=True)
        slots_S = torch.empty_like(order_S)
        slots_S[order_S] = torch.arange(len(order_S), device=order_S.device)
        counts = torch.bincount(chosen_S, minlength=num_experts)
        return cls(
            slots_of_tokens_NK=slots_S.view(experts_NK.shape),
            tokens_of_slots_S=order_S // experts_NK.shape[1],
            choices_of_slots_S=order_S,
            counts_E=tuple(counts.tolist()),
        )


def dispatch(x_ND: Tensor, row_map: RowMap) -> Tensor:
    """Copy every token into its slots, ``[S, D]``."""
    rows_SD: Tensor = _Dispatch.apply(  # type: ignore[no-untyped-call]
        x_ND, row_map.tokens_of_slots_S, row_map.slots_of_tokens_NK
    )
    return rows_SD


def combine(rows_SD: Tensor, row_map: RowMap) -> Tensor:
    """Sum every token's slots, ``[N, D]``: the transpose of ``dispatch``."""
    x_ND: Tensor = _Combine.apply(  # type: ignore[no-untyped-call]
        rows_SD, row_map.tokens_of_slots_S, row_map.slots_of_tokens_NK
    )
    return x_ND


def _sum_of_slots(rows_SD: Tensor, slots_NK: Tensor) -> Tensor:
    total_ND = rows_SD.index_select(0, slots_NK[:, 0])
    for k in range(1, slots_NK.shape[1]):
        total_ND += rows_SD.index_select(0, slots_NK[:, k])
    return total_ND


class _Dispatch(torch.autograd.Function):
    @staticmethod
    @override
    def forward(ctx: Any, x_ND: Tensor, tokens_S: Tensor, slots_NK: Tensor) -> Tensor:
        ctx.save_for_backward(slots_NK)
        return x_ND.index_select(0, tokens_S)

    @staticmethod
    @override
    @once_differentiable
    def backward(ctx: Any, grad_SD: Tensor) -> tuple[Tensor, None, None]:
        (slots_NK,) = ctx.saved_tensors
        return _sum_of_slots(grad_SD, slots_NK), None, None


class _Combine(torch.autograd.Function):
    @staticmethod
    @override
    def forward(ctx: Any, rows_SD: Tensor, tokens_S: Tensor, slots_NK: Tensor) -> Tensor:
        ctx.save_for_backward(tokens_S)
        return _sum_of_slots(rows_SD, slots_NK)

    @staticmethod
    @override
    @once_differentiable
    def backward(ctx: Any, grad_ND: Tensor) -> tuple[Tensor, None, None]:
        (tokens_S,) = ctx.saved_tensors
        return grad_ND.index_select(0, tokens_S), None, None

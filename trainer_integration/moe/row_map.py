"""Where the router sends tokens: rows sorted by expert, and the way back.

Shape suffixes:
    N  tokens        K  experts of a token        S  slots, N * K, sorted by expert
    E  experts       D  width
"""

from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from typing_extensions import override

__all__ = ["RowMap", "combine", "dispatch", "permute"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RowMap:
    """The routing of one layer, computed once and used by every copy of rows.

    Slots of one expert are contiguous, and in the order of their tokens. Both
    directions are plain gathers, forward and backward; nothing is added through
    unordered indices, so results do not depend on the order of threads. Nothing here
    waits for the device.
    """

    slots_of_tokens_NK: Tensor
    """Slots that hold a token."""
    tokens_of_slots_S: Tensor
    """Token in each slot."""
    choices_of_slots_S: Tensor
    """Entry of the flattened ``[N, K]`` choices that each slot serves."""
    ends_E: Tensor
    """Where the slots of each expert end, int32. Slots beyond the last end serve no expert."""
    kept_NK: Tensor | None
    """Choices that an expert serves; ``None``: all of them."""

    @classmethod
    def of(cls, experts_NK: Tensor, num_experts: int, *, drops: bool = False) -> Self:
        """Sort the choices ``experts_NK`` by expert.

        Args:
            experts_NK: Chosen experts; ``num_experts`` for a choice that is dropped.
            num_experts: How many there are.
            drops: Whether a choice may be dropped.
        """
        chosen_S = experts_NK.reshape(-1)
        order_S = torch.argsort(chosen_S, stable=True)
        slots_S = torch.empty_like(order_S)
        slots_S[order_S] = torch.arange(len(order_S), device=order_S.device)
        experts_E = torch.arange(num_experts, device=chosen_S.device)
        return cls(
            slots_of_tokens_NK=slots_S.view(experts_NK.shape),
            tokens_of_slots_S=order_S // experts_NK.shape[1],
            choices_of_slots_S=order_S,
            ends_E=torch.searchsorted(chosen_S[order_S], experts_E, right=True, out_int32=True),
            kept_NK=experts_NK < num_experts if drops else None,
        )

    def first(self, num_slots: int) -> Self:
        """Return the map without the slots from ``num_slots`` on, which serve no expert."""
        if num_slots == len(self.choices_of_slots_S):
            return self
        return replace(
            self,
            # Dropped choices point beyond the end: any row does for them, as ``kept_NK`` leaves it out.
            slots_of_tokens_NK=self.slots_of_tokens_NK.clamp(max=max(0, num_slots - 1)),
            tokens_of_slots_S=self.tokens_of_slots_S[:num_slots],
            choices_of_slots_S=self.choices_of_slots_S[:num_slots],
        )

    def gates(self, gates_NK: Tensor) -> Tensor:
        """Return the weight of each slot, ``[S]``."""
        if self.kept_NK is not None:
            # What comes back to a slot of no expert is not even a number: it ends here.
            gates_NK = torch.where(self.kept_NK, gates_NK, 0)
        return gates_NK.reshape(-1).index_select(0, self.choices_of_slots_S)


def dispatch(x_ND: Tensor, row_map: RowMap) -> Tensor:
    """Copy every token into its slots, ``[S, D]``."""
    rows_SD: Tensor = _Dispatch.apply(  # type: ignore[no-untyped-call]
        x_ND, row_map.tokens_of_slots_S, row_map.slots_of_tokens_NK, row_map.kept_NK
    )
    return rows_SD


def combine(rows_SD: Tensor, row_map: RowMap) -> Tensor:
    """Sum every token's slots, ``[N, D]``: the transpose of ``dispatch``."""
    x_ND: Tensor = _Combine.apply(  # type: ignore[no-untyped-call]
        rows_SD, row_map.tokens_of_slots_S, row_map.slots_of_tokens_NK, row_map.kept_NK
    )
    return x_ND


def permute(rows_S: Tensor, order_S: Tensor, inverse_S: Tensor) -> Tensor:
    """Put row ``order[i]`` in place ``i``; backward by the ``inverse``."""
    moved_S: Tensor = _Permute.apply(rows_S, order_S, inverse_S)  # type: ignore[no-untyped-call]
    return moved_S


def _sum_of_slots(rows_SD: Tensor, slots_NK: Tensor, kept_NK: Tensor | None) -> Tensor:
    if len(rows_SD) == 0:
        return rows_SD.new_zeros(len(slots_NK), *rows_SD.shape[1:])
    total_ND = _rows_at(rows_SD, slots_NK, kept_NK, 0)
    for k in range(1, slots_NK.shape[1]):
        total_ND += _rows_at(rows_SD, slots_NK, kept_NK, k)
    return total_ND


def _rows_at(rows_SD: Tensor, slots_NK: Tensor, kept_NK: Tensor | None, k: int) -> Tensor:
    rows_ND = rows_SD.index_select(0, slots_NK[:, k])
    return rows_ND if kept_NK is None else torch.where(kept_NK[:, k].unsqueeze(1), rows_ND, 0)


class _Dispatch(torch.autograd.Function):
    @staticmethod
    @override
    def forward(
        ctx: Any, x_ND: Tensor, tokens_S: Tensor, slots_NK: Tensor, kept_NK: Tensor | None
    ) -> Tensor:
        ctx.save_for_backward(slots_NK, kept_NK)
        return x_ND.index_select(0, tokens_S)

    @staticmethod
    @override
    @once_differentiable
    def backward(ctx: Any, grad_SD: Tensor) -> tuple[Tensor, None, None, None]:
        slots_NK, kept_NK = ctx.saved_tensors
        return _sum_of_slots(grad_SD, slots_NK, kept_NK), None, None, None


class _Combine(torch.autograd.Function):
    @staticmethod
    @override
    def forward(
        ctx: Any, rows_SD: Tensor, tokens_S: Tensor, slots_NK: Tensor, kept_NK: Tensor | None
    ) -> Tensor:
        ctx.save_for_backward(tokens_S)
        return _sum_of_slots(rows_SD, slots_NK, kept_NK)

    @staticmethod
    @override
    @once_differentiable
    def backward(ctx: Any, grad_ND: Tensor) -> tuple[Tensor, None, None, None]:
        (tokens_S,) = ctx.saved_tensors
        return grad_ND.index_select(0, tokens_S), None, None, None


class _Permute(torch.autograd.Function):
    @staticmethod
    @override
    def forward(ctx: Any, rows_S: Tensor, order_S: Tensor, inverse_S: Tensor) -> Tensor:
        ctx.save_for_backward(inverse_S)
        return rows_S.index_select(0, order_S)

    @staticmethod
    @override
    @once_differentiable
    def backward(ctx: Any, grad_S: Tensor) -> tuple[Tensor, None, None]:
        (inverse_S,) = ctx.saved_tensors
        return grad_S.index_select(0, inverse_S), None, None

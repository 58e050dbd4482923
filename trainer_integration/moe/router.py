"""Which experts see a token, and the loss that keeps them evenly busy.

Shape suffixes:
    N  tokens        D  width        E  experts        K  experts of a token        R  rows
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional
from typing_extensions import override

from trainer_integration.moe.config import MoEShape
from trainer_integration.moe.row_map import RowMap

__all__ = ["Router", "Routing", "balance_losses_R"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Routing:
    """What the router decided for one microbatch in one layer."""

    gates_NK: Tensor
    """Weight of each chosen expert, float32; those of a token sum to one where it has several."""
    experts_NK: Tensor
    """Chosen experts, the likeliest first."""
    probabilities_NE: Tensor
    """Softmax over all experts, float32."""
    row_map: RowMap
    """The chosen rows, sorted by expert."""


class Router(nn.Module):
    """Softmax over experts, the best ``top_k`` of them, weights renormalised; all in float32.

    One expert alone keeps its probability as its weight. Renormalised, that weight would be 1
    whatever the logits, and no token loss would reach the router.

    Source:
        Fedus et al., arXiv 2101.03961, section 2.1, for one expert; Jiang et al., arXiv
        2401.04088, for several.
    """

    def __init__(self, shape: MoEShape) -> None:
        super().__init__()
        self.top_k = shape.top_k
        self.weight_ED = nn.Parameter(torch.empty(shape.num_experts, shape.dim))

    @override
    def forward(self, x_ND: Tensor) -> Routing:
        """Choose experts for every token."""
        logits_NE = functional.linear(x_ND.float(), self.weight_ED.float())
        probabilities_NE = logits_NE.softmax(-1)
        chosen_NK, experts_NK = probabilities_NE.topk(self.top_k, dim=-1)
        gates_NK = chosen_NK if self.top_k == 1 else chosen_NK / chosen_NK.sum(-1, keepdim=True)
        return Routing(
            gates_NK=gates_NK,
            experts_NK=experts_NK,
            probabilities_NE=probabilities_NE,
            row_map=RowMap.of(experts_NK, len(self.weight_ED)),
        )


def balance_losses_R(routing: Routing, rows_N: Tensor, num_rows: int) -> Tensor:
    """Return the balance loss of each row, ``[R]``: 1 at even load, at most ``E``.

    ``E * sum over experts of (share of choices) * (mean probability)``. It is taken row
    by row because a row is what the data plane places: taken over a microbatch, it would
    depend on which rows happen to share one, and training on the number of ranks.

    Args:
        routing: Decisions of one layer.
        rows_N: Row of each token.
        num_rows: ``R``; a row without tokens has loss 0.

    Source:
        Fedus et al., arXiv 2101.03961, for the product; DeepSeek-V3, arXiv 2412.19437,
        for taking it within a sequence.
    """
    num_experts = routing.probabilities_NE.shape[1]
    top_k = routing.experts_NK.shape[1]
    cells = (rows_N.unsqueeze(1) * num_experts + routing.experts_NK).reshape(-1)
    choices_RE = torch.bincount(cells, minlength=num_rows * num_experts).view(num_rows, -1)
    tokens_R1 = choices_RE.sum(-1, keepdim=True).clamp(min=1) / top_k
    shares_RE = choices_RE / (tokens_R1 * top_k)
    sums_RE = routing.probabilities_NE.new_zeros(num_rows, num_experts).index_add(
        0, rows_N, routing.probabilities_NE
    )
    return num_experts * (shares_RE * (sums_RE / tokens_R1)).sum(-1)

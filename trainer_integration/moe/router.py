"""Chooses the experts of a token."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional
from typing_extensions import override

from trainer_integration.moe.config import MoEShape

__all__ = ["Router", "Routing", "wide"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Routing:
    """The router's decisions for one microbatch in one layer."""

    gates_NK: Tensor
    """Weight of each chosen expert, float32; those of a token sum to one if it has several."""
    experts_NK: Tensor
    """Chosen experts, the likeliest first."""
    probabilities_NE: Tensor
    """Softmax over all experts, float32."""
    log_sums_N: Tensor
    """Logarithm of the sum of the exponentials of a token's logits, float32."""
    kept_NK: Tensor | None = None
    """Choices within the capacity of their experts; ``None`` means all of them."""

    def served_NK(self) -> Tensor:
        """Return the experts that serve each token; the number of experts for a choice that is dropped."""
        if self.kept_NK is None:
            return self.experts_NK
        return torch.where(self.kept_NK, self.experts_NK, self.probabilities_NE.shape[1])


class Router(nn.Module):
    """Softmax over experts, the best ``top_k`` of them, weights renormalised; all at least in float32.

    A single expert keeps its probability as its weight. If renormalised, that weight would be 1 whatever the logits,
    and no token loss would reach the router. The bias, if there is one, affects which experts are chosen, but not their
    weights.

    Source:
        Fedus et al., arXiv 2101.03961, section 2.1, for one expert; Jiang et al., arXiv
        2401.04088, for several; Wang et al., arXiv 2408.15664, for the bias.
    """

    bias_E: Tensor | None

    def __init__(self, shape: MoEShape) -> None:
        super().__init__()
        self.top_k = shape.top_k
        self.weight_ED = nn.Parameter(torch.empty(shape.num_experts, shape.dim))
        bias_E = torch.zeros(shape.num_experts) if shape.bias_rate else None
        # A buffer, so that checkpoints include it, and the optimiser ignores it.
        self.register_buffer("bias_E", bias_E)

    @override
    def forward(self, x_ND: Tensor) -> Routing:
        """Choose experts for every token."""
        x_ND = wide(x_ND)
        logits_NE = functional.linear(x_ND, self.weight_ED.to(x_ND.dtype))
        probabilities_NE = logits_NE.softmax(-1)
        if self.bias_E is None:
            chosen_NK, experts_NK = probabilities_NE.topk(self.top_k, dim=-1)
        else:
            # Indices have no gradient; with the graph detached, nothing of the sum is kept for backward.
            experts_NK = (probabilities_NE.detach() + self.bias_E).topk(self.top_k, dim=-1).indices
            chosen_NK = probabilities_NE.gather(-1, experts_NK)
        gates_NK = chosen_NK if self.top_k == 1 else chosen_NK / chosen_NK.sum(-1, keepdim=True)
        return Routing(
            gates_NK=gates_NK,
            experts_NK=experts_NK,
            probabilities_NE=probabilities_NE,
            log_sums_N=logits_NE.logsumexp(-1),
        )


def wide(x: Tensor) -> Tensor:
    """Return ``x`` in float32, or unchanged if its type is wider."""
    return x.to(torch.promote_types(x.dtype, torch.float32))

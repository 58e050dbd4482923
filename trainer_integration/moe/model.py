"""The whole model: embedding, layers, norm, output matrix.

Shape suffixes:
    N  tokens        D  width        V  vocabulary        E  experts        R  rows
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional
from typing_extensions import override

from trainer_integration.moe.block import Block
from trainer_integration.moe.config import MoEConfig
from trainer_integration.moe.head import summed_cross_entropy
from trainer_integration.moe.inputs import ModelInputs
from trainer_integration.moe.norm import RMSNorm
from trainer_integration.moe.rope import Rotation
from trainer_integration.moe.router import Routing, balance_losses_R

__all__ = ["MoETransformer", "ModelOutput"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelOutput:
    """Losses of one microbatch, summed: divide by the labels of the whole step."""

    token_loss: Tensor
    """Cross entropy summed over labels, float64."""
    balance_loss: Tensor
    """Balance loss of each row times the labels in it, summed; mean over layers."""
    slots_by_expert: tuple[tuple[int, ...], ...]
    """Rows each expert computed, layer by layer."""


class MoETransformer(nn.Module):
    """A decoder of routed-expert layers over packed documents."""

    def __init__(self, config: MoEConfig, *, seed: int = 0) -> None:
        super().__init__()
        self.config = config
        self.embedding_VD = nn.Parameter(torch.empty(config.vocab_size, config.dim))
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.norm = RMSNorm(config.dim, config.norm_epsilon)
        if not config.tied_embeddings:
            self.output_VD = nn.Parameter(torch.empty(config.vocab_size, config.dim))
        self._initialise(seed)

    def _initialise(self, seed: int) -> None:
        """Draw first weights; equal seeds give equal weights on every rank.

        Matrices that write into the residual stream are smaller by the root of their
        number, so that the stream's size does not grow with depth.
        """
        generator = torch.Generator().manual_seed(seed)
        into_stream = self.config.init_std / math.sqrt(2 * self.config.num_layers)
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                if parameter.ndim < 2:
                    continue
                writes = name.endswith(("attention.output.weight", "experts.fc2_EDF"))
                std = into_stream if writes else self.config.init_std
                parameter.normal_(0.0, std, generator=generator)

    @property
    def head_VD(self) -> Tensor:
        """The output matrix."""
        return self.embedding_VD if self.config.tied_embeddings else self.output_VD

    def hidden(self, inputs: ModelInputs) -> tuple[Tensor, list[Routing]]:
        """Return the normed last hidden states, ``[N, D]``, and each layer's routing."""
        rotation = Rotation.at(inputs.positions_N, self.config.head_dim, self.config.rope_theta)
        x_ND = functional.embedding(inputs.tokens_N, self.embedding_VD)
        routings = []
        for block in self.blocks:
            x_ND, routing = block(x_ND, rotation, inputs.documents)
            routings.append(routing)
        normed_ND: Tensor = self.norm(x_ND)
        return normed_ND, routings

    def logits(self, inputs: ModelInputs) -> Tensor:
        """Return all logits, ``[N, V]``: for looking, not for training."""
        return self.hidden(inputs)[0] @ self.head_VD.t()

    @override
    def forward(self, inputs: ModelInputs) -> ModelOutput:
        """Return the losses of one microbatch; each is a sum over rows, whatever shares it."""
        x_ND, routings = self.hidden(inputs)
        weights_R = inputs.labels_in_rows_R()
        balance_R = torch.stack(
            [balance_losses_R(routing, inputs.rows_N, inputs.num_rows) for routing in routings]
        ).mean(0)
        return ModelOutput(
            token_loss=summed_cross_entropy(x_ND, self.head_VD, inputs.labels_N),
            balance_loss=(balance_R * weights_R).sum(),
            slots_by_expert=tuple(routing.row_map.counts_E for routing in routings),
        )

"""The whole model: embedding, layers, norm, output matrix; the cross entropy of a large vocabulary without its logits.

Shape suffixes:
    N  tokens        D  width        V  vocabulary        E  experts        R  rows
    M  tokens with a label
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn import functional
from typing_extensions import override

from omniload.batch.microbatch import CpSlice, Microbatch
from trainer_integration.moe.balance import (
    RouterFigures,
    balance_losses,
    figures_of,
    moved_bias_E,
)
from trainer_integration.moe.block import Block
from trainer_integration.moe.config import MoEConfig
from trainer_integration.moe.inputs import ModelInputs
from trainer_integration.moe.norm import RMSNorm
from trainer_integration.moe.parallel.collectives import ALONE, Peers
from trainer_integration.moe.parallel.crossover_table import TransportName
from trainer_integration.moe.rope import Rotation
from trainer_integration.moe.router import Router, Routing
from trainer_integration.moe.varlen import takes_varlen

__all__ = [
    "CHUNK_LOGITS",
    "MoETransformer",
    "ModelOutput",
    "is_of_experts",
    "part_of",
    "summed_cross_entropy",
]

CHUNK_LOGITS = {"cpu": 1 << 21, "cuda": 1 << 26}
"""Logits in memory at a time, by the kind of device: 8 and 256 MiB in float32. One CPU thread with 1024 tokens of width
128 takes 41, 85 and 397 ms at 4096, 8192 and 32768 ids; with half as many logits 43, 83 and 438 ms; with four times as
many 42, 96 and 402 ms. On an H100, 4096 tokens of 32000 ids, with four layers, took 48 ms with the CPU's number of
logits, and take 34 ms."""


def summed_cross_entropy(
    x_ND: Tensor, weight_VD: Tensor, labels_N: Tensor, labelled_M: Tensor
) -> Tensor:
    """Return the cross entropy of ``x @ weight.T`` summed over all labels, float64.

    Tokens without a label cost nothing. The logits of a few tokens at a time are turned into gradients at once, in the
    forward pass, so that no more than ``CHUNK_LOGITS`` of them ever exist.

    Args:
        x_ND: Last hidden states.
        weight_VD: Output matrix.
        labels_N: Next tokens.
        labelled_M: Which tokens have a label, in order.
    """
    if len(labelled_M) < len(labels_N):
        x_ND, labels_N = x_ND.index_select(0, labelled_M), labels_N.index_select(0, labelled_M)
    loss: Tensor = _SummedCrossEntropy.apply(x_ND, weight_VD, labels_N)  # type: ignore[no-untyped-call]
    return loss


def _rows_of_logits(weight_VD: Tensor) -> int:
    """Return the number of tokens whose logits are in memory at a time."""
    most = CHUNK_LOGITS.get(weight_VD.device.type, CHUNK_LOGITS["cpu"])
    return max(1, most // len(weight_VD))


class _SummedCrossEntropy(torch.autograd.Function):
    @staticmethod
    @override
    def forward(ctx: Any, x_MD: Tensor, weight_VD: Tensor, labels_M: Tensor) -> Tensor:
        with_grad = any(ctx.needs_input_grad)
        grad_x_MD = torch.empty_like(x_MD)
        grad_weight_VD = torch.zeros_like(weight_VD)
        total = torch.zeros((), dtype=torch.float64, device=x_MD.device)
        size = _rows_of_logits(weight_VD)
        # Sums of exponentials over a vocabulary need more bits than BF16 has.
        wide = torch.promote_types(x_MD.dtype, torch.float32)
        for start in range(0, len(x_MD), size):
            rows = slice(start, start + size)
            x_CD, labels_C1 = x_MD[rows], labels_M[rows].unsqueeze(1)
            logits_CV = (x_CD @ weight_VD.t()).to(wide)
            # Log-softmax by hand, in place, so that only one array of logits is ever alive.
            logits_CV -= logits_CV.amax(-1, keepdim=True)
            picked_C1 = logits_CV.gather(1, labels_C1)
            logits_CV.exp_()
            sums_C1 = logits_CV.sum(-1, keepdim=True)
            total += (sums_C1.log() - picked_C1).double().sum()
            if with_grad:
                logits_CV /= sums_C1
                logits_CV.scatter_add_(1, labels_C1, torch.full_like(picked_C1, -1.0))
                grad_CV = logits_CV.to(x_MD.dtype)
                torch.mm(grad_CV, weight_VD, out=grad_x_MD[rows])
                grad_weight_VD.addmm_(grad_CV.t(), x_CD)
        # Gradients in place of logits, because tokens and the matrix are smaller than tokens by vocabulary.
        ctx.save_for_backward(grad_x_MD, grad_weight_VD)
        return total

    @staticmethod
    @override
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        grad_x_MD, grad_weight_VD = ctx.saved_tensors
        scale = grad.to(grad_x_MD.dtype)
        return grad_x_MD * scale, grad_weight_VD * scale, None


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelOutput:
    """Losses of one microbatch, summed over this rank's tokens; divide them by the labels of the whole step."""

    token_loss: Tensor
    """Cross entropy summed over labels, float64."""
    balance_loss: Tensor
    """Balance loss of each row times the labels in it, summed; mean over layers."""
    z_loss: Tensor
    """z-loss of each row times the labels in it, summed; mean over layers."""
    router: RouterFigures
    """Load of the experts."""


class MoETransformer(nn.Module):
    """A decoder of routed-expert layers over packed documents.

    Its parameters are float32, or the type that they are converted to; it computes in ``dtype``.
    """

    def __init__(
        self,
        config: MoEConfig,
        *,
        seed: int = 0,
        peers: Peers = ALONE,
        transport: TransportName = "a2a",
        dtype: torch.dtype | None = None,
    ) -> None:
        """Make a model with first weights.

        Args:
            config: Its shape.
            seed: Decides the weights, which are equal whatever ranks share them.
            peers: The ranks that share its layers; this rank holds some of the experts.
            transport: How tokens come to their experts.
            dtype: Type to compute in; ``None`` for that of the parameters.
        """
        super().__init__()
        self.config, self.peers, self.dtype = config, peers, dtype
        # Only memory: the weights are drawn below, or come from a folder.
        self.embedding_VD = nn.Parameter(torch.empty(config.vocab_size, config.dim))
        self.blocks = nn.ModuleList(
            Block(config, peers, transport) for _ in range(config.num_layers)
        )
        self.norm = RMSNorm(config.dim, config.norm_epsilon)
        if not config.tied_embeddings:
            self.output_VD = nn.Parameter(torch.empty(config.vocab_size, config.dim))
        # On ``meta`` there is nothing to set yet; the code that allocates the model draws the weights.
        if self.embedding_VD.device.type != "meta":
            self.draw_weights(seed)

    @torch.no_grad()
    def draw_weights(self, seed: int) -> None:
        """Set first weights; equal seeds give equal weights on every rank.

        Matrices that write into the residual stream are smaller by the root of their number, so that the stream's size
        does not grow with depth. A rank that keeps a part of a matrix draws all of it, one matrix at a time, and keeps
        its own part.
        """
        # On the CPU, wherever the model is, because a GPU's generator draws other numbers from the same seed.
        generator = torch.Generator().manual_seed(seed)
        into_stream = self.config.init_std / math.sqrt(2 * self.config.num_layers)
        # A model that was made on ``meta`` has arbitrary memory content until now.
        for buffer in self.buffers():
            buffer.zero_()
        for name, parameter in self.named_parameters():
            if parameter.ndim < 2:
                # Only weights of norms, because no layer has a bias to learn.
                parameter.fill_(1.0)
                continue
            writes = name.endswith(("attention.output.weight", "experts.fc2_EDF"))
            num = len(parameter) * (self.peers.size if is_of_experts(name) else 1)
            drawn = torch.empty(num, *parameter.shape[1:])
            drawn.normal_(0.0, into_stream if writes else self.config.init_std, generator=generator)
            self._keep(name, parameter, drawn)

    @torch.no_grad()
    def take_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Set weights that were trained before.

        Args:
            weights: Every parameter of the whole model by its name, in any order and type. One is in memory at a time;
                a rank keeps its own part of it.
        """
        missing = dict(self.named_parameters())
        for name, whole in weights:
            self._keep(name, missing.pop(name), whole)
        assert not missing, f"no weights were given for {', '.join(missing)}"

    def _keep(self, name: str, parameter: nn.Parameter, whole: Tensor) -> None:
        """Set this rank's part of a matrix, given the whole matrix."""
        # The whole first dimension even if sharded, because experts that peers divide are sharded along the second.
        held = len(parameter)
        first = self.peers.rank * held if is_of_experts(name) else 0
        parameter.copy_(part_of(whole[first : first + held].to(parameter.dtype), parameter))

    @property
    def head_VD(self) -> Tensor:
        """The output matrix."""
        return self.embedding_VD if self.config.tied_embeddings else self.output_VD

    @property
    def device(self) -> torch.device:
        """Device of the model."""
        return self.embedding_VD.device

    @property
    def takes_varlen(self) -> bool:
        """Whether its attention is a varlen kernel's."""
        dtype = self.dtype or self.embedding_VD.dtype
        return takes_varlen(self.device, dtype, self.config.head_dim)

    @property
    def units(self) -> tuple[nn.Module, ...]:
        """Parts that each pass goes through once, one after another; a sharded model gathers one part at a time."""
        return tuple(self.blocks)

    def inputs_of(self, microbatch: Microbatch | CpSlice, *, dealt: bool = True) -> ModelInputs:
        """Return a microbatch in the form that the model takes.

        Args:
            microbatch: One of a batch.
            dealt: Whether its plane serves the ranks of this model; otherwise it belongs to one rank, which needs no
                data-parallel peer for it.
        """
        del dealt  # used only for rows with images
        return ModelInputs.of(microbatch, self.peers, self.device, varlen=self.takes_varlen)

    def flops_beside(self, inputs: ModelInputs) -> float:  # noqa: ARG002 -- for subclasses with images
        """Return the FLOPs, forward and backward, that this rank spends on inputs other than tokens."""
        return 0.0

    def embedded(self, inputs: ModelInputs) -> Tensor:
        """Return the input of the layers, ``[N, D]``."""
        x_ND = functional.embedding(inputs.tokens_N, self.embedding_VD)
        return x_ND if self.dtype is None else x_ND.to(self.dtype)

    def hidden(self, inputs: ModelInputs) -> tuple[Tensor, list[Routing]]:
        """Return the normed last hidden states, ``[N, D]``, and each layer's routing."""
        x_ND = self.embedded(inputs)
        rotation = Rotation.at(
            inputs.positions_N,
            self.config.head_dim,
            self.config.rope_theta,
            torch.promote_types(x_ND.dtype, torch.float32),
        )
        routings = []
        for block in self.blocks:
            x_ND, routing = block(x_ND, rotation, inputs)
            routings.append(routing)
        normed_ND: Tensor = self.norm(x_ND)
        return normed_ND, routings

    def logits(self, inputs: ModelInputs) -> Tensor:
        """Return all logits, ``[N, V]``, for inspection and not for training."""
        x_ND = self.hidden(inputs)[0]
        return x_ND @ self.head_VD.to(x_ND.dtype).t()

    @torch.no_grad()
    def label_losses(self, inputs: ModelInputs) -> tuple[Tensor, Tensor]:
        """Return which tokens have a label, ``[M]``, and the cross entropy of each, ``[M]``, float64."""
        x_ND, _ = self.hidden(inputs)
        head_VD = self.head_VD.to(x_ND.dtype)
        labelled_M = inputs.labelled_L
        losses = []
        # In parts, as in training, because all logits at once are larger than anything else.
        for some_M in torch.split(labelled_M, _rows_of_logits(head_VD)):
            logits_MV = x_ND[some_M] @ head_VD.t()
            wide = torch.promote_types(logits_MV.dtype, torch.float32)
            losses.append(
                functional.cross_entropy(
                    logits_MV.to(wide), inputs.labels_N[some_M], reduction="none"
                ).double()
            )
        return labelled_M, torch.cat(losses)

    @override
    def forward(self, inputs: ModelInputs) -> ModelOutput:
        """Return the losses of one microbatch; each is a sum over tokens, whatever ranks share its rows."""
        x_ND, routings = self.hidden(inputs)
        losses = balance_losses(routings, inputs, self.peers, self.config.groups)
        return ModelOutput(
            token_loss=summed_cross_entropy(
                x_ND, self.head_VD.to(x_ND.dtype), inputs.labels_N, inputs.labelled_L
            ),
            balance_loss=losses.balance,
            z_loss=losses.z,
            router=figures_of(routings),
        )

    @torch.no_grad()
    def move_biases(self, slots_LE: Tensor) -> None:
        """Move the routers' biases, if they have any, by the load of a whole step."""
        if self.config.bias_rate == 0:
            return
        # In the order of the layers, like their counts.
        routers = [module for module in self.modules() if isinstance(module, Router)]
        for router, slots_E in zip(routers, slots_LE, strict=True):
            bias_E = router.bias_E
            assert bias_E is not None, "every router has one where its rate is above 0"
            # Totals are summed on the host.
            bias_E.copy_(moved_bias_E(bias_E, slots_E.to(bias_E.device), self.config.bias_rate))


def is_of_experts(name: str) -> bool:
    """Return whether a parameter, by its name, has one matrix for each expert; ranks divide such parameters."""
    return ".experts.fc" in name


def part_of(whole: Tensor, parameter: Tensor) -> Tensor:
    """Return the part of a parameter's values that this rank keeps; no rank sends any."""
    if not isinstance(parameter, DTensor):
        return whole
    mesh = parameter.device_mesh
    on_device = whole.to(parameter.device)
    return distribute_tensor(on_device, mesh, parameter.placements, src_data_rank=None)

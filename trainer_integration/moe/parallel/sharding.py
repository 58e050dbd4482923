"""Fully sharded data parallelism (FSDP2): a rank keeps one part of each parameter, its gradient and its averages.

A layer's parts are gathered from the data-parallel ranks just before it computes, and dropped after. Its gradients are
summed over the ranks after each microbatch, and each rank keeps only its own part::

    rank of dp 0    part 0 ┐ gather ┌ whole layer ─ forward ┐       ┌ gather ─ backward ┐ sum and scatter ┌ part 0
    rank of dp 1    part 1 ┘        └ whole layer ─ forward ┴ drop ─┴ gather ─ backward ┘                 └ part 1

Ranks gather together, so all of them make the same number of forward and backward passes in a step, including ranks
without a token.

Source:
    Zhao et al., "PyTorch FSDP", arXiv 2304.11277; Rajbhandari et al., "ZeRO", arXiv 1910.02054, stage 3.
"""

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import Shard

from trainer_integration.moe.model import MoETransformer, is_of_experts

__all__ = ["is_sharded", "shard_over"]


def shard_over(model: MoETransformer, mesh: DeviceMesh) -> None:
    """Shard a model in place, layer by layer; the parameters outside of layers are one more part.

    Matrices are cut along their first dimension. Experts that sequence-parallel peers have already cut along it are cut
    along their second dimension, which must be a multiple of the number of ranks.

    Args:
        model: On any device; on ``meta`` for a model that never exists whole, followed by ``to_empty`` and
            ``draw_weights``.
        mesh: The data-parallel ranks that train on other rows and have the same experts, in one dimension.
    """
    experts = {
        parameter
        for name, parameter in model.named_parameters()
        if model.peers.size > 1 and is_of_experts(name)
    }

    def placement(parameter: nn.Parameter) -> Shard:
        return Shard(1 if parameter in experts else 0)

    for module in (*model.units, model):
        fully_shard(module, mesh=mesh, shard_placement_fn=placement)
        assert isinstance(module, FSDPModule), "fully_shard makes it one"
        # Losses are divided by the labels of the whole step, so gradients are summed. Gloo has no other operation.
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)
    register_fsdp_forward_method(model, "label_losses")


def is_sharded(model: nn.Module) -> bool:
    """Return whether a model went through ``shard_over``."""
    return isinstance(model, FSDPModule)

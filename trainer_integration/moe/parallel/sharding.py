"""Fully sharded data parallelism (FSDP2): of each parameter, its gradient and its averages, a rank keeps one part.

A layer's parts are gathered from the data-parallel ranks just before it computes, and dropped after; its gradients
are summed over them and only the own part is kept, after each microbatch::

    rank of dp 0    part 0 ┐ gather ┌ whole layer ─ forward ┐       ┌ gather ─ backward ┐ sum and scatter ┌ part 0
    rank of dp 1    part 1 ┘        └ whole layer ─ forward ┴ drop ─┴ gather ─ backward ┘                 └ part 1

Ranks gather together, so they make as many forward and backward passes in a step, also those without a token.

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
    """Shard a model in place, layer by layer; what stands between the layers is one more part.

    Matrices are cut along their first dimension; experts that sequence-parallel peers have cut along that already,
    along their second, which must be a multiple of the ranks.

    Args:
        model: On any device; on ``meta`` for one that never exists whole: ``to_empty`` and ``draw_weights`` follow.
        mesh: The data-parallel ranks that train on other rows and hold the same experts, in one dimension.
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
        # Losses are divided by the labels of the whole step: gradients are summed. Gloo has no other operation.
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)
    register_fsdp_forward_method(model, "label_losses")


def is_sharded(model: nn.Module) -> bool:
    """Tell whether a model went through ``shard_over``."""
    return isinstance(model, FSDPModule)

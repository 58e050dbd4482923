"""The groups of a run: a mesh of ``dp`` by ``sp`` ranks.

The ranks of one row of the mesh share every layer: sequence parallelism deals them its tokens, expert parallelism its
experts. They have neighbouring numbers, so that they are on one host and the layer's traffic stays there. Ranks of one
column have the same experts, and train on other rows::

    dp 0   rank 0  rank 1     share the rows of dp 0
    dp 1   rank 2  rank 3     share the rows of dp 1
             |       |
          experts experts
          0 to 3  4 to 7
"""

from dataclasses import dataclass
from typing import Self

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from trainer_integration.moe.parallel.collectives import ALONE, Peers

__all__ = ["BACKENDS", "ProcessGroups"]

BACKENDS = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl"}
"""Backend by the device of the model. Figures of a step, sums of an evaluation and seals of a checkpoint are on the CPU
even if the model is not, and NCCL supports only tensors on GPUs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessGroups:
    """The groups that one rank is in."""

    mesh: DeviceMesh | None = None
    """``dp`` by ``sp``; ``None`` for a single rank."""
    world: dist.ProcessGroup | None = None
    """All ranks."""
    dp: dist.ProcessGroup | None = None
    """Ranks with the same experts."""
    sp: Peers = ALONE
    """Ranks that share every layer."""

    @classmethod
    def of(cls, dp: int, sp: int, device: str = "cpu") -> Self:
        """Make the mesh of an initialised process group; every rank calls it.

        Raises:
            ValueError: The group has another number of ranks.
        """
        size = dist.get_world_size()
        if dp * sp != size:
            raise ValueError(
                f"dp {dp} times sp {sp} is {dp * sp} and {size} ranks were started; start as many as the mesh has"
            )
        # The last dimension varies fastest, so peers have neighbouring ranks, which launchers place on one host.
        mesh = init_device_mesh(device, (dp, sp), mesh_dim_names=("dp", "sp"))
        peers = ALONE
        if sp > 1:
            peers = Peers(group=mesh.get_group("sp"), rank=mesh.get_local_rank("sp"), size=sp)
        return cls(mesh=mesh, world=dist.group.WORLD, dp=mesh.get_group("dp"), sp=peers)

    @property
    def dp_peers(self) -> Peers:
        """Ranks that train on other rows, as peers."""
        if self.mesh is None or self.mesh.size(0) == 1:
            return ALONE
        return Peers(group=self.dp, rank=self.mesh.get_local_rank("dp"), size=self.mesh.size(0))

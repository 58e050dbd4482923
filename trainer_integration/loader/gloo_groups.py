"""Gloo groups of our own among ranks of a job: the trainer's may move a device's memory."""

from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Protocol, cast

import torch
import torch.distributed as dist

from omniload.base.errors import UnavailableError

__all__ = ["GlooGroup", "met_group"]

_NEVER_S = 10 * 365 * 86_400
"""Limit of the group itself; waits have their own, after which they may be taken up again."""


class GlooGroup(Protocol):
    """What is used of torch's ``ProcessGroupGloo``, whose stubs leave it out; calls return while it is under way."""

    def broadcast(self, tensor: torch.Tensor, root: int) -> dist.Work:
        """Send the tensor of rank ``root`` to all."""
        ...

    def scatter(self, own: torch.Tensor, parts: list[torch.Tensor], root: int) -> dist.Work:
        """Send each rank its part of those of rank ``root``."""
        ...

    def allgather(self, parts: list[list[torch.Tensor]], own: list[torch.Tensor]) -> dist.Work:
        """Send the tensor of each rank to all."""
        ...

    def _set_default_timeout(self, timeout: timedelta) -> None: ...


_MET: list[GlooGroup] = []
"""Groups of this process, which are kept: one that ends while a wait of it was given up waits for that."""


def met_group(ranks: Sequence[int], rank: int, name: str, timeout_s: float) -> GlooGroup:
    """Meet the other ranks in a group of their own, in which they are numbered as they stand; see ``peers_of``."""
    store = dist.distributed_c10d._get_default_store()
    place = f"{name}/{'-'.join(map(str, ranks))}"
    # Not by ``new_group``: it names groups of a few ranks by how many a process has, so that a trainer with a group of
    # its first and last stage alone, as Megatron's, would have them wait for one another under different names.
    try:
        group: Any = dist.ProcessGroupGloo(
            dist.distributed_c10d.PrefixStore(place, store),
            ranks.index(rank),
            len(ranks),
            timedelta(seconds=timeout_s),
        )
    except (dist.DistError, RuntimeError) as error:
        raise UnavailableError(
            f"rank {rank} has not met ranks {list(ranks)}, of which the first serves the others, within {timeout_s:g} "
            "s; do they run, and do they call omniload.open as often as this rank?"
        ) from error
    # A broadcast that a slow step kept waiting would end the group for good; waits are bounded one by one.
    group._set_default_timeout(timedelta(seconds=_NEVER_S))
    _MET.append(group)
    return cast("GlooGroup", group)

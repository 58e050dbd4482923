"""Gloo groups of our own among ranks of a job, because the trainer's groups may move a device's memory."""

from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Protocol, cast

import torch
import torch.distributed as dist

from omniload.base.errors import UnavailableError

__all__ = ["GlooGroup", "met_group"]

_NEVER_S = 10 * 365 * 86_400
"""Limit of the group itself. Each wait has its own limit, after which it may be resumed."""


class GlooGroup(Protocol):
    """The used part of torch's ``ProcessGroupGloo``, which its stubs lack; calls return before they complete."""

    def broadcast(self, tensor: torch.Tensor, root: int) -> dist.Work:
        """Send the tensor of rank ``root`` to all ranks."""
        ...

    def scatter(self, own: torch.Tensor, parts: list[torch.Tensor], root: int) -> dist.Work:
        """Send each rank its part of the parts of rank ``root``."""
        ...

    def allgather(self, parts: list[list[torch.Tensor]], own: list[torch.Tensor]) -> dist.Work:
        """Send the tensor of each rank to all ranks."""
        ...

    def _set_default_timeout(self, timeout: timedelta) -> None: ...


_MET: list[GlooGroup] = []
"""Groups of this process, kept alive: after an abandoned wait, the end of a group would block until that completes."""


def met_group(ranks: Sequence[int], rank: int, name: str, timeout_s: float) -> GlooGroup:
    """Meet the other ranks in a group of their own, numbered by their order here; see ``peers_of``."""
    store = dist.distributed_c10d._get_default_store()
    place = f"{name}/{'-'.join(map(str, ranks))}"
    # ``new_group`` is not used: it names groups of a few ranks by how many groups a process has. With a trainer's group
    # of the first and last stage alone, as in Megatron, ranks would wait for each other under different names.
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
    # A broadcast delayed by a slow step would end the group for good, so each wait is bounded separately.
    group._set_default_timeout(timedelta(seconds=_NEVER_S))
    _MET.append(group)
    return cast("GlooGroup", group)

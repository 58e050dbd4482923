"""How ranks tell each other what their rollouts gave: one call, which all make and from which all return the same."""

import sys
from typing import Any, Protocol

from typing_extensions import override

from omniload.base.errors import ConfigError
from omniload.front.joining import torch_part

__all__ = ["AloneExchange", "Exchange", "exchange_for"]


class Exchange(Protocol):
    """The ranks along dp, over whatever the trainer's ranks speak by."""

    rank: int
    """This rank's number among them, from 0."""
    size: int
    """How many they are."""

    def all_gather(self, part: bytes) -> list[bytes]:
        """Give a part to all ranks, and return every rank's, in their order.

        Raises:
            UnavailableError: A rank does not come in time.
        """
        ...


class AloneExchange(Exchange):
    """One rank, which has nobody to tell."""

    rank, size = 0, 1

    @override
    def all_gather(self, part: bytes) -> list[bytes]:
        return [part]


def exchange_for(
    num_ranks: int, exchange: Exchange | None, process_group: object, timeout_s: float
) -> Exchange:
    """Return the exchange of a loader's ranks: the one given, torch's where it has a process group, or of one rank.

    Raises:
        ConfigError: There is none for these ranks, or it is of other ranks.
        UnavailableError: The other ranks do not come.
    """
    if exchange is None:
        exchange = _found(num_ranks, process_group, timeout_s)
    if exchange.size != num_ranks:
        raise ConfigError(
            f"the loader is of {num_ranks} ranks along dp, and the exchange among {exchange.size}; give the group of "
            'those that take other samples, process_group=mesh.get_group("dp")'
        )
    return exchange


def _found(num_ranks: int, process_group: object, timeout_s: float) -> Exchange:
    if num_ranks == 1 and process_group is None:
        return AloneExchange()
    distributed: Any = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_initialized():
        raise ConfigError(
            f"the loader is of {num_ranks} ranks, and there is no process group of torch for them to agree by; call "
            "init_process_group first, or give exchange="
        )
    found: Exchange = torch_part("exchange_of")(process_group, timeout_s)
    return found

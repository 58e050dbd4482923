"""The address of a plane: what a process needs to reach it, and which ranks there are.

An address is plain JSON, so it travels as any text does: on standard input, in a file, over
a key-value store.
"""

import operator
from collections.abc import Mapping
from pathlib import Path
from typing import SupportsIndex

import numpy as np

from omniload.base.config import StrictModel
from omniload.base.errors import ConfigError

__all__ = ["PlaneAddress", "check_rank"]


class PlaneAddress(StrictModel):
    """Where a data plane of Ray actors is, for the processes of its job, which inherit its token."""

    cluster: str
    """Host and port of its Ray."""
    namespace: str
    """Of its actors."""
    dp_ranks_of: dict[str, tuple[int, ...]]
    """Data-parallel ranks of each data constructor, by actor name."""
    cp_size: int = 1
    """Peers that share a data-parallel rank's rows."""
    steps_at_once: int = 1
    """Steps that are handed over together."""
    board: Path
    """Folder of the heartbeats."""
    batch_timeout_s: float
    """Longest that a rank waits for a batch unless it says otherwise."""

    @property
    def sizes(self) -> Mapping[str, int]:
        """Ranks along each axis that a handle is asked for by."""
        return {"dp": sum(map(len, self.dp_ranks_of.values())), "cp": self.cp_size}

    def constructor_of(self, dp_rank: int) -> str:
        """Return the name of the data constructor that serves a rank."""
        return next(name for name, ranks in self.dp_ranks_of.items() if dp_rank in ranks)


def check_rank(sizes: Mapping[str, int], dp_rank: object, cp_rank: object) -> tuple[int, int]:
    """Return a rank's place as whole numbers.

    Args:
        sizes: Ranks of the plane along ``dp`` and ``cp``.
        dp_rank: Place along dp, as the caller gave it: an integer of Python or of numpy.
        cp_rank: Place along cp.

    Raises:
        ConfigError: One of them is no integer, or the plane has no such rank.
    """
    return _place_on("dp", dp_rank, sizes["dp"]), _place_on("cp", cp_rank, sizes["cp"])


def _place_on(axis: str, rank: object, size: int) -> int:
    ranks = f"this plane has {axis} ranks 0 to {size - 1}"
    # A bool is an integer to Python, and never meant as a rank.
    if isinstance(rank, bool | np.bool_) or not isinstance(rank, SupportsIndex):
        raise ConfigError(
            f"{axis}_rank is {rank!r}, of type {type(rank).__name__}; {ranks}, give an integer"
        )
    place = operator.index(rank)
    if not 0 <= place < size:
        raise ConfigError(
            f"{axis}_rank is {place}; {ranks}, give one of them or open the plane for more"
        )
    return place

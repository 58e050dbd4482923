"""The address of a plane: everything that a process needs to reach it, and its ranks.

An address is plain JSON, so it can travel on standard input, in a file, or through a
key-value store.
"""

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import SupportsIndex

import numpy as np
from pydantic import Field

from omniload.base.config import StrictModel
from omniload.base.errors import ConfigError, UnavailableError
from omniload.machine.messages import ResizeAsked
from omniload.machine.progress import rank_name
from omniload.plan.world import World

__all__ = ["Gather", "Head", "HostPlace", "Hosts", "NodeTerms", "PlaneAddress", "check_rank"]


class HostPlace(StrictModel):
    """The node and the heartbeats of a plane on one host."""

    node: str
    """Number of its Ray's node there."""
    address: str
    """IP address of that node; empty if Ray finds its node by itself."""
    board: Path
    """Folder of the heartbeats of the host's roles and ranks."""


class NodeTerms(StrictModel):
    """How a rank that joins from another host gets a node of the plane's Ray there."""

    is_given: bool
    """Whether the Ray was given by the user, so that the host is part of it already."""
    bind: str
    """Where the node listens, as ``runtime.bind``."""
    ports: str
    """Ports of the node, as ``runtime.ports``."""
    store_bytes: int
    """Shared memory of the node."""


class Head(StrictModel):
    """Everything that a host needs to become part of a plane's Ray."""

    cluster: str
    """Host and port that nodes join."""
    namespace: str
    """Namespace of the plane's actors."""
    token: str | None
    """Secret of a private Ray; ``None`` for a given Ray, to which each host has its own access."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hosts:
    """The hosts of a plane, as its opener finds them."""

    host_of_R: Sequence[str]
    """Host of each data-parallel rank."""
    elsewhere: dict[str, HostPlace]
    """The plane's place on each host other than the opener's."""


Gather = Callable[[Head], Hosts]
"""Makes a node of every other host of a job join, and returns the hosts."""


class PlaneAddress(StrictModel):
    """The address of a data plane of Ray actors, for the processes of its job, which inherit its token."""

    cluster: str
    """Host and port of its Ray."""
    namespace: str
    """Namespace of its actors."""
    dp_ranks_of: dict[str, tuple[int, ...]]
    """Data-parallel ranks of each data constructor, by actor name."""
    cp_size: int = 1
    """Peers that share a data-parallel rank's rows."""
    steps_at_once: int = 1
    """Number of steps that are handed over together."""
    board: Path
    """Folder of the heartbeats on the opener's host."""
    node_address: str = "127.0.0.1"
    """IP address of the node on the opener's host; empty if Ray finds its node by itself."""
    host: str = ""
    """Number of the opener's host; empty if all ranks are on it."""
    elsewhere: dict[str, HostPlace] = Field(default_factory=dict)
    """The plane's place on other hosts, by their numbers."""
    home_roles: tuple[str, ...] = ("planner", "loader-0")
    """Roles on the opener's host that can report its heartbeats; two, because one may be lost at the moment."""
    host_of: dict[str, str] = Field(default_factory=dict)
    """Host of each data constructor that is not on the opener's."""
    lifeline: str = ""
    """Host and port of a connection that lasts as long as the opener lives; empty if no other host has a rank."""
    terms: NodeTerms | None = None
    """Terms for ranks that join from other hosts later; ``None`` if none can."""
    opener: tuple[int, str] = (0, "")
    """Process id of the opener, and the machine and namespace in which that id is valid."""
    logs: Path | None = None
    """Folder of the roles' logs; ``None`` for a plane without a run folder."""
    generation: int = 0
    """Generation of the ranks that join by this address; 0 for those that the plane was opened for."""
    ranks_stay: bool = False
    """Whether an ended rank is never replaced, as in a mix that is not elastic."""
    batch_timeout_s: float
    """Longest that a rank waits for a batch unless it says otherwise."""

    @property
    def sizes(self) -> Mapping[str, int]:
        """Number of ranks along each axis by which handles are requested."""
        return {"dp": sum(map(len, self.dp_ranks_of.values())), "cp": self.cp_size}

    def sizes_with(self, asked: ResizeAsked | None) -> Mapping[str, int]:
        """Return the sizes for other ranks; with ``None``, for the ranks that the plane was opened for."""
        return self.sizes if asked is None else {**self.sizes, "dp": asked.dp}

    def constructor_in(self, world: World, dp_rank: int) -> str:
        """Return the name of the data constructor that serves a rank of a later world."""
        names = list(self.dp_ranks_of)
        return names[world.constructor_of(dp_rank, len(names))]

    def on_host(self, host: str) -> tuple[str, Path]:
        """Return the IP address of the node of a host, and the folder of its heartbeats.

        Raises:
            UnavailableError: The plane has no node there.
        """
        if not self.elsewhere or host == self.host:
            return self.node_address, self.board
        if host not in self.elsewhere:
            raise UnavailableError(
                f"the data plane has no node on this host ({host}); call omniload.open on every host at the same time"
            )
        place = self.elsewhere[host]
        return place.address, place.board

    def with_node_on(self, host: str, place: HostPlace) -> "PlaneAddress":
        """Return the address for a rank that has brought its own node, on another host."""
        return self.model_copy(update={"elsewhere": {**self.elsewhere, host: place}})

    def node_of(self, constructor: str, opener: str) -> str:
        """Return the node of a data constructor; ``opener`` is the opener's node."""
        host = self.host_of.get(constructor)
        return opener if host is None else self.elsewhere[host].node

    def board_of(self, constructor: str) -> Path:
        """Return the folder of the heartbeats of a data constructor."""
        host = self.host_of.get(constructor)
        return self.board if host is None else self.elsewhere[host].board

    def roles_away_from(self, host: str) -> dict[str, tuple[str, ...]]:
        """Return roles of every other host, each of which can report the heartbeats of its host."""
        roles: dict[str, tuple[str, ...]] = {}
        if host != self.host:
            roles[self.host] = self.home_roles
        for name, there in self.host_of.items():
            if there != host:
                roles[there] = (*roles.get(there, ()), name)
        return roles if self.elsewhere else {}

    def waited_for_away_from(self, host: str) -> dict[str, tuple[str, ...]]:
        """Return the roles that others wait for on every other host, even if they were never heard."""
        found: dict[str, tuple[str, ...]] = {}
        for there, roles in self.roles_away_from(host).items():
            own = [n for n in self.dp_ranks_of if self.host_of.get(n, self.host) == there]
            # Only if constructors are next to their ranks, because ranks that come and go may be on any host.
            ranks = [r for n in own for r in self.dp_ranks_of[n]] if self.host_of else []
            names = [rank_name(r, cp, self.cp_size) for r in ranks for cp in range(self.cp_size)]
            found[there] = tuple(dict.fromkeys((*roles, *own, *names)))
        return found

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
    # A bool is an integer to Python, but never meant as a rank.
    if isinstance(rank, bool | np.bool_) or not isinstance(rank, SupportsIndex):
        raise ConfigError(
            f"{axis}_rank is {rank!r}, of type {type(rank).__name__}; {ranks}, give an integer"
        )
    # An integer of numpy becomes one of Python, which fits into JSON and gives a rank a single name.
    place = operator.index(rank)
    if not 0 <= place < size:
        raise ConfigError(
            f"{axis}_rank is {place}; {ranks}, give one of them or open the plane for more"
        )
    return place

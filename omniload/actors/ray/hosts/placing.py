"""Chooses the node of each member of a source loader; shadows are placed on other nodes than their loader's.

The first member of a role is placed on the opener's node, because with one node everything is there. Each further
member is placed on the node with the fewest members of its role, if other nodes have room. If a member did not become
ready on a node, the node gets no other member for a while: its data or its Python may be missing for good, or the node
was only too busy. After two such nodes in a row, shadows stay on the opener's node for as long. Each such pause is
twice the one before. After it, crowded shadows are spread again.

If the user says which nodes loaders may use, all members are spread over those. While none of those nodes lives,
members start on the opener's node, because ranks wait. A loader without shadows moves once such a node is back.
"""

import socket
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Self

from omniload.actors.ray.environment import ray
from omniload.actors.ray.hosts.bundles import node_at
from omniload.actors.ray.hosts.nodes import nodes_with_room, room_for
from omniload.base.log import get_logger
from omniload.machine.roster.members import Member
from omniload.mix.schema.places import LoaderPlaceConfig

__all__ = ["Placing", "host_here"]

_IN_VAIN = 2
"""Nodes in a row on which no member became ready; after this many, other nodes are not tried either."""
_ASTRAY = 2
"""Times in a row that a role's members are restarted immediately because Ray started them on another node."""
_FIRST_REST_S = 30.0
_LONGEST_REST_S = 3600.0
_LOOK_S = 30.0
"""Time between two looks for a better place; each look asks Ray for its nodes."""
_LOG = get_logger(__name__)


@dataclass(slots=True)
class _Rest:
    """A pause during which no member is started on a node. Each pause is twice the one before, up to an hour."""

    next_s: float = _FIRST_REST_S
    until_s: float = float("-inf")

    def begin(self, now_s: float) -> bool:
        """Begin a pause unless one is under way: many shadows start together and fail for the same reason."""
        if now_s < self.until_s:
            return False
        self.until_s, self.next_s = now_s + self.next_s, min(2 * self.next_s, _LONGEST_REST_S)
        return True


class Placing:
    """The nodes of the loaders of a plane. For one thread at a time."""

    def __init__(
        self,
        home: str,
        nodes_with_room: Callable[[], Sequence[str]],
        now_s: Callable[[], float] = time.monotonic,
        wanted: Callable[[], Mapping[str, int]] | None = None,
    ) -> None:
        """Begin without members.

        Args:
            home: Node of the opener.
            nodes_with_room: Returns the nodes that may have further members; called only for a role with a member.
            now_s: Monotonic clock, in seconds.
            wanted: Returns the nodes that all members must be on, each with its remaining room; ``None`` places first
                members at home.
        """
        self.home, self._nodes_with_room, self._now_s = home, nodes_with_room, now_s
        self._wanted = wanted
        self._node_of: dict[Member, str] = {}
        self._coming: dict[Member, str] = {}
        """Nodes of members whose process is not known yet. Ray may not have subtracted their resources there yet."""
        self._stranded: set[Member] = set()
        """Members at home because no wanted node lived."""
        self._sent: set[Member] = set()
        """Members that were to be on another node than the opener's, wherever Ray started them."""
        self._astray: Counter[str] = Counter()
        self._ready: set[Member] = set()
        self._rest_of: defaultdict[str, _Rest] = defaultdict(_Rest)
        self._rest_of_others = _Rest()
        """Pause of all nodes except the opener's."""
        self._in_vain = 0
        self._look_at_s = now_s() + _LOOK_S
        self._looked_for: Counter[str] = Counter()

    @classmethod
    def of(cls, home: str, wanted: LoaderPlaceConfig | None) -> Self:
        """Return the placing of a plane opened on a node of this process's Ray; ``wanted`` is the user's choice."""
        rooms = None if wanted is None else partial(room_for, wanted)
        return cls(home, nodes_with_room, wanted=rooms)

    def place(self, member: Member) -> str:
        """Return the node that a member is to be started on."""
        its = Counter(
            node_at(place) for each, place in self._node_of.items() if each.role == member.role
        )
        all_of = Counter(self._node_of.values())
        if self._wanted is not None:
            chosen = self._place_as_wanted(member, its, all_of)
        else:
            nodes = [self.home, *self._others()] if its else [self.home]
            # Ties go to the home node, which surely has the data that a first member reads.
            chosen = min(nodes, key=lambda node: (its[node], node != self.home, all_of[node]))
        # Noted before the process exists: the next member of the role is placed immediately, and must go elsewhere.
        self._node_of[member] = self._coming[member] = chosen
        if chosen != self.home:
            self._sent.add(member)
        return chosen

    def _place_as_wanted(self, member: Member, its: Counter[str], all_of: Counter[str]) -> str:
        rooms = self._rooms()
        if not rooms:
            self._stranded.add(member)
            _LOG.warning(
                "no node that runtime.place.loaders names is left in Ray: %s is started on the opener's node",
                member.name,
            )
            return self.home
        nodes = self._rested(rooms) or list(rooms)
        # If no node has room, the resources of a lost member will be free again in a moment.
        return min(
            nodes, key=lambda place: (rooms[place] <= 0, its[node_at(place)], all_of[place], place)
        )

    def _rooms(self) -> dict[str, int]:
        """Return the wanted nodes, each with its remaining room."""
        coming = Counter(self._coming.values())
        rooms = {} if self._wanted is None else self._wanted()
        return {node: room - coming[node] for node, room in rooms.items()}

    def _rested(self, nodes: Iterable[str]) -> list[str]:
        return [node for node in nodes if self._now_s() >= self._rest_of[node].until_s]

    def _others(self) -> list[str]:
        """Return the nodes, apart from the opener's, that may have a member now."""
        if self._now_s() < self._rest_of_others.until_s:
            return []
        return self._rested(node for node in self._nodes_with_room() if node != self.home)

    def _better(self) -> list[str]:
        """Return the nodes that a member may move to."""
        if self._wanted is None:
            return [self.home, *self._others()]
        return self._rested(node for node, room in self._rooms().items() if room > 0)

    def crowded(self) -> list[Member]:
        """Return members of one role that share a node or are stranded, while another node has none of the role.

        It looks at most twice a minute and for one role at a time, so that no node must start many processes at once.
        """
        if self._now_s() < self._look_at_s:
            return []
        self._look_at_s = self._now_s() + _LOOK_S
        where = Counter((member.role, node_at(place)) for member, place in self._node_of.items())
        sharing: dict[str, list[Member]] = {}
        for member in self._ready:
            if where[member.role, node_at(self._node_of[member])] > 1:
                sharing.setdefault(member.role, []).append(member)
        for member in self._ready & self._stranded:
            sharing.setdefault(member.role, []).append(member)
        nodes = list(map(node_at, self._better())) if sharing else []
        roles = [role for role in sharing if any(where[role, node] == 0 for node in nodes)]
        if not roles:
            return []
        chosen = min(roles, key=lambda role: (self._looked_for[role], role))
        self._looked_for[chosen] += 1
        return sharing[chosen]

    def is_astray(self, member: Member, node: str) -> bool:
        """Note where Ray started a member; return whether that is the wrong node, and worth another try.

        Ray starts a process on another node if the nodes do not know each other yet, or if one is gone.
        """
        self._coming.pop(member, None)
        asked = self._node_of.get(member, node)
        if node == node_at(asked):
            self._astray.pop(member.role, None)
            return False
        self._node_of[member] = node
        self._astray[member.role] += 1
        self._ready.add(member)  # the node is not to blame
        if self._astray[member.role] <= _ASTRAY:
            return True
        self._rest_of[asked].begin(self._now_s())
        return False

    def is_away(self, member: Member) -> bool:
        """Return whether a member that has not ended was to be started on another node than the opener's."""
        return member in self._sent

    def is_stranded(self, member: Member) -> bool:
        """Return whether a member is at home because no wanted node lived."""
        return member in self._stranded

    def away(self) -> list[Member]:
        """Return the members for which ``is_away`` is true."""
        return sorted(self._sent, key=lambda member: member.name)

    def stands_ready(self, member: Member) -> None:
        """Note that a member could open the sources it is to serve."""
        if member in self._node_of:  # and has not ended meanwhile
            self._ready.add(member)
        node = self._node_of.get(member, self.home)
        if node != self.home:
            self._in_vain = 0
            self._rest_of_others = _Rest()
            self._rest_of.pop(node, None)

    def end(self, member: Member, *, is_replaced: bool) -> None:
        """Note the end of a member; if it is replaced and never became ready, its node is avoided for a while."""
        node = self._node_of.get(member, self.home)
        if is_replaced and node != self.home and member not in self._ready:
            _LOG.warning("%s failed to start as a stand-by on node %s", member.name, node)
            now_s = self._now_s()
            self._in_vain += self._rest_of[node].begin(now_s)
            if self._in_vain >= _IN_VAIN:
                self._rest_of_others.begin(now_s)
        self._node_of.pop(member, None)
        self._coming.pop(member, None)
        for of in (self._ready, self._sent, self._stranded):
            of.discard(member)


def host_here() -> str:
    """Return the name that people use for this host: the address of its node or, on loopback, the host name."""
    address = str(ray.util.get_node_ip_address())  # type: ignore[no-untyped-call]
    return socket.gethostname() if address.startswith("127.") else address

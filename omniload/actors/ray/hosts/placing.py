"""Which node of Ray each member of a source loader is on: shadows on another than their loader, where one has room.

A first member is on the opener's node, as everything is where there is one node. One more is
where the fewest of its role are. A node on which a member did not come to stand by has no other
one for a while: its data or its Python may never be there, or it was only too busy. After two such nodes in a
row shadows stay at home for as long. Each while is twice the one before; then shadows that crowd are spread again.

Where a user says which nodes loaders are to be on, all members are spread over those. While none of them lives, the
opener's node has them, as ranks wait; a loader without shadows moves on once there is one again.
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
"""Nodes in a row on which no member came to stand by; others would do no better."""
_ASTRAY = 2
"""Times in a row that a role's members are started once more at once because Ray started them elsewhere."""
_FIRST_REST_S = 30.0
_LONGEST_REST_S = 3600.0
_LOOK_S = 30.0
"""Between two looks for a better place: Ray is asked which nodes it has."""
_LOG = get_logger(__name__)


@dataclass(slots=True)
class _Rest:
    """A time in which nobody is started somewhere; each is twice the one before, up to an hour."""

    next_s: float = _FIRST_REST_S
    until_s: float = float("-inf")

    def begin(self, now_s: float) -> bool:
        """Begin one, unless one is under way: shadows of many loaders are started at once, and fail for one reason."""
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
        """Begin with nobody.

        Args:
            home: Node of the opener.
            nodes_with_room: Returns the nodes that may have further members; asked only where a role has one already.
            now_s: Seconds of a clock that never goes back.
            wanted: Returns the nodes that all members are to be on, each with for how many more it has room; ``None``
                has first members at home.
        """
        self.home, self._nodes_with_room, self._now_s = home, nodes_with_room, now_s
        self._wanted = wanted
        self._node_of: dict[Member, str] = {}
        self._coming: dict[Member, str] = {}
        """Those whose process is not known yet, with their nodes: Ray may not count there what they ask for."""
        self._stranded: set[Member] = set()
        """Those at home as no node that was wanted lived."""
        self._sent: set[Member] = set()
        """Those that were to be on another node than the opener's, wherever they are."""
        self._astray: Counter[str] = Counter()
        self._ready: set[Member] = set()
        self._rest_of: defaultdict[str, _Rest] = defaultdict(_Rest)
        self._rest_of_others = _Rest()
        """That of all nodes but the opener's."""
        self._in_vain = 0
        self._look_at_s = now_s() + _LOOK_S
        self._looked_for: Counter[str] = Counter()

    @classmethod
    def of(cls, home: str, wanted: LoaderPlaceConfig | None) -> Self:
        """Return the placing of a plane that was opened on a node of this process's Ray; ``wanted`` is the user's."""
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
            # At home rather than anywhere else where that is equal: what a first member reads is surely there.
            chosen = min(nodes, key=lambda node: (its[node], node != self.home, all_of[node]))
        # Noted before it is there: the next of its role is placed at once, and is to be elsewhere.
        self._node_of[member] = self._coming[member] = chosen
        if chosen != self.home:
            self._sent.add(member)
        return chosen

    def _place_as_wanted(self, member: Member, its: Counter[str], all_of: Counter[str]) -> str:
        rooms = self._rooms()
        if not rooms:
            self._stranded.add(member)
            _LOG.warning(
                "no node of Ray is left that runtime.place.loaders names: %s is started on the opener's node",
                member.name,
            )
            return self.home
        nodes = self._rested(rooms) or list(rooms)
        # Where there is no room anywhere, what a lost member had there is given back in a moment.
        return min(
            nodes, key=lambda place: (rooms[place] <= 0, its[node_at(place)], all_of[place], place)
        )

    def _rooms(self) -> dict[str, int]:
        """Return the nodes that are wanted, each with for how many more it has room."""
        coming = Counter(self._coming.values())
        rooms = {} if self._wanted is None else self._wanted()
        return {node: room - coming[node] for node, room in rooms.items()}

    def _rested(self, nodes: Iterable[str]) -> list[str]:
        return [node for node in nodes if self._now_s() >= self._rest_of[node].until_s]

    def _others(self) -> list[str]:
        """Return the nodes beside the opener's that may have a member now."""
        if self._now_s() < self._rest_of_others.until_s:
            return []
        return self._rested(node for node in self._nodes_with_room() if node != self.home)

    def _better(self) -> list[str]:
        """Return the nodes that a member may move to."""
        if self._wanted is None:
            return [self.home, *self._others()]
        return self._rested(node for node, room in self._rooms().items() if room > 0)

    def crowded(self) -> list[Member]:
        """Return members of one role that share a node, or are stranded, while another has none of it; mostly nobody.

        It looks twice a minute at most, and for one role after the other: no node is asked for many processes at once.
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
        """Note where Ray has started a member; tell whether that is not where it was to be, and worth another try.

        Ray sends a process elsewhere where the nodes do not know of each other yet, or one is gone.
        """
        self._coming.pop(member, None)
        asked = self._node_of.get(member, node)
        if node == node_at(asked):
            self._astray.pop(member.role, None)
            return False
        self._node_of[member] = node
        self._astray[member.role] += 1
        self._ready.add(member)  # no node is to blame
        if self._astray[member.role] <= _ASTRAY:
            return True
        self._rest_of[asked].begin(self._now_s())
        return False

    def is_away(self, member: Member) -> bool:
        """Tell whether a member was to be started on another node than the opener's, and has not ended."""
        return member in self._sent

    def is_stranded(self, member: Member) -> bool:
        """Tell whether a member is at home as no node that was wanted lived."""
        return member in self._stranded

    def away(self) -> list[Member]:
        """Return the members of which that holds."""
        return sorted(self._sent, key=lambda member: member.name)

    def stands_ready(self, member: Member) -> None:
        """Note that a member could open what it is to serve."""
        if member in self._node_of:  # and has not ended meanwhile
            self._ready.add(member)
        node = self._node_of.get(member, self.home)
        if node != self.home:
            self._in_vain = 0
            self._rest_of_others = _Rest()
            self._rest_of.pop(node, None)

    def end(self, member: Member, *, is_replaced: bool) -> None:
        """Note the end of a member; where it is replaced and never stood ready, its node is left alone for a while."""
        node = self._node_of.get(member, self.home)
        if is_replaced and node != self.home and member not in self._ready:
            _LOG.warning("%s did not come to stand by on node %s", member.name, node)
            now_s = self._now_s()
            self._in_vain += self._rest_of[node].begin(now_s)
            if self._in_vain >= _IN_VAIN:
                self._rest_of_others.begin(now_s)
        self._node_of.pop(member, None)
        self._coming.pop(member, None)
        for of in (self._ready, self._sent, self._stranded):
            of.discard(member)


def host_here() -> str:
    """Return the name that people know this host by: the address of its node, on loopback alone the host's own name."""
    address = str(ray.util.get_node_ip_address())  # type: ignore[no-untyped-call]
    return socket.gethostname() if address.startswith("127.") else address

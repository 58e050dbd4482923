"""Which node of Ray each member of a source loader is on: shadows on another than their loader, where there is one.

A first member is on the opener's node, as everything is where there is one node. One more is
where the fewest of its role are. A node on which a member did not come to stand by, as its data or
its Python are not there, has no other one; after two such nodes in a row shadows stay at home.
"""

from collections import Counter
from collections.abc import Callable, Sequence

from omniload.base.log import get_logger
from omniload.machine.lost_roles import Member

__all__ = ["Placing"]

_IN_VAIN = 2
"""Nodes in a row on which no member came to stand by; others would do no better."""
_ASTRAY = 2
"""Times in a row that a role's members are started once more because Ray started them elsewhere."""
_LOG = get_logger(__name__)


class Placing:
    """The nodes of the loaders of a plane. For one thread at a time."""

    def __init__(self, home: str, nodes_with_room: Callable[[], Sequence[str]]) -> None:
        """Begin with nobody.

        Args:
            home: Node of the opener.
            nodes_with_room: Returns the nodes that may have further members; asked only where a role has one already.
        """
        self.home, self._nodes_with_room = home, nodes_with_room
        self._node_of: dict[Member, str] = {}
        self._sent: set[Member] = set()
        """Those that were to be on another node than the opener's, wherever they are."""
        self._astray: Counter[str] = Counter()
        self._ready: set[Member] = set()
        self._shunned: set[str] = set()
        self._in_vain = 0

    def place(self, member: Member) -> str:
        """Return the node that a member is to be started on."""
        its = Counter(node for each, node in self._node_of.items() if each.role == member.role)
        nodes = [self.home]
        if its and self._in_vain < _IN_VAIN:
            nodes += [
                n for n in self._nodes_with_room() if n != self.home and n not in self._shunned
            ]
        all_of = Counter(self._node_of.values())
        chosen = min(nodes, key=lambda node: (its[node], node != self.home, all_of[node]))
        self._node_of[member] = chosen
        if chosen != self.home:
            self._sent.add(member)
        return chosen

    def is_astray(self, member: Member, node: str) -> bool:
        """Note where Ray has started a member; tell whether that is not where it was to be, and worth another try.

        Ray sends a process elsewhere where the nodes do not know of each other yet, or one is gone.
        """
        asked = self._node_of.get(member, node)
        if node == asked:
            self._astray.pop(member.role, None)
            return False
        self._node_of[member] = node
        self._astray[member.role] += 1
        self._ready.add(member)  # no node is to blame
        return self._astray[member.role] <= _ASTRAY

    def is_away(self, member: Member) -> bool:
        """Tell whether a member was to be started on another node than the opener's, and has not ended."""
        return member in self._sent

    def away(self) -> list[Member]:
        """Return the members of which that holds."""
        return sorted(self._sent, key=lambda member: member.name)

    def stands_ready(self, member: Member) -> None:
        """Note that a member could open what it is to serve."""
        if member in self._node_of:  # and has not ended meanwhile
            self._ready.add(member)
        if self._node_of.get(member, self.home) != self.home:
            self._in_vain = 0

    def end(self, member: Member, *, is_replaced: bool) -> None:
        """Note the end of a member; where it is replaced and never stood ready, its node is not tried again."""
        node = self._node_of.get(member, self.home)
        if is_replaced and node != self.home and member not in self._ready:
            self._shunned.add(node)
            self._in_vain += 1
            _LOG.warning(
                "%s did not come to stand by on node %s: no shadow is there", member.name, node
            )
        self._node_of.pop(member, None)
        self._ready.discard(member)
        self._sent.discard(member)

"""Chooses the nodes of data constructors whose ranks come and go: the node of the ranks, if they share one.

A rank reports its node to the planner when it joins a world (``RanksOn``). If all ranks of a constructor are on one
node and the constructor is on another, the keeper moves the constructor (``Moves``). The keeper starts it on the new
node first and then tells it what to build, as it does for the successor of a lost constructor.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from omniload.machine.roster.members import Member

__all__ = ["Moves", "RanksOn"]

_TRIES, _AGAIN_S = 5, 30.0
"""Longer than Ray takes to notice that a host is gone. Until then, Ray would wait for that host."""


class RanksOn:
    """The nodes of the ranks of one world."""

    def __init__(self) -> None:
        """Begin without ranks."""
        self._generation = 0
        self._node_of: dict[int, str] = {}

    def note(self, dp_rank: int, generation: int, node: str) -> None:
        """Note the node of a rank. A rank of an earlier world is ignored because it is about to leave."""
        if generation > self._generation:
            self._generation, self._node_of = generation, {}
        if generation == self._generation:
            self._node_of[dp_rank] = node

    def of(self, ranks_of: Sequence[Sequence[int]], generation: int) -> list[str | None]:
        """Return the node of each constructor's ranks: ``""`` for several nodes, ``None`` while one is unknown."""
        known = self._node_of if generation == self._generation else {}
        found: list[str | None] = []
        for ranks in ranks_of:
            nodes = {known.get(rank) for rank in ranks}
            is_known = bool(nodes) and None not in nodes
            found.append((nodes.pop() if len(nodes) == 1 else "") if is_known else None)
        return found


@dataclass(slots=True)
class _Tries:
    """The remaining starts of a constructor on a node, which may be gone or may lack a working Python."""

    node: str
    generation: int
    """Generation of the ranks that the constructor moves to."""
    left: int = _TRIES
    again_s: float = float("-inf")


class Moves:
    """The nodes of constructors that are not on the plane's home node. For one thread at a time."""

    def __init__(self, home: str, now_s: Callable[[], float] = time.monotonic) -> None:
        """Begin with every member on the node ``home``; ``now_s`` is a monotonic clock."""
        self._home, self._now_s = home, now_s
        self._next: dict[str, str] = {}
        self._tries: dict[str, _Tries] = {}
        self._node_of: dict[Member, str] = {}

    def place(self, member: Member) -> str:
        """Return the node to start a member on: the new node if its role is moving, else home.

        The member that follows a lost one starts at home: Ray may not have noticed yet that a host is gone, and would
        wait for it.
        """
        node = self._node_of[member] = self._next.pop(member.role, self._home)
        if node != self._home:
            self._tries[member.role].left -= 1
        return node

    def wanted(
        self, holders: Mapping[str, Member], generation: int, nodes: Mapping[str, str | None]
    ) -> list[Member]:
        """Return the holders that are to move, and note the node on which the next member of each role will start.

        Args:
            holders: Holder of each role.
            generation: Generation of the ranks.
            nodes: Node of each constructor's ranks, as returned by ``RanksOn.of``.
        """
        found = []
        for role, theirs in nodes.items():
            node = theirs or self._home
            self._next.pop(role, None)
            if theirs is None or self._node_of.get(holders[role], self._home) == node:
                continue
            tries = self._tries.get(role)
            if tries is None or (tries.node, tries.generation) != (node, generation):
                tries = self._tries[role] = _Tries(node, generation)
            if tries.left and self._now_s() >= tries.again_s:
                self._next[role] = node
                found.append(holders[role])
        return found

    def stay(self, role: str) -> None:
        """Forget the move of a role for which no member was started; the role's next member starts at home."""
        self._next.pop(role, None)

    def away(self) -> list[Member]:
        """Return the members that are not on the home node."""
        return [member for member, node in self._node_of.items() if node != self._home]

    def forget(self, member: Member) -> None:
        """Note the end of a member."""
        if self._node_of.pop(member, self._home) != self._home:
            self._tries[member.role].again_s = self._now_s() + _AGAIN_S

"""Which node the data constructors of ranks that come and go are to be on: that of their ranks, where it is one.

Ranks say where they are as they become part of a world (``RanksOn``, with the planner). The keeper has a constructor
move whose ranks are all on another node than it (``Moves``); it is started there first, and then told what to build,
as one that takes the place of a lost one.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from omniload.machine.roster.members import Member

__all__ = ["Moves", "RanksOn"]

_TRIES, _AGAIN_S = 5, 30.0
"""Longer than Ray takes to know that a host is gone: until then it would wait for it."""


class RanksOn:
    """The nodes of the ranks of one world."""

    def __init__(self) -> None:
        """Begin with no rank."""
        self._generation = 0
        self._node_of: dict[int, str] = {}

    def note(self, dp_rank: int, generation: int, node: str) -> None:
        """Note where a rank is; one of a world that is over is on its way out."""
        if generation > self._generation:
            self._generation, self._node_of = generation, {}
        if generation == self._generation:
            self._node_of[dp_rank] = node

    def of(self, ranks_of: Sequence[Sequence[int]], generation: int) -> list[str | None]:
        """Return the one node of the ranks of each constructor; ``""`` for several, ``None`` while it is not known."""
        known = self._node_of if generation == self._generation else {}
        found: list[str | None] = []
        for ranks in ranks_of:
            nodes = {known.get(rank) for rank in ranks}
            is_known = bool(nodes) and None not in nodes
            found.append((nodes.pop() if len(nodes) == 1 else "") if is_known else None)
        return found


@dataclass(slots=True)
class _Tries:
    """How often a constructor may yet be started on a node, which may be gone, or have no Python that does."""

    node: str
    generation: int
    """Of the ranks for which it is to be there."""
    left: int = _TRIES
    again_s: float = float("-inf")


class Moves:
    """The nodes of the constructors of a plane that are not where it was opened. For one thread at a time."""

    def __init__(self, home: str, now_s: Callable[[], float] = time.monotonic) -> None:
        """Begin with everybody on the node ``home``; ``now_s`` is a clock that never goes back."""
        self._home, self._now_s = home, now_s
        self._next: dict[str, str] = {}
        self._tries: dict[str, _Tries] = {}
        self._node_of: dict[Member, str] = {}

    def place(self, member: Member) -> str:
        """Return the node that a member is to be started on: its new one where it moves, else home.

        The member after a lost one is at home: Ray may not know yet that a host is gone, and would wait for it.
        """
        node = self._node_of[member] = self._next.pop(member.role, self._home)
        if node != self._home:
            self._tries[member.role].left -= 1
        return node

    def wanted(
        self, holders: Mapping[str, Member], generation: int, nodes: Mapping[str, str | None]
    ) -> list[Member]:
        """Return the holders that are to move, each to the node where the next of its role is placed.

        Args:
            holders: Of all roles.
            generation: Of the ranks.
            nodes: Of the ranks of each constructor, as ``RanksOn.of`` returns them.
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
        """Forget the move of a role for which nobody was started, as others were being: who follows next is at home."""
        self._next.pop(role, None)

    def away(self) -> list[Member]:
        """Return the members that are not at home."""
        return [member for member, node in self._node_of.items() if node != self._home]

    def forget(self, member: Member) -> None:
        """Note the end of a member."""
        if self._node_of.pop(member, self._home) != self._home:
            self._tries[member.role].again_s = self._now_s() + _AGAIN_S

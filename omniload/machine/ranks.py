"""Which step each rank wants next."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Self

__all__ = ["Rank", "RankSteps"]

Rank = tuple[int, int]
"""A rank by its place along dp and cp."""


@dataclass(slots=True, kw_only=True)
class RankSteps:
    """The next step of every rank, and of the slowest."""

    _wanted: dict[Rank, int]
    """Next step of every rank."""
    _ranks_at: Counter[int]
    """How many ranks want each step next: the slowest is found without looking at all of them."""
    slowest: int
    """The step that the slowest rank wants next."""

    @classmethod
    def at(cls, ranks: Iterable[Rank], step: int) -> Self:
        """Return ranks that all want ``step``."""
        wanted = dict.fromkeys(ranks, step)
        return cls(_wanted=wanted, _ranks_at=Counter(wanted.values()), slowest=step)

    def take(self, rank: Rank, step: int) -> bool:
        """Note that a rank has a step; return whether the slowest rank has come further."""
        before, slowest = self._wanted[rank], self.slowest
        if step < before:
            return False
        self._wanted[rank] = step + 1
        self._ranks_at[step + 1] += 1
        self._ranks_at[before] -= 1
        while not self._ranks_at[self.slowest]:
            del self._ranks_at[self.slowest]
            self.slowest += 1
        return self.slowest > slowest

    def late(self) -> list[Rank]:
        """Return the ranks that want the slowest's step."""
        return [rank for rank, wanted in self._wanted.items() if wanted == self.slowest]

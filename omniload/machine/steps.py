"""Progress of the ranks: the step that each of them wants next, as planner and data constructors know it."""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Self

from omniload.base.errors import IntegrityError
from omniload.base.units import counted
from omniload.machine.messages import RanksLost, StepsTaken, StepTaken
from omniload.machine.progress import Waits, rank_name

__all__ = ["Rank", "RankSteps", "RanksTold"]

Rank = tuple[int, int]
"""A rank, by its coordinates along dp and cp."""


@dataclass(slots=True, kw_only=True)
class RankSteps:
    """The next step of every rank, and that of the slowest rank."""

    _wanted: dict[Rank, int]
    """Next step of every rank."""
    _ranks_at: Counter[int]
    """How many ranks want each step next, so that the slowest is found without looking at all ranks."""
    slowest: int
    """The step that the slowest rank wants next."""
    unheard: set[Rank] = field(default_factory=set)
    """Ranks that have reported nothing to this planner yet; they may be further along, as they told a lost planner."""
    _lost: set[Rank] = field(default_factory=set)
    """Lost ranks that never reported to this planner; they count as having taken every step planned by then."""

    @classmethod
    def at(cls, ranks: Iterable[Rank], step: int, *, taken_over: bool = False) -> Self:
        """Return ranks that all want ``step`` next; after a take-over they may want a later one."""
        wanted = dict.fromkeys(ranks, step)
        unheard = set(wanted) if taken_over else set()
        return cls(
            _wanted=wanted, _ranks_at=Counter(wanted.values()), slowest=step, unheard=unheard
        )

    def hear(self, event: StepTaken | StepsTaken | RanksLost, planned: int) -> bool:
        """Apply an event of ranks; return whether the slowest rank has advanced.

        A planner that is wrongly believed dead may hear of steps from ``planned`` on, which its successor planned. Its
        ranks have then taken every step of its own.

        Raises:
            IntegrityError: A rank's first report to a planner that took over names a step that nobody has planned. The
                journal must have lost its end, because every step was durable before any rank heard of it.
        """
        match event:
            case StepTaken(step=step, dp_rank=dp_rank, cp_rank=cp_rank):
                return self._hear({(dp_rank, cp_rank): step}, planned)
            case StepsTaken(steps=steps):
                return self._hear(steps, planned)
            case RanksLost(ranks=ranks):
                return self.lose(ranks, planned)

    def _hear(self, steps: Mapping[Rank, int], planned: int) -> bool:
        last = planned - 1
        for rank, step in steps.items():
            if step > last and rank in self.unheard:
                cp_size = 1 + max(cp_rank for _, cp_rank in self._wanted)
                raise IntegrityError(
                    f"{rank_name(*rank, cp_size)} has taken step {step}, and the run's journal, which this planner "
                    f"took over, ends before step {planned}: durable records are gone; check its disk or store, and "
                    "start again from the last checkpoint"
                )
        # ``sum`` and not ``any``: every report must be noted, also after the first that returns true.
        return sum(self.take(rank, min(step, last)) for rank, step in steps.items()) > 0

    def take(self, rank: Rank, step: int) -> bool:
        """Note that a rank has taken a step; return whether the slowest rank has advanced."""
        self.unheard.discard(rank)
        if rank in self._lost:
            # The rank lives after all; steps that were released meanwhile are gone.
            self._lost.remove(rank)
            return self._want(rank, max(step + 1, self.slowest))
        # To a planner that takes over, ranks repeat what they took.
        return step >= self._wanted[rank] and self._want(rank, step + 1)

    def lose(self, ranks: Iterable[Rank], planned: int) -> bool:
        """Stop waiting for lost ranks among the unheard; return whether the slowest rank has advanced.

        A lost rank may have taken any step before ``planned``, and the other ranks wait at the step in which it ended.
        So it counts as having taken all steps before ``planned``; if it counted as having taken none, the others would
        never get that step. From ``planned`` on it holds the others up, like any lost rank.

        If no rank is left, nothing tells how far they were, and every step that they may take again is kept.
        """
        lost = self.unheard & set(ranks)
        if len(lost) + len(self._lost) == len(self._wanted):
            return False
        self.unheard -= lost
        self._lost |= lost
        slowest = self.slowest
        for rank in lost:
            self._want(rank, planned)
        return self.slowest > slowest

    def _want(self, rank: Rank, step: int) -> bool:
        """Note which step a rank wants next; return whether the slowest rank has advanced."""
        before, slowest = self._wanted[rank], self.slowest
        self._wanted[rank] = step
        self._ranks_at[step] += 1
        self._ranks_at[before] -= 1
        if not self._ranks_at[before]:
            del self._ranks_at[before]
            self.slowest = min(self._ranks_at)
        return self.slowest > slowest

    def taken(self) -> dict[Rank, int]:
        """Return the last step of each rank that has reported one."""
        return {r: wanted - 1 for r, wanted in self._wanted.items() if r not in self.unheard}

    def are_ahead(self, told: StepsTaken) -> bool:
        """Return whether all ranks of a data constructor are ahead of the slowest, so that no plan waits for them."""
        return told.is_whole and all(step >= self.slowest for step in told.steps.values())

    def __contains__(self, rank: Rank) -> bool:
        return rank in self._wanted

    def late(self) -> list[Rank]:
        """Return the ranks that want the same step as the slowest."""
        return [rank for rank, wanted in self._wanted.items() if wanted == self.slowest]

    def waits(self, planned: int, cp_size: int, together: int) -> Waits:
        """Return which ranks hold up a planner that has planned every step before ``planned``.

        Ranks report steps that are handed over together once, with the last of them. Until then they may be further
        ahead than this planner knows.
        """
        late, ahead = self.late(), planned - self.slowest
        who = f"{counted(len(late), 'rank')} that {'has' if len(late) == 1 else 'have'} not"
        text = f"is {counted(ahead, 'step')} ahead of {who} taken step {self.slowest}"
        if together > 1:
            text = (
                f"is {counted(ahead, 'step')} or less ahead of {who} reported step {self.slowest} yet: they report "
                f"once in {together} steps"
            )
        return Waits(
            text=text,
            ranks=tuple(rank_name(*rank, cp_size) for rank in late),
        )


@dataclass(slots=True, kw_only=True)
class RanksTold:
    """Collects in a data constructor which steps its ranks took, so that the planner hears them in one message.

    The planner polls, each time with the number of the last report that it has heard. A planner that takes over has
    heard none, and gets all of them.
    """

    generation: int
    """Generation of the ranks."""
    number: int
    """Number of the last report; it keeps rising when the ranks change."""
    _ranks: RankSteps
    _further: int
    """Number of the last report with which the slowest of the ranks advanced."""

    @classmethod
    def of(cls, ranks: Iterable[Rank], generation: int = 0, number: int = 0) -> Self:
        """Begin with ranks that have reported nothing; ``number`` continues that of earlier ranks."""
        steps = RankSteps.at(ranks, 0, taken_over=True)
        return cls(generation=generation, number=number, _ranks=steps, _further=number)

    def hear(self, taken: StepTaken) -> bool:
        """Note a report; return whether it is dealt with, because the planner will hear it or it is of earlier ranks.

        A rank that is not served here, or not yet, reports to the planner itself.
        """
        rank = taken.dp_rank, taken.cp_rank
        if taken.generation != self.generation or rank not in self._ranks:
            return taken.generation < self.generation
        self.number += 1
        if self._ranks.take(rank, taken.step):
            self._further = self.number
        return True

    def is_due(self, heard: int) -> bool:
        """Return whether a planner that has heard ``heard`` reports should get the later ones now.

        It should if the slowest rank has advanced, because steps can be planned then, or if it has heard nothing.
        Otherwise the reports of some ranks can wait for those of the others.
        """
        return self._further > heard or self.number > heard == 0

    def taken(self) -> StepsTaken:
        """Return the last step of each rank, as one message."""
        steps, is_whole = self._ranks.taken(), not self._ranks.unheard
        return StepsTaken(steps=steps, generation=self.generation, is_whole=is_whole)

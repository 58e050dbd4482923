"""Progress of the run: the step that each rank wants next, and the step before which bad records end the run.

Shape suffixes:
    S  sources
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Self

import numpy as np
from numpy.typing import NDArray

from omniload.base.errors import IntegrityError, OmniloadError
from omniload.base.units import counted
from omniload.machine.messages import RanksLost, StepsTaken, StepTaken
from omniload.machine.progress import Waits, rank_name
from omniload.machine.queue import SampleQueue
from omniload.mix.edits.history import History
from omniload.mix.state import MixState

__all__ = [
    "BadRecords",
    "Rank",
    "RankSteps",
    "RanksTold",
]

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


@dataclass(slots=True, kw_only=True)
class BadRecords:
    """Counts undecodable records as steps pass them, and decides when ``on_error`` ends the run.

    Only the order of the mix matters. So a run ends before the same step after any kills, moves and resumes, however
    far loaders had read ahead. Each epoch is counted anew, because it holds the same records. If two sources have too
    many in one step, either may be named.
    """

    queues: Sequence[SampleQueue]
    """Known samples of each source; the list grows as sources are added."""
    over: dict[int, IntegrityError] = field(default_factory=dict)
    """Error of each source with more known bad records than allowed. It ends the run before a step that needs more of
    the source than is known, because such a step passes all of these records."""
    excess: OmniloadError | None = None
    """Why there is no further step; also set where a step is refused for another reason."""
    _sources: set[int] = field(default_factory=set)
    """Sources that may have bad records, usually few; only these are looked at."""
    _revision: int = -1
    """Revision of the mix at the last look."""

    def update(
        self, changed: Iterable[int], history: History, state: MixState, records_S: Sequence[int]
    ) -> None:
        """Determine anew which of the changed sources are ``over``.

        Steps do not change the answer, because the state counts the records that they pass. Edits may change it for any
        source, as they leave out shards.
        """
        if state.mix_revision != self._revision:
            self._revision, changed = state.mix_revision, range(len(self.queues))
        for s in changed:
            known_N = self.queues[s].table.bad_N
            if len(known_N) or state.bad_of(s):
                self._sources.add(s)
            if s in self._sources:
                self.over.pop(s, None)
                if (excess := self._excess(history, s, state, known_N, records_S[s])) is not None:
                    self.over[s] = excess

    def pass_step(
        self, history: History, before: MixState, after: MixState, records_S: Sequence[int]
    ) -> tuple[dict[int, int], MixState]:
        """Pass the bad records of a step; return how many each source has, and the state after the step.

        If a source has more than ``on_error`` allows, ``excess`` is set and the step must not be published.
        """
        passed, counts = dict[int, int](), dict[int, int]()
        for s in sorted(self._sources):
            # A source that is read ahead of its edit has no cursor yet.
            if s >= len(after.cursors_S) or after.cursors_S[s] == before.cursors_S[s]:
                continue
            position, records = after.cursors_S[s][0], records_S[s]
            passed_N = self.queues[s].bad_before(position)
            if len(passed_N):
                passed[s] = len(passed_N)
            elif s not in self.over and before.cursors_S[s][0] // records == position // records:
                continue  # the usual case
            if s in self.over and self.excess is None:
                self.excess = self._excess(history, s, before, passed_N, records)
            epoch, known = position // records, before.bad_of(s)
            if before.cursors_S[s][0] // records == epoch:
                counts[s] = known + len(passed_N)
            else:
                counts[s] = len(passed_N) - int(passed_N.searchsorted(epoch * records))
        # With an excess the step is not published, and an edit may still change its content.
        for s in passed if self.excess is None else ():
            self.queues[s].pass_to(after.cursors_S[s][0])
        if after.bad_S != before.bad_S:  # these are the counts at the beginning of its window
            after = replace(after, bad_S=before.bad_S)
        return passed, after.with_bad(counts)

    def _excess(
        self,
        history: History,
        source: int,
        before: MixState,
        known_N: NDArray[np.int64],
        records: int,
    ) -> IntegrityError | None:
        """Return the error of a source with too many bad records, if it has.

        Args:
            history: The mix and its edits.
            source: Number of the source.
            before: A state.
            known_N: Raw positions of the bad records after it.
            records: Records of an epoch.
        """
        name = history.latest.names[source]
        declared = history.latest.sources.get(name)
        if declared is None:
            return None
        allowed = declared.on_error.most_of(records)
        of_epoch = _by_epoch(before, source, known_N, records)
        epoch = min((each for each, count in of_epoch.items() if count > allowed), default=None)
        if epoch is None:
            return None
        # The first excess in the order of the mix, so that it is the same however far loaders had read.
        own_N = known_N[known_N // records == epoch]
        at = allowed - (of_epoch[epoch] - len(own_N))
        table = self.queues[source].table
        # After an edit that lowers the limit, the record may be one that was logged long ago.
        place = table.place_of(int(own_N[at])) if at >= 0 else ""
        reason = table.reason or "told in the log as it was left out"
        return declared.on_error.excess(name, records, reason, place)


def _by_epoch(
    before: MixState, source: int, passed_N: NDArray[np.int64], records: int
) -> Counter[int]:
    """Count bad records by epoch: those after a state, plus earlier ones of the state's own epoch."""
    counts = Counter((passed_N // records).tolist())
    if known := before.bad_of(source):
        counts[before.cursors_S[source][0] // records] += known
    return counts

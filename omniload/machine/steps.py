"""Steps of a run: which one each rank wants next, and when bad records end them.

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
    unheard: set[Rank] = field(default_factory=set)
    """Ranks that have told this planner nothing yet; they may be further than it knows, as a lost planner had heard."""
    _lost: set[Rank] = field(default_factory=set)
    """Lost ranks that this planner never heard of: they count as having taken every step that was planned by then."""

    @classmethod
    def at(cls, ranks: Iterable[Rank], step: int, *, taken_over: bool = False) -> Self:
        """Return ranks that all want ``step``, or where another planner led them, that or a later one."""
        wanted = dict.fromkeys(ranks, step)
        unheard = set(wanted) if taken_over else set()
        return cls(
            _wanted=wanted, _ranks_at=Counter(wanted.values()), slowest=step, unheard=unheard
        )

    def hear(self, event: StepTaken | StepsTaken | RanksLost, planned: int) -> bool:
        """Apply an event of ranks; return whether the slowest rank has come further.

        A planner that is believed dead, and lives, may hear of steps from ``planned`` on, which the next one planned:
        of its own they have taken all.

        Raises:
            IntegrityError: A rank's first word to a planner that took over is of a step that nobody has planned: the
                journal has lost its end. Every step was on its disk or store before any rank was told of it.
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
                    f"took over, ends before step {planned}: records that were durable are gone; look after its disk "
                    "or store, and start again from the last checkpoint"
                )
        # All of them are noted, whatever the first one brings.
        return sum(self.take(rank, min(step, last)) for rank, step in steps.items()) > 0

    def take(self, rank: Rank, step: int) -> bool:
        """Note that a rank has taken a step; return whether the slowest rank has come further."""
        self.unheard.discard(rank)
        if rank in self._lost:
            # It lives after all; steps that were released meanwhile are gone.
            self._lost.remove(rank)
            return self._want(rank, max(step + 1, self.slowest))
        # Ranks repeat what they took to a planner that takes over.
        return step >= self._wanted[rank] and self._want(rank, step + 1)

    def lose(self, ranks: Iterable[Rank], planned: int) -> bool:
        """Stop waiting for lost ranks among the unheard; return whether the slowest rank has come further.

        A lost rank may have taken any step before ``planned``, and the others wait at the step in which it ended.
        It counts as having taken all of them: counted at the first, it would keep the others from that very step.
        From ``planned`` on it holds the others up, as any lost rank does.

        Where no rank is left, nothing says how far they were, and every step that they may take again is kept.
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
        """Note what a rank wants next; return whether the slowest rank has come further."""
        before, slowest = self._wanted[rank], self.slowest
        self._wanted[rank] = step
        self._ranks_at[step] += 1
        self._ranks_at[before] -= 1
        if not self._ranks_at[before]:
            del self._ranks_at[before]
            self.slowest = min(self._ranks_at)
        return self.slowest > slowest

    def taken(self) -> dict[Rank, int]:
        """Return the last step of each rank that has told one."""
        return {r: wanted - 1 for r, wanted in self._wanted.items() if r not in self.unheard}

    def are_ahead(self, told: StepsTaken) -> bool:
        """Tell whether all ranks of a data constructor are ahead of the slowest: no plan waits for their next word."""
        return told.is_whole and all(step >= self.slowest for step in told.steps.values())

    def __contains__(self, rank: Rank) -> bool:
        return rank in self._wanted

    def late(self) -> list[Rank]:
        """Return the ranks that want the slowest's step."""
        return [rank for rank, wanted in self._wanted.items() if wanted == self.slowest]

    def waits(self, planned: int, cp_size: int, together: int) -> Waits:
        """Say which ranks a planner waits for that has planned every step before ``planned``.

        Of steps that are handed over together, ranks tell once, with the last. Until then they may be further ahead
        than is known here.
        """
        late, ahead = self.late(), planned - self.slowest
        who = f"{counted(len(late), 'rank')} that {'has' if len(late) == 1 else 'have'} not"
        text = f"is {counted(ahead, 'step')} ahead of {who} taken step {self.slowest}"
        if together > 1:
            text = (
                f"is {counted(ahead, 'step')} or less ahead of {who} told yet of step {self.slowest}: "
                f"they tell once in {together} steps"
            )
        return Waits(
            text=text,
            ranks=tuple(rank_name(*rank, cp_size) for rank in late),
        )


@dataclass(slots=True, kw_only=True)
class RanksTold:
    """What ranks have told their data constructor that they took, for the planner to hear in one message.

    The planner asks again and again, each time with the number of the last word that it has heard. One that takes over
    has heard none, and is answered with all of them.
    """

    generation: int
    """Of the ranks."""
    number: int
    """Of the last word; it rises on over worlds."""
    _ranks: RankSteps
    _further: int
    """The last word with which the slowest of the ranks came further."""

    @classmethod
    def of(cls, ranks: Iterable[Rank], generation: int = 0, number: int = 0) -> Self:
        """Return what is known of ranks that have told nothing, where so many words were told of others."""
        steps = RankSteps.at(ranks, 0, taken_over=True)
        return cls(generation=generation, number=number, _ranks=steps, _further=number)

    def hear(self, taken: StepTaken) -> bool:
        """Note a word; return whether that is the end of it: the planner hears it, or it is of ranks of before.

        A rank that is not served here, or not yet, tells the planner itself.
        """
        rank = taken.dp_rank, taken.cp_rank
        if taken.generation != self.generation or rank not in self._ranks:
            return taken.generation < self.generation
        self.number += 1
        if self._ranks.take(rank, taken.step):
            self._further = self.number
        return True

    def is_due(self, heard: int) -> bool:
        """Tell whether a planner that has heard so many words waits for those behind them.

        It does where the slowest has come further, which steps are planned for, or where it has heard nothing. Else
        what some have told may wait for the others.
        """
        return self._further > heard or self.number > heard == 0

    def taken(self) -> StepsTaken:
        """Return all that is told."""
        steps, is_whole = self._ranks.taken(), not self._ranks.unheard
        return StepsTaken(steps=steps, generation=self.generation, is_whole=is_whole)


@dataclass(slots=True, kw_only=True)
class BadRecords:
    """Counts the records that steps go past and that could not be decoded, and says when ``on_error`` ends the run.

    It goes by the order of the mix alone. A run therefore ends before the same step after any kills, moves and resumes,
    whatever loaders had read ahead. It counts each epoch anew, for the next one holds the same records. Where two
    sources have too many in one step, either is named.
    """

    queues: Sequence[SampleQueue]
    """What is known of each source; grows as sources are added."""
    over: dict[int, IntegrityError] = field(default_factory=dict)
    """Error of each source with more known bad records than allowed. It ends the run at a step that needs more of the
    source than is known: such a step goes past all of them."""
    excess: OmniloadError | None = None
    """Why there is no further step, once that is known; also of a step that is refused for another reason."""
    _sources: set[int] = field(default_factory=set)
    """Sources that may have bad records, a few of hundreds; only these are looked at."""
    _revision: int = -1
    """Revision of the mix that they were looked at under."""

    def update(
        self, changed: Iterable[int], history: History, state: MixState, records_S: Sequence[int]
    ) -> None:
        """Find again which of the sources that have changed are ``over``.

        Steps do not change the answer: what they go past is in the state from then on. Edits may, as they leave out
        other shards, of any source.
        """
        if state.mix_revision != self._revision:
            self._revision, changed = state.mix_revision, range(len(self.queues))
        for s in changed:
            known_N = self.queues[s].table.bad_N
            if len(known_N) or state.bad_of(s):
                self._sources.add(s)
            if s in self._sources:
                self.over.pop(s, None)
                if (excess := self._excess(history, s, (state, known_N), records_S[s])) is not None:
                    self.over[s] = excess

    def pass_step(
        self, history: History, before: MixState, after: MixState, records_S: Sequence[int]
    ) -> tuple[dict[int, int], MixState]:
        """Go past the bad records of a step: return how many of each source, none left out, and the state after it.

        Where a source has more than ``on_error`` allows, ``excess`` says so from then on, and the step is not taken.
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
                continue  # as most steps of most sources are
            if s in self.over and self.excess is None:
                self.excess = self._excess(history, s, (before, passed_N), records)
            epoch, known = position // records, before.bad_of(s)
            if before.cursors_S[s][0] // records == epoch:
                counts[s] = known + len(passed_N)
            else:
                counts[s] = len(passed_N) - int(passed_N.searchsorted(epoch * records))
        # With an excess the step is not taken: an edit may yet change what is in it.
        for s in passed if self.excess is None else ():
            self.queues[s].pass_to(after.cursors_S[s][0])
        if after.bad_S != before.bad_S:  # those that its window began with
            after = replace(after, bad_S=before.bad_S)
        return passed, after.with_bad(counts)

    def _excess(
        self,
        history: History,
        source: int,
        gone_by: tuple[MixState, NDArray[np.int64]],
        records: int,
    ) -> IntegrityError | None:
        """Return what ends the run where a source has too many, by the state before some and those that follow."""
        name = history.latest.names[source]
        declared = history.latest.sources.get(name)
        if declared is None:
            return None
        before, known_N = gone_by
        allowed = declared.on_error.most_of(records)
        of_epoch = _by_epoch(before, source, known_N, records)
        epoch = min((each for each, count in of_epoch.items() if count > allowed), default=None)
        if epoch is None:
            return None
        # By the order of the mix: whatever was read ahead, and by how many loaders, it is the same one.
        own_N = known_N[known_N // records == epoch]
        at = allowed - (of_epoch[epoch] - len(own_N))
        table = self.queues[source].table
        # Behind a lower limit of an edit it may be one that was told of long ago.
        place = table.place_of(int(own_N[at])) if at >= 0 else ""
        reason = table.reason or "told in the log as it was left out"
        return declared.on_error.excess(name, records, reason, place)


def _by_epoch(
    before: MixState, source: int, passed_N: NDArray[np.int64], records: int
) -> Counter[int]:
    """Count bad records by epoch: those after a state, and in its own epoch those before it too."""
    counts = Counter((passed_N // records).tolist())
    if known := before.bad_of(source):
        counts[before.cursors_S[source][0] // records] += known
    return counts

"""Which sources are read further ahead than others: those of which a read takes longer than some plans last.

A plan waits for a read that takes longer than what was known when it was asked for lasts. Such a source is read ahead
by what its own reads take, counted in steps that go by meanwhile. So its slow samples are read, in their order, while
earlier ones are trained on; which samples are in a step is the same however far it is read::

    steps of 10 ms      1  2  3  4  5  6  7  8  9 10 11 12 13 14 15 ...
    a read of 100 ms    ├── of samples of step 15 on ────┤                asked for while 14 steps' worth are known

A source that is read all the time is not: nothing is gained where its reads cannot get ahead.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from omniload.machine.scaling.coming import PLANS_READ_AHEAD, Demand, Pace, Weighed
from omniload.machine.scaling.measured import OVER
from omniload.mix.edits.history import History
from omniload.mix.state import MixState

__all__ = ["Leads", "ReadTimes"]

_MOST_PLANS = 64
"""So far a source is read ahead whose reads take their time: what is known of it is copied as more is reported."""
_LEAD_OVER = 1.25
"""Times the longest read: a pace is measured, and the longest read so far need not be the longest of all."""
_CALM_READS = 64
"""Reads in a row, none of which took half as long, until a source is read less far ahead: a slow sample now and then,
and a block that is fetched once for many reads, belong to what a source is."""
_SLOW_S = 0.05
"""A read that took less holds nobody up, however many steps went by: ahead of small ones more are built."""
_AVERAGE_S = 30.0


@dataclass(slots=True)
class _Reads:
    """Of one source, lately: older seconds count for less and less."""

    heard_s: float
    """When the last one was answered."""
    read_s: float = 0.0
    passed_s: float = 0.0

    def end(self, took_s: float, now_s: float) -> None:
        """Add a read that was answered now."""
        passed_s = now_s - self.heard_s
        left = math.exp(-passed_s / _AVERAGE_S)
        self.read_s = left * self.read_s + took_s
        self.passed_s = left * self.passed_s + passed_s
        self.heard_s = now_s


@dataclass(slots=True)
class ReadTimes:
    """What a planner's reads take, in steps that go by meanwhile; one read of a source at a time.

    From the question to the answer, whatever the time is spent on: a loader may be reading other sources first.
    """

    _pace: Pace = field(default_factory=Pace, init=False)
    _of: dict[int, _Reads] = field(default_factory=dict, init=False)

    def reach(self, step: int, now_s: float) -> None:
        """Note that samples are read for a step by now."""
        self._pace.reach(step, now_s)

    def steps_of(self, source: int, asked_s: float, now_s: float) -> float:
        """Return the steps of a read that is answered now.

        Args:
            source: The source.
            asked_s: When it was asked for, by a clock that never goes back.
            now_s: By that clock.

        Returns:
            0 for a quick one, of a source that is read all the time, and while the pace is not known.
        """
        took_s = now_s - asked_s
        reads = self._of.setdefault(source, _Reads(heard_s=asked_s))
        reads.end(took_s, now_s)
        if took_s < _SLOW_S or reads.read_s > OVER * reads.passed_s:
            return 0.0
        return self._pace.steps_in(took_s)


@dataclass(slots=True)
class _Lead:
    """How far one source is read ahead, in plans."""

    plans: int = PLANS_READ_AHEAD
    _calm_reads: int = field(default=0, init=False)
    """Since one that took more than half of that."""
    _calm_plans: int = field(default=0, init=False)
    """That the longest of these would have it read ahead."""

    def note(self, wanted: int) -> None:
        """Take a read into account that ``wanted`` plans would have been enough for."""
        self._calm_reads += 1
        self._calm_plans = max(self._calm_plans, wanted)
        if 2 * wanted > self.plans:
            self.plans = max(self.plans, wanted)
        elif self._calm_reads >= _CALM_READS:
            self.plans = self._calm_plans
        else:
            return
        self._calm_reads = self._calm_plans = 0


@dataclass(slots=True)
class Leads:
    """How far ahead the sources of a planner are read."""

    _of: dict[int, _Lead] = field(default_factory=dict, init=False)
    """Of sources that are read further ahead than others: few, or none."""

    def note(self, source: int, took_plans: float) -> None:
        """Take in how many plans' worth of steps went by while a read of a source was waited for."""
        wanted = math.ceil(_LEAD_OVER * took_plans) + 1  # one is drawn before more is asked for
        if wanted <= PLANS_READ_AHEAD and source not in self._of:
            return
        lead = self._of.setdefault(source, _Lead())
        lead.note(min(max(wanted, PLANS_READ_AHEAD), _MOST_PLANS))
        if lead.plans == PLANS_READ_AHEAD:
            del self._of[source]

    def demand(
        self, history: History, state: MixState, steps: int, known_S: Sequence[Weighed]
    ) -> Demand:
        """Return what steps demand, with the targets of such sources raised within the room that others leave.

        Args:
            history: The mix and its edits.
            state: That before the steps.
            steps: How many.
            known_S: What is known of each source, those that later edits add included.
        """
        demand = Demand.of(history, state, steps, len(known_S))
        more = {s: _further(demand.targets_S[s], lead.plans) for s, lead in self._of.items()}
        if not (tokens := sum(more.values())):
            return demand
        # What every source takes at most: of heavy samples no more than its room.
        taken_S = [
            min(room, 2 * target * known.token_bytes)
            for room, target, known in zip(demand.room_S, demand.targets_S, known_S, strict=True)
        ]
        left = sum(demand.room_S) - sum(taken_S)
        targets_S, room_S = list(demand.targets_S), list(demand.room_S)
        for s, further in more.items():
            targets_S[s] += further
            room_S[s] = taken_S[s] + left * further / tokens
        return replace(demand, targets_S=targets_S, room_S=room_S)


def _further(target: int, plans: int) -> int:
    """Return the tokens that so many plans draw beside those of a target."""
    return target * (plans - PLANS_READ_AHEAD) // PLANS_READ_AHEAD

"""Leads: how much further ahead sources with slow reads are read.

A plan has to wait for a read that takes longer than the known samples last. A source with such reads is read further
ahead, by the duration of its own reads in steps of the job. So its slow samples are read, in their order, while earlier
ones are trained on. The samples of a step do not depend on how far a source is read::

    steps of 10 ms      1  2  3  4  5  6  7  8  9 10 11 12 13 14 15 ...
    a read of 100 ms    ├── samples of step 15 and later ┤                requested while 14 steps' worth are known

A source that is being read all the time gets no lead, because its reads could not get ahead anyway.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from omniload.machine.scaling.coming import PLANS_READ_AHEAD, Demand, Pace, Weighed
from omniload.machine.scaling.measured import OVER
from omniload.mix.edits.history import History
from omniload.mix.state import MixState

__all__ = ["Leads", "ReadPace"]

_MOST_PLANS = 64
"""Longest lead, in plans; it is bounded because all known samples of a source are copied with each report."""
_LEAD_OVER = 1.25
"""Factor on the longest read, because the pace is measured and a longer read may still come."""
_CALM_READS = 64
"""A lead shrinks after this many consecutive reads that took less than half as long. A slow sample now and then, and a
block that is fetched once for many reads, are normal for a source."""
_SLOW_S = 0.05
"""A shorter read holds nothing up, however many steps it takes, because more of such small steps are built ahead."""
_AVERAGE_S = 30.0


@dataclass(slots=True)
class _Reads:
    """Recent reads of one source; older seconds weigh less."""

    heard_s: float
    """Time of the last answer."""
    read_s: float = 0.0
    passed_s: float = 0.0

    def end(self, took_s: float, now_s: float) -> None:
        """Add a read that was answered at ``now_s``."""
        passed_s = now_s - self.heard_s
        left = math.exp(-passed_s / _AVERAGE_S)
        self.read_s = left * self.read_s + took_s
        self.passed_s = left * self.passed_s + passed_s
        self.heard_s = now_s


@dataclass(slots=True)
class ReadPace:
    """Durations of the planner's reads in steps of the job; each source has one read at a time.

    A read lasts from the request to the answer, whatever happens in between: a loader may read other sources first.
    """

    _pace: Pace = field(default_factory=Pace, init=False)
    _of: dict[int, _Reads] = field(default_factory=dict, init=False)

    def reach(self, step: int, now_s: float) -> None:
        """Note the step for which samples are being read by now."""
        self._pace.reach(step, now_s)

    def steps_of(self, source: int, asked_s: float, now_s: float) -> float:
        """Return the duration in steps of a read that is answered now.

        Args:
            source: The source.
            asked_s: Time of the request, of a monotonic clock.
            now_s: The current time of that clock.

        Returns:
            0 for a quick read, for a source that is being read all the time, and while the pace is unknown.
        """
        took_s = now_s - asked_s
        reads = self._of.setdefault(source, _Reads(heard_s=asked_s))
        reads.end(took_s, now_s)
        if took_s < _SLOW_S or reads.read_s > OVER * reads.passed_s:
            return 0.0
        return self._pace.steps_in(took_s)


@dataclass(slots=True)
class _Lead:
    """The lead of one source, in plans."""

    plans: int = PLANS_READ_AHEAD
    _calm_reads: int = field(default=0, init=False)
    """Reads since the last one that needed more than half of the lead."""
    _calm_plans: int = field(default=0, init=False)
    """The lead that the longest of these reads would need."""

    def note(self, wanted: int) -> None:
        """Add a read for which a lead of ``wanted`` plans would have been enough."""
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
    """The leads of a planner's sources."""

    _of: dict[int, _Lead] = field(default_factory=dict, init=False)
    """Leads of the few sources that have one."""

    def note(self, source: int, took_plans: float) -> None:
        """Add a read of a source, by its duration in plans."""
        wanted = math.ceil(_LEAD_OVER * took_plans) + 1  # one plan is drawn before the request
        if wanted <= PLANS_READ_AHEAD and source not in self._of:
            return
        lead = self._of.setdefault(source, _Lead())
        lead.note(min(max(wanted, PLANS_READ_AHEAD), _MOST_PLANS))
        if lead.plans == PLANS_READ_AHEAD:
            del self._of[source]

    def demand(
        self, history: History, state: MixState, steps: int, known_S: Sequence[Weighed]
    ) -> Demand:
        """Return the demand of steps, with the targets of slow sources raised as far as memory allows.

        Args:
            history: The mix and its edits.
            state: The state before the steps.
            steps: Number of steps.
            known_S: The known samples of each source, including sources that later edits add.
        """
        demand = Demand.of(history, state, steps, known_S)
        more = {s: _further(demand.targets_S[s], lead.plans) for s, lead in self._of.items()}
        if not (tokens := sum(more.values())):
            return demand
        # The most that each source takes, which is its room if its samples are heavy.
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
    """Return the tokens that ``plans`` further plans draw in addition to those of a target."""
    return target * (plans - PLANS_READ_AHEAD) // PLANS_READ_AHEAD

"""The number of readers of each source of a loader in a running job: enough to keep up with the draws of the mix.

The signal is the share of the time in which a read of the source is under way. A planner that has enough
of a source requests nothing. One that cannot plan without it requests more as soon as a read is answered,
and the time until that request counts as well::

    share of the time that a source is read
      0.85 ──  above it for 20 s, by readers that had a core to read with: half as many again, one at least
      0.60 ──  readers that bring the share down to this are kept; if fewer would do for 2 minutes, the others go

Added readers must make reads quicker. Otherwise they are removed again, and no others are tried for an
hour; this happens for a source whose blocks have a single unit, or on a machine without a free core.
If the mix is known to draw more of a source within a minute (``scaling.coming``), its readers come
before: as many as it keeps busy now, times the growth of its share.
Each change of a source is paid from an allowance that grows slowly, so a mix that swings does not make
readers come and go. No reader is removed while the allowance is too small to add as many again as there
ever were. Otherwise, with a trainer that is alternately quick and slow, its quick steps would wait.
"""

import math
from dataclasses import dataclass, field

from omniload.machine.scaling.coming import Ahead, Pace
from omniload.machine.scaling.measured import CORE, OVER, UNDER_S, Followed, Reading

__all__ = ["ReadBegun", "ReadEnded", "ReaderScaler", "ReadersWanted", "TimePassed"]

_WORTH = 0.25
"""Fraction of the expected gain that added readers must bring."""
_GROWTH = 1.5
_OVER_S = 20.0
_SETTLE_S = 30.0
"""Time from one change to the next, so that all measurements are of the current readers."""
_JUDGED_S = 10.0
"""Seconds of ended reads before readers are judged by them."""
_LIKE = 0.9
"""Added readers are judged only while the busiest one gets at least this fraction of the core time of before."""
_PATIENT_S = 120.0
"""Time in which a slow store may recover."""
_TRIED_S = 3600.0
_AHEAD_S = 60.0
"""How long before a rise its readers are added, because they have to start and open the source."""
_LOOK_S = 1.0
_PAUSE_S = 5.0
"""Longest time without a read that counts: in a pause of the trainer no source is drawn from."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TimePassed:
    """Time has passed; the loader got a message other than a read."""

    now_s: float
    """Time of a monotonic clock."""
    ahead: Ahead | None = None
    """The planner's view of coming steps, if the message came from the planner."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadBegun:
    """A read of a source begins; each source has one read at a time."""

    now_s: float
    source: int
    is_lacked: bool = False
    """Whether the planner cannot plan without it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadEnded:
    """The read of a source has ended, successfully or not."""

    now_s: float
    source: int
    busy_s: float
    """Processor seconds of the busiest of its readers."""
    tokens: int
    readers: int
    """Readers that took part; fewer than wanted while some are still opening the source."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadersWanted:
    """Use this many readers of a source from its next read on, including its loader."""

    source: int
    readers: int
    why: str
    is_ahead: bool = False
    """Whether to start them now instead of with the next read, because they will be needed soon."""


@dataclass(slots=True, kw_only=True)
class ReaderScaler:
    """Decides for the sources of one loader; sources with a fixed number of readers are only observed."""

    cores: int
    """Cores of the machine; the loader and all further readers together are at most as many."""
    most: int
    """Most readers of one source."""
    _followed: dict[int, Followed] = field(default_factory=dict, init=False)
    _given: dict[int, Followed] = field(default_factory=dict, init=False)
    _looked_s: float | None = field(default=None, init=False)
    _ahead: Ahead | None = field(default=None, init=False)
    _pace: Pace = field(default_factory=Pace, init=False)

    def follow(self, source: int, readers: int, *, is_given: bool) -> None:
        """Begin to follow a source with this many readers; a given number stays."""
        (self._given if is_given else self._followed)[source] = Followed(readers)

    def forget(self, source: int) -> None:
        """Stop following a source, because another loader serves it."""
        self._given.pop(source, None)
        self._followed.pop(source, None)

    @property
    def readings_S(self) -> dict[int, Reading]:
        """How each source is read, with its wanted number of readers."""
        return {
            s: Reading(
                readers=each.readers,
                share=each.sums.share,
                core=each.sums.core,
                for_step=each.ahead_of or 0,
            )
            for s, each in (self._given | self._followed).items()
        }

    def handle(self, event: TimePassed | ReadBegun | ReadEnded) -> tuple[ReadersWanted, ...]:
        """Apply one event and return the changes to make."""
        if isinstance(event, TimePassed) and event.ahead is not None:
            self._ahead = event.ahead
            self._pace.reach(event.ahead.step, event.now_s)
        # Count the time until now first, under the state before the event.
        commands = self._look(event.now_s)
        match event:
            case ReadBegun(source=source) if (found := self._of(source)) is not None:
                found.begin(event.now_s, is_lacked=event.is_lacked)
            case ReadEnded(source=source) if (found := self._of(source)) is not None:
                found.end(event.now_s, event.busy_s, event.tokens, event.readers)
            case _:
                pass
        return commands

    def _of(self, source: int) -> Followed | None:
        return self._followed.get(source) or self._given.get(source)

    def _look(self, now_s: float) -> tuple[ReadersWanted, ...]:
        looked_s = self._looked_s
        if looked_s is not None and now_s < looked_s + _LOOK_S:
            return ()
        self._looked_s = now_s
        every = [*self._given.values(), *self._followed.values()]
        for each in every:
            each.count_read(now_s)
        read_s = max((each.lately.read_s for each in every), default=0.0)
        passed_s = 0.0 if looked_s is None else min(now_s - looked_s, read_s + _PAUSE_S)
        self._foresee()
        for each in every:
            each.look(passed_s)
        return tuple(
            command
            for source, each in self._followed.items()
            if (command := self._change_of(source, each)) is not None
        )

    def _foresee(self) -> None:
        ahead = self._ahead
        if ahead is None:
            return
        # One stride more, because steps that are planned together are reported together.
        until = ahead.step + math.ceil(self._pace.steps_in(_AHEAD_S)) + self._pace.stride
        for source, each in self._followed.items():
            each.foresee(ahead.step, ahead.coming, source, until)

    def _change_of(self, source: int, each: Followed) -> ReadersWanted | None:
        if each.allowance < 1 or each.settled_s < _SETTLE_S:
            return None
        is_enough = each.divided == each.readers and each.sums.share <= OVER
        if is_enough and each.ahead_of is None:
            each.fewer = None  # they keep up, which proves their worth
        found = self._idle(each) or self._fewer(each) or self._more(each)
        is_ahead = found is None
        found = found or self._ahead_of_rise(each)
        if found is None:
            return None
        each.readers, why = found
        each.greatest = max(each.greatest, each.readers)
        each.allowance -= 1
        each.begin_anew()
        return ReadersWanted(source=source, readers=each.readers, why=why, is_ahead=is_ahead)

    def _idle(self, each: Followed) -> tuple[int, str] | None:
        if each.under_s < UNDER_S:
            return None
        each.fewer = None
        if each.allowance < 1 + _changes(each.would_do, each.greatest):
            each.under_s = 0.0
            return None
        return each.would_do, f"it is read {each.sums.share:.0%} of the time"

    def _fewer(self, each: Followed) -> tuple[int, str] | None:
        if each.over_s < _OVER_S or each.fewer is None:
            return None
        if each.sums.ended_s < _JUDGED_S:
            return None
        before, tokens_per_s, core = each.fewer
        # A store that is slow for a moment, or a core that others use, says nothing about the readers.
        if each.sums.core < _LIKE * core and each.settled_s < _PATIENT_S:
            return None
        each.fewer = None
        promised = each.readers / before - 1
        gained = each.sums.tokens_per_s / tokens_per_s - 1 if tokens_per_s else promised
        if gained >= _WORTH * promised:
            return None
        each.ceiling, each.ceiling_s, each.greatest = before, _TRIED_S, before
        return before, f"{each.readers} read it {1 + gained:.2f} times as quickly as {before}"

    def _more(self, each: Followed) -> tuple[int, str] | None:
        sums = each.sums
        if each.over_s < _OVER_S or sums.ended_s < _JUDGED_S or sums.core < CORE:
            return None
        if each.fewer is not None:  # the last ones first
            return None
        wanted = self._as_far_as_there_is_room(each, math.ceil(each.readers * _GROWTH))
        if wanted <= each.readers:
            return None
        each.fewer = each.readers, sums.tokens_per_s, sums.core
        return wanted, f"it is read {sums.share:.0%} of the time, with {sums.core:.2f} of a core"

    def _ahead_of_rise(self, each: Followed) -> tuple[int, str] | None:
        """Return the readers that a coming rise needs; like any others, they must then prove their worth."""
        rise, core, sums = each.rise, each.core, each.sums
        if rise is None or each.fewer is not None or (core is not None and core < CORE):
            return None
        wanted = self._as_far_as_there_is_room(each, each.soon)
        if wanted <= each.readers:
            return None
        if sums.ended_s:
            each.fewer = each.readers, sums.tokens_per_s, sums.core
        each.ahead_of = rise.step
        return (
            wanted,
            f"from step {rise.step} on its share is {rise.then:.0%}, and {rise.now:.0%} now",
        )

    def _as_far_as_there_is_room(self, each: Followed, wanted: int) -> int:
        every = [*self._given.values(), *self._followed.values()]
        room = self.cores - 1 - sum(other.readers - 1 for other in every)
        return min(wanted, self.most, each.readers + room, each.ceiling or self.most)


def _changes(readers: int, wanted: int) -> int:
    """Return how many changes lead from ``readers`` to ``wanted`` readers."""
    changes = 0
    while readers < wanted:
        readers, changes = math.ceil(readers * _GROWTH), changes + 1
    return changes

"""How many read each source of a loader, while a job runs: as many as keep up with what the mix draws of it.

What is followed is the share of the time in which a read of the source is under way. A planner that
has enough of a source asks for nothing; one that cannot plan without it asks again as soon as it
hears of a read, and what passes until then is the source's time too::

    share of the time that a source is read
      0.85 ──  above it for 20 s, by readers that had a core to read with: half as many again, one at least
      0.60 ──  as many are kept as would come to this; where fewer would for 2 minutes, the others go

Readers that are added must make reads quicker; where they do not, they go again, and no others are
tried for an hour: of a source whose blocks are of one unit, say, or on a machine without a core for them.
Changes of a source are bought with an allowance that grows slowly: no mix, however it swings, has
readers come and go.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

__all__ = ["Looked", "ReadBegun", "ReadEnded", "ReaderScaler", "ReadersWanted", "Reading"]

_READERS, _SHARE, _CORE_OF = "readers:", "reading_share:", "reading_core:"
"""Begin figures of a loader; the name of the source is behind them."""

_OVER, _FILLED = 0.85, 0.6
_CORE = 0.5
"""Part of a core that the busiest reader gets while it reads: below it waits for a store, or for a core."""
_WORTH = 0.25
"""Part of what added readers promise that they must give."""
_GROWTH = 1.5
_AVERAGE_S = 30.0
_OVER_S, _UNDER_S = 20.0, 120.0
_SETTLE_S = 30.0
"""From one change to the next: what is measured by then is of the readers that there are."""
_JUDGED_S = 10.0
"""Of reads that have ended, before readers are judged by them."""
_LIKE = 0.9
"""Part of the core that its busiest reader had before others were added: with less, a read tells of something else."""
_PATIENT_S = 120.0
"""Time in which a store that is slow for a while may be as quick as before."""
_TRIED_S = 3600.0
_REGAIN_S = 600.0
"""The allowance grows by one change in this time."""
_ALLOWED = 8.0
_TURN_S = 0.1
"""Longest that a planner is thought to take from the end of a read to asking for the next, which it lacks."""
_LOOK_S = 1.0
_PAUSE_S = 5.0
"""Longest time without a read that counts: in a trainer's pause no source is drawn from, which says nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Looked:
    """The loader was told something that is no read: time has passed."""

    now_s: float
    """By a clock that never goes back."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadBegun:
    """A read of a source begins; one at a time of each."""

    now_s: float
    source: int
    is_lacked: bool = False
    """Whether the planner cannot plan without it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadEnded:
    """It has ended, whatever came of it."""

    now_s: float
    source: int
    busy_s: float
    """Processor seconds of the busiest of its readers."""
    tokens: int
    readers: int
    """How many it was divided among: fewer than wanted while others open the source."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadersWanted:
    """Have so many readers of a source from its next read on, its loader included."""

    source: int
    readers: int
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """How a source is read at present."""

    readers: int
    """Its loader included."""
    share: float
    """Share of the time in which a read of it is under way."""
    core: float
    """Part of a core that the busiest of its readers gets meanwhile."""

    def figures(self, name: str) -> dict[str, float]:
        """Return it as figures of a loader."""
        return {
            _READERS + name: self.readers,
            _SHARE + name: self.share,
            _CORE_OF + name: self.core,
        }

    @classmethod
    def in_figures(cls, figures: Mapping[str, float]) -> "dict[str, Reading]":
        """Return what a loader tells of its sources, by their names."""
        return {
            name: cls(
                readers=int(readers),
                share=figures.get(_SHARE + name, 0.0),
                core=figures.get(_CORE_OF + name, 0.0),
            )
            for key, readers in sorted(figures.items())
            if (name := key.removeprefix(_READERS)) != key
        }

    @property
    def is_slow(self) -> bool:
        """Whether whoever draws from it waits for its readers."""
        return self.share > _OVER

    @property
    def said(self) -> str:
        """It in words that follow the name of the source, and why it has no more readers."""
        if not self.is_slow:
            why = "which is enough"
        elif self.core < _CORE:
            why = "who wait for its store, or for a core: more of them would not help"
        else:
            why = "too slowly; others are tried as long as cores are there and reads become quicker by it"
        return f"is read by {self.readers}, {self.share:.0%} of the time, {why}"


@dataclass(slots=True)
class _Sums:
    """What the last half minute came to: older seconds count for less and less."""

    passed_s: float = 0.0
    read_s: float = 0.0
    """In which a read was under way, or lacked."""
    ended_s: float = 0.0
    """That reads took which have ended: only of these it is known what they did."""
    busy_s: float = 0.0
    tokens: float = 0.0

    def follow_on(self, lately: "_Sums") -> None:
        """Add what has come since, and have all before it count for less."""
        left = math.exp(-lately.passed_s / _AVERAGE_S)
        self.passed_s = left * self.passed_s + lately.passed_s
        self.read_s = left * self.read_s + lately.read_s
        self.ended_s = left * self.ended_s + lately.ended_s
        self.busy_s = left * self.busy_s + lately.busy_s
        self.tokens = left * self.tokens + lately.tokens

    @property
    def share(self) -> float:
        """Share of the time in which it was read; 0 where nothing is known."""
        return min(1.0, self.read_s / self.passed_s) if self.passed_s else 0.0

    @property
    def core(self) -> float:
        """Part of a core that its busiest reader had while it was read."""
        return self.busy_s / self.ended_s if self.ended_s else 0.0

    @property
    def tokens_per_s(self) -> float:
        """How quickly it was read, while it was."""
        return self.tokens / self.ended_s if self.ended_s else 0.0


@dataclass(slots=True)
class _Followed:
    """One source."""

    readers: int
    """That are wanted."""
    divided: int = 1
    """Among how many its last read was divided."""
    began_s: float | None = None
    """When the read began that is under way."""
    ended_s: float | None = None
    """When the last one ended."""
    counted_to_s: float = 0.0
    """Up to when it is counted."""
    is_theirs: bool = True
    """Whether it began by the readers that there are."""
    lately: _Sums = field(default_factory=_Sums)
    """Since the last look."""
    sums: _Sums = field(default_factory=_Sums)
    over_s: float = 0.0
    under_s: float = 0.0
    would_do: int = 1
    """Readers that have been enough for a minute, while fewer than there are would do."""
    settled_s: float = 0.0
    allowance: float = _ALLOWED
    fewer: tuple[int, float, float] | None = None
    """Readers before others were added that have not proved their worth, tokens a second by them, and their core."""
    ceiling: int | None = None
    """More than these were tried for nothing."""
    ceiling_s: float = 0.0
    """For how long no others are tried."""

    def begin(self, read: ReadBegun) -> None:
        """Note the beginning of a read."""
        if read.is_lacked and self.ended_s is not None:
            self.lately.read_s += min(read.now_s - self.ended_s, _TURN_S)
        self.began_s = self.counted_to_s = read.now_s
        self.is_theirs = True

    def count_read(self, now_s: float) -> None:
        """Count what has passed of the read that is under way."""
        if self.began_s is not None:
            self.lately.read_s += now_s - self.counted_to_s
            self.counted_to_s = now_s

    def end(self, read: ReadEnded) -> None:
        """Note the end of a read."""
        self.count_read(read.now_s)
        began_s, self.began_s, self.ended_s = self.began_s, None, read.now_s
        if read.readers != self.divided:
            self.divided = read.readers
            self.begin_anew()
        elif not self.is_theirs:
            return
        if began_s is not None:
            self.lately.ended_s += read.now_s - began_s
            self.lately.busy_s += read.busy_s
            self.lately.tokens += read.tokens

    def begin_anew(self) -> None:
        """Forget what was measured: it is of other readers."""
        self.lately, self.sums = _Sums(), _Sums()
        self.over_s = self.under_s = self.settled_s = 0.0
        self.would_do = 1
        self.is_theirs = self.began_s is None

    def look(self, passed_s: float) -> None:
        """Apply what has passed since the last look."""
        self.lately.passed_s = passed_s
        self.sums.follow_on(self.lately)
        self.lately = _Sums()
        self.settled_s += passed_s
        self.allowance = min(_ALLOWED, self.allowance + passed_s / _REGAIN_S)
        self.ceiling_s -= passed_s
        if self.ceiling_s <= 0:
            self.ceiling = None
        share = self.sums.share
        # While others open the source it is read by fewer than are wanted, and slowly: that asks for no more.
        is_over = share > _OVER and self.divided == self.readers
        self.over_s = self.over_s + passed_s if is_over else 0.0
        # Of a source that is read all the time it is not known what it would take.
        needed = max(1, math.ceil(share * self.divided / _FILLED))
        if share <= _OVER and needed < self.readers:
            self.under_s += passed_s
            # By then the average has forgotten what came before.
            if self.under_s > _UNDER_S / 2:
                self.would_do = max(self.would_do, needed)
        else:
            self.under_s, self.would_do = 0.0, 1


@dataclass(slots=True, kw_only=True)
class ReaderScaler:
    """Decides for the sources of one loader; of those whose number was given it only says how they are read."""

    cores: int
    """Of the machine: the loader and all further readers are together no more."""
    most: int
    """Readers of one source at most."""
    _followed: dict[int, _Followed] = field(default_factory=dict, init=False)
    _given: dict[int, _Followed] = field(default_factory=dict, init=False)
    _looked_s: float | None = field(default=None, init=False)

    def follow(self, source: int, readers: int, *, is_given: bool) -> None:
        """Begin with so many readers of a source; where the number was given, it stays."""
        (self._given if is_given else self._followed)[source] = _Followed(readers)

    def forget(self, source: int) -> None:
        """Follow a source no more: another loader serves it."""
        self._given.pop(source, None)
        self._followed.pop(source, None)

    @property
    def readings_S(self) -> dict[int, Reading]:
        """How each source is read; readers are those that are wanted."""
        return {
            s: Reading(readers=each.readers, share=each.sums.share, core=each.sums.core)
            for s, each in (self._given | self._followed).items()
        }

    def handle(self, event: Looked | ReadBegun | ReadEnded) -> tuple[ReadersWanted, ...]:
        """Apply one event; return what is to change."""
        # First: what the event begins or ends has lasted, or not, until now.
        commands = self._look(event.now_s)
        match event:
            case ReadBegun(source=source) if (found := self._of(source)) is not None:
                found.begin(event)
            case ReadEnded(source=source) if (found := self._of(source)) is not None:
                found.end(event)
            case _:
                pass
        return commands

    def _of(self, source: int) -> _Followed | None:
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
        for each in every:
            each.look(passed_s)
        return tuple(
            command
            for source, each in self._followed.items()
            if (command := self._change_of(source, each)) is not None
        )

    def _change_of(self, source: int, each: _Followed) -> ReadersWanted | None:
        if each.allowance < 1 or each.settled_s < _SETTLE_S:
            return None
        if each.divided == each.readers and each.sums.share <= _OVER:
            each.fewer = None  # they keep up: that is worth enough
        found = self._fewer(each) or self._more(each)
        if found is None:
            return None
        each.readers, why = found
        each.allowance -= 1
        each.begin_anew()
        return ReadersWanted(source=source, readers=each.readers, why=why)

    def _fewer(self, each: _Followed) -> tuple[int, str] | None:
        if each.under_s >= _UNDER_S:
            each.fewer = None
            return each.would_do, f"it is read {each.sums.share:.0%} of the time"
        if each.over_s < _OVER_S or each.fewer is None:
            return None
        if each.sums.ended_s < _JUDGED_S:
            return None
        before, tokens_per_s, core = each.fewer
        # A store that is slow just now, or a core that is lent for a while, says nothing of the readers.
        if each.sums.core < _LIKE * core and each.settled_s < _PATIENT_S:
            return None
        each.fewer = None
        promised = each.readers / before - 1
        gained = each.sums.tokens_per_s / tokens_per_s - 1 if tokens_per_s else promised
        if gained >= _WORTH * promised:
            return None
        each.ceiling, each.ceiling_s = before, _TRIED_S
        return before, f"{each.readers} read it {1 + gained:.2f} times as quickly as {before}"

    def _more(self, each: _Followed) -> tuple[int, str] | None:
        sums = each.sums
        if each.over_s < _OVER_S or sums.ended_s < _JUDGED_S or sums.core < _CORE:
            return None
        if each.fewer is not None:  # the last ones first
            return None
        every = [*self._given.values(), *self._followed.values()]
        room = self.cores - 1 - sum(other.readers - 1 for other in every)
        most = min(self.most, each.readers + room, each.ceiling or self.most)
        wanted = min(math.ceil(each.readers * _GROWTH), most)
        if wanted <= each.readers:
            return None
        each.fewer = each.readers, sums.tokens_per_s, sums.core
        return wanted, f"it is read {sums.share:.0%} of the time, with {sums.core:.2f} of a core"

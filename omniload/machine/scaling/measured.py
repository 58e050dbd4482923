"""How a source is read: what its reads came to lately, and how many readers would do.

Of two memories one is short, and begins anew with other readers: by it readers are added, judged
and let go. The other remembers what a source took when it was last read, so that it is known what
more of it will take.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from omniload.machine.scaling.coming import Coming, Rise

__all__ = ["CORE", "OVER", "UNDER_S", "Followed", "Reading"]

_READERS, _SHARE, _CORE_OF = "readers:", "reading_share:", "reading_core:"
_STEP, _LOST = "readers_for_step:", "readers_lost:"
"""Begin figures of a loader; the name of the source is behind them."""

OVER, _FILLED = 0.85, 0.6
"""Shares of the time: above the first a source has too few readers, by the second as many as are kept."""
CORE = 0.5
"""Part of a core that the busiest reader gets while it reads: below it waits for a store, or for a core."""
UNDER_S = 120.0
_ALLOWED = 8.0
_REGAIN_S = 600.0
"""The allowance grows by one change in this time."""
_AVERAGE_S, _KNOWN_S = 30.0, 60.0
_TURN_S = 0.1
"""Longest that a planner is thought to take from the end of a read to asking for the next, which it lacks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """How a source is read at present."""

    readers: int
    """Its loader included."""
    share: float
    """Share of the time in which a read of it is under way."""
    core: float
    """Part of a core that the busiest of its readers gets meanwhile."""
    for_step: int = 0
    """Step that some of them are there for ahead of it; 0 for none."""
    lost: int = 0
    """Others that were lost one after the other, where its loader reads alone for a while; else 0."""

    def figures(self, name: str) -> dict[str, float]:
        """Return it as figures of a loader."""
        return {
            _READERS + name: self.readers,
            _SHARE + name: self.share,
            _CORE_OF + name: self.core,
            _STEP + name: self.for_step,
            _LOST + name: self.lost,
        }

    @classmethod
    def in_figures(cls, figures: Mapping[str, float]) -> "dict[str, Reading]":
        """Return what a loader tells of its sources, by their names."""
        return {
            name: cls(
                readers=int(readers),
                share=figures.get(_SHARE + name, 0.0),
                core=figures.get(_CORE_OF + name, 0.0),
                for_step=int(figures.get(_STEP + name, 0)),
                lost=int(figures.get(_LOST + name, 0)),
            )
            for key, readers in sorted(figures.items())
            if (name := key.removeprefix(_READERS)) != key
        }

    @property
    def is_slow(self) -> bool:
        """Whether whoever draws from it waits for its readers."""
        return self.share > OVER

    @property
    def said(self) -> str:
        """It in words that follow the name of the source, and why it has no more readers."""
        if self.lost:
            why = f"as {self.lost} others were lost one after the other; one is tried every ten minutes"
        elif self.for_step:
            why = f"of whom some are there for step {self.for_step}, where more is drawn from it"
        elif not self.is_slow:
            why = "which is enough"
        elif self.core < CORE:
            why = "who wait for its store, or for a core: more of them would not help"
        else:
            why = "too slowly; others are tried as long as cores are there and reads become quicker by it"
        return f"is read by {self.readers}, {self.share:.0%} of the time, {why}"


@dataclass(slots=True)
class _Sums:
    """What the last half minute, or another time, came to: older seconds count for less and less."""

    passed_s: float = 0.0
    read_s: float = 0.0
    """In which a read was under way, or lacked."""
    ended_s: float = 0.0
    """That reads took which have ended: only of these it is known what they did."""
    busy_s: float = 0.0
    tokens: float = 0.0

    def follow_on(self, lately: "_Sums", average_s: float = _AVERAGE_S) -> None:
        """Add what has come since, and have all before it count for less."""
        left = math.exp(-lately.passed_s / average_s)
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
class _Known:
    """What reading a source takes, as far as is known: a source that falls away is remembered as it was read last."""

    sums: _Sums = field(default_factory=_Sums)
    """In which seconds of reading are those of all readers together."""
    _idle_s: float = 0.0
    """Since the last read that ended."""
    _read_s: float = 0.0
    """As above."""
    _since: _Sums = field(default_factory=_Sums)
    """As above."""

    def look(self, lately: _Sums, divided: int) -> None:
        """Apply what has passed since the last look."""
        since = self._since
        # Not without end: nobody may have drawn from it.
        self._idle_s = min(self._idle_s + max(0.0, lately.passed_s - lately.read_s), _KNOWN_S)
        self._read_s += lately.read_s
        since.read_s += lately.read_s * divided
        since.ended_s += lately.ended_s
        since.busy_s += lately.busy_s
        if lately.ended_s:
            since.passed_s = self._idle_s + self._read_s
            self.sums.follow_on(since, _KNOWN_S)
            self._since, self._idle_s, self._read_s = _Sums(), 0.0, 0.0

    @property
    def readers(self) -> float:
        """How many readers it would keep busy all the time; 0 where nothing is known."""
        return self.sums.read_s / self.sums.passed_s if self.sums.passed_s else 0.0


@dataclass(slots=True)
class Followed:
    """One source."""

    readers: int
    """That are wanted."""
    at_first: int = field(init=False)
    """That it began with: as many as its profile asks for where the mix draws most of it."""
    greatest: int = field(init=False)
    """Number that it ever had, of those that proved their worth or may yet."""
    known: _Known = field(default_factory=_Known)
    rise: Rise | None = None
    """What the mix is known to draw more of it soon."""
    ahead_of: int | None = None
    """Step before which its readers were added, while that is to come."""
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

    def __post_init__(self) -> None:
        self.at_first = self.greatest = self.readers

    def begin(self, now_s: float, *, is_lacked: bool) -> None:
        """Note the beginning of a read."""
        if is_lacked and self.ended_s is not None:
            self.lately.read_s += min(now_s - self.ended_s, _TURN_S)
        self.began_s = self.counted_to_s = now_s
        self.is_theirs = True

    def count_read(self, now_s: float) -> None:
        """Count what has passed of the read that is under way."""
        if self.began_s is not None:
            self.lately.read_s += now_s - self.counted_to_s
            self.counted_to_s = now_s

    def end(self, now_s: float, busy_s: float, tokens: int, readers: int) -> None:
        """Note the end of a read, which so many took part in."""
        self.count_read(now_s)
        began_s, self.began_s, self.ended_s = self.began_s, None, now_s
        if readers != self.divided:
            self.divided = readers
            self.begin_anew()
        elif not self.is_theirs:
            return
        if began_s is not None:
            self.lately.ended_s += now_s - began_s
            self.lately.busy_s += busy_s
            self.lately.tokens += tokens

    def begin_anew(self) -> None:
        """Forget what was measured: it is of other readers."""
        self.lately, self.sums = _Sums(), _Sums()
        self.over_s = self.under_s = self.settled_s = 0.0
        self.would_do = 1
        self.is_theirs = self.began_s is None

    def foresee(self, step: int, coming: Coming | None, source: int, until: int) -> None:
        """Note what comes of a source at the steps behind one, up to another."""
        self.rise = None if coming is None else coming.rise(source, step, until)
        is_coming = coming is not None and source in coming.shares_S
        if self.ahead_of is not None and (step >= self.ahead_of or not is_coming):
            # What was measured is of before the step that they were added for.
            self.ahead_of = None
            self.begin_anew()

    @property
    def core(self) -> float | None:
        """Part of a core that its busiest reader has while it is read, or had last; ``None`` where it never was."""
        sums = self.sums if self.sums.ended_s else self.known.sums
        return sums.core if sums.ended_s else None

    @property
    def soon(self) -> int:
        """How many readers what comes will take; 0 where nothing does."""
        rise = self.rise
        if rise is None:
            return 0
        if not rise.drawn or not self.known.readers:
            return self.at_first
        return max(1, math.ceil(self.known.readers * rise.then / rise.drawn / _FILLED))

    def look(self, passed_s: float) -> None:
        """Apply what has passed since the last look."""
        self.lately.passed_s = passed_s
        self.known.look(self.lately, self.divided)
        self.sums.follow_on(self.lately)
        self.lately = _Sums()
        self.settled_s += passed_s
        self.allowance = min(_ALLOWED, self.allowance + passed_s / _REGAIN_S)
        self.ceiling_s -= passed_s
        if self.ceiling_s <= 0:
            self.ceiling = None
        share = self.sums.share
        # While others open the source it is read by fewer than are wanted, and slowly: that asks for no more.
        is_over = share > OVER and self.divided == self.readers
        self.over_s = self.over_s + passed_s if is_over else 0.0
        # Of a source that is read all the time it is not known what it would take.
        needed = max(1, math.ceil(share * self.divided / _FILLED), self.soon)
        if share <= OVER and needed < self.readers:
            self.under_s += passed_s
            # By then the average has forgotten what came before.
            if self.under_s > UNDER_S / 2:
                self.would_do = max(self.would_do, needed)
        else:
            self.under_s, self.would_do = 0.0, 1

"""Measurements of how a source is read, and the number of readers that would be enough.

There are two memories. The short one begins anew when the readers change; by it readers are added,
judged and removed. The long one keeps what a source took when it was last read, so that the cost of
drawing more from it can be foreseen.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from omniload.machine.scaling.coming import Coming, Rise

__all__ = ["CORE", "OVER", "UNDER_S", "Followed", "Reading"]

_READERS, _SHARE, _CORE_OF = "readers:", "reading_share:", "reading_core:"
_STEP, _LOST = "readers_for_step:", "readers_lost:"
"""Prefixes of figures of a loader; the name of the source follows."""

OVER, _FILLED = 0.85, 0.6
"""Shares of the time. Above the first, a source has too few readers; the second decides how many are kept."""
CORE = 0.5
"""Fraction of a core that the busiest reader gets while it reads; below it, the reader waits for a store or a core."""
UNDER_S = 120.0
_ALLOWED = 8.0
_REGAIN_S = 600.0
"""The allowance grows by one change in this time."""
_AVERAGE_S, _KNOWN_S = 30.0, 60.0
_TURN_S = 0.1
"""Longest time that a planner is assumed to take from the end of a read to its next request, if it lacks samples."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """How a source is being read."""

    readers: int
    """Number of readers, including the loader."""
    share: float
    """Fraction of the time in which a read is under way."""
    core: float
    """Fraction of a core that the busiest reader gets meanwhile."""
    for_step: int = 0
    """Step for which readers were added in advance; 0 if none were."""
    lost: int = 0
    """Further readers that were lost in a row, if the loader reads alone for a while; otherwise 0."""

    def figures(self, name: str) -> dict[str, float]:
        """Return this as figures of a loader."""
        return {
            _READERS + name: self.readers,
            _SHARE + name: self.share,
            _CORE_OF + name: self.core,
            _STEP + name: self.for_step,
            _LOST + name: self.lost,
        }

    @classmethod
    def in_figures(cls, figures: Mapping[str, float]) -> "dict[str, Reading]":
        """Return the readings in a loader's figures, by the names of its sources."""
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
        """Whether the planner has to wait for the readers of this source."""
        return self.share > OVER

    @property
    def said(self) -> str:
        """Words that follow the name of the source, including why it has no more readers."""
        if self.lost:
            why = f"because {self.lost} others were lost one after the other; a new one is tried every ten minutes"
        elif self.for_step:
            why = f"of whom some are there for step {self.for_step}, where more is drawn from it"
        elif not self.is_slow:
            why = "which is enough"
        elif self.core < CORE:
            why = "who wait for its store, or for a core: more of them would not help"
        else:
            why = "too slowly; more are tried as long as cores are free and reads become quicker"
        return f"is read by {self.readers}, {self.share:.0%} of the time, {why}"


@dataclass(slots=True)
class _Sums:
    """Sums over the last half minute, or another time; older seconds weigh less."""

    passed_s: float = 0.0
    read_s: float = 0.0
    """Seconds in which a read was under way, or lacked."""
    ended_s: float = 0.0
    """Seconds of ended reads, the only ones whose work is known."""
    busy_s: float = 0.0
    tokens: float = 0.0

    def follow_on(self, lately: "_Sums", average_s: float = _AVERAGE_S) -> None:
        """Add newer sums, and reduce the weight of older ones."""
        left = math.exp(-lately.passed_s / average_s)
        self.passed_s = left * self.passed_s + lately.passed_s
        self.read_s = left * self.read_s + lately.read_s
        self.ended_s = left * self.ended_s + lately.ended_s
        self.busy_s = left * self.busy_s + lately.busy_s
        self.tokens = left * self.tokens + lately.tokens

    @property
    def share(self) -> float:
        """Fraction of the time in which the source was read; 0 if nothing is known."""
        return min(1.0, self.read_s / self.passed_s) if self.passed_s else 0.0

    @property
    def core(self) -> float:
        """Fraction of a core that its busiest reader had while it was read."""
        return self.busy_s / self.ended_s if self.ended_s else 0.0

    @property
    def tokens_per_s(self) -> float:
        """Tokens per second of reading."""
        return self.tokens / self.ended_s if self.ended_s else 0.0


@dataclass(slots=True)
class _Known:
    """The cost of reading a source, remembered also while it is not drawn from."""

    sums: _Sums = field(default_factory=_Sums)
    """Sums in which seconds of reading are added up over all readers."""
    _idle_s: float = 0.0
    """Idle seconds since the last ended read."""
    _read_s: float = 0.0
    """As above."""
    _since: _Sums = field(default_factory=_Sums)
    """As above."""

    def look(self, lately: _Sums, divided: int) -> None:
        """Apply what has passed since the last look."""
        since = self._since
        # Bounded, because the source may not be drawn from for a long time.
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
        """Number of readers that the source would keep busy all the time; 0 if nothing is known."""
        return self.sums.read_s / self.sums.passed_s if self.sums.passed_s else 0.0


@dataclass(slots=True)
class Followed:
    """The observations and decisions of one source."""

    readers: int
    """Wanted number of readers."""
    at_first: int = field(init=False)
    """Initial number of readers, from its profile and its largest share of the mix."""
    greatest: int = field(init=False)
    """Largest number of readers so far, except numbers that proved useless."""
    known: _Known = field(default_factory=_Known)
    rise: Rise | None = None
    """A coming rise of its share, if one is known."""
    ahead_of: int | None = None
    """Coming step for which readers were added in advance."""
    divided: int = 1
    """Number of readers that took part in the last read."""
    began_s: float | None = None
    """Beginning of the read that is under way."""
    ended_s: float | None = None
    """End of the last read."""
    counted_to_s: float = 0.0
    """Time up to which the current read is counted."""
    is_theirs: bool = True
    """Whether the current read began with the present readers."""
    lately: _Sums = field(default_factory=_Sums)
    """Sums since the last look."""
    sums: _Sums = field(default_factory=_Sums)
    over_s: float = 0.0
    under_s: float = 0.0
    would_do: int = 1
    """Number of readers that would have been enough in the last minute, while there are too many."""
    settled_s: float = 0.0
    allowance: float = _ALLOWED
    fewer: tuple[int, float, float] | None = None
    """Before unproven readers were added: the number of readers, their tokens per second, and their core."""
    ceiling: int | None = None
    """More readers than this were tried in vain."""
    ceiling_s: float = 0.0
    """Remaining time in which no more are tried."""

    def __post_init__(self) -> None:
        self.at_first = self.greatest = self.readers

    def begin(self, now_s: float, *, is_lacked: bool) -> None:
        """Note the beginning of a read."""
        if is_lacked and self.ended_s is not None:
            self.lately.read_s += min(now_s - self.ended_s, _TURN_S)
        self.began_s = self.counted_to_s = now_s
        self.is_theirs = True

    def count_read(self, now_s: float) -> None:
        """Count the time of the read that is under way."""
        if self.began_s is not None:
            self.lately.read_s += now_s - self.counted_to_s
            self.counted_to_s = now_s

    def end(self, now_s: float, busy_s: float, tokens: int, readers: int) -> None:
        """Note the end of a read by this many readers."""
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
        """Forget all measurements, because they belong to other readers."""
        self.lately, self.sums = _Sums(), _Sums()
        self.over_s = self.under_s = self.settled_s = 0.0
        self.would_do = 1
        self.is_theirs = self.began_s is None

    def foresee(self, step: int, coming: Coming | None, source: int, until: int) -> None:
        """Note a coming rise of the source after ``step``, up to ``until``."""
        self.rise = None if coming is None else coming.rise(source, step, until)
        is_coming = coming is not None and source in coming.shares_S
        if self.ahead_of is not None and (step >= self.ahead_of or not is_coming):
            # The measurements are from before the step that the readers were added for.
            self.ahead_of = None
            self.begin_anew()

    @property
    def core(self) -> float | None:
        """Fraction of a core that its busiest reader has, or had last; ``None`` if it was never read."""
        sums = self.sums if self.sums.ended_s else self.known.sums
        return sums.core if sums.ended_s else None

    @property
    def soon(self) -> int:
        """Readers that the coming rise will need; 0 without a rise."""
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
        # While added readers still open the source, it is read slowly by fewer; that is no reason for even more.
        is_over = share > OVER and self.divided == self.readers
        self.over_s = self.over_s + passed_s if is_over else 0.0
        # Above ``OVER`` the source is read all the time, and its real need is unknown.
        needed = max(1, math.ceil(share * self.divided / _FILLED), self.soon)
        if share <= OVER and needed < self.readers:
            self.under_s += passed_s
            # By then the average has forgotten the time before.
            if self.under_s > UNDER_S / 2:
                self.would_do = max(self.would_do, needed)
        else:
            self.under_s, self.would_do = 0.0, 1

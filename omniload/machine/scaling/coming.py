"""What the mix is known to draw more of in its coming steps, and how soon they come.

Weights are a function of the step: stages, their ramps, and edits that are journaled with a step to come. So it is
known before a step begins what it takes; a policy, and a stage that waits for epochs, are known once they are edits::

    share of web                   ┌── 0.4     steps     (120, 499, 500)
                  0.1 ─────────────┘           shares_S  {web: (0.1, 0.1, 0.4)}
                     step 120     500

The planner knows steps and has no clock; a loader has one, and hears which step is read for.

Samples that are known lie in the memory of a source loader, so what is read ahead is bounded by what they weigh:
a thousand tokens are 5 KB of text, or 2 MB of images.

Shape suffixes:
    S  sources
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Protocol, Self

import numpy as np

from omniload.mix.config import MixConfig
from omniload.mix.deficit import WEIGHT_ONE
from omniload.mix.edits.history import History
from omniload.mix.schedule import boundaries, weights_at
from omniload.mix.state import MixState

__all__ = [
    "PLANS_READ_AHEAD",
    "Ahead",
    "Coming",
    "Demand",
    "Foresight",
    "Pace",
    "Rise",
    "Weighed",
    "read_to",
]

PLANS_READ_AHEAD = 4
"""Plans' worth of samples known ahead of the next plan, for each source by its share; half as many let every
plan wait for a read. Of a source whose reads take longer more are, see ``scaling.leads``."""
_MOST_STEPS = 16
"""At which shares are told: seven changes of the mix, or three ramps."""
_BENDS = 8
"""Parts of a cosine ramp that are taken to be straight: as one, shares are up to 0.09 off, and a rise by half."""
_LEAST_RISE = 1e-6
_AVERAGE_S = 30.0
_PAUSE_S, _PAUSE_STEPS = 5.0, 4.0
"""A step that takes longer than both, the latter times what steps take, was held up by a trainer's pause: one in half a
minute of other steps. Others are steps that take longer from now on, or pauses that belong to the pace."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rise:
    """A source of which more is drawn soon."""

    step: int
    """First step at which it is drawn from so much."""
    now: float
    """Its share by now."""
    then: float
    """Its share at the step."""
    drawn: float
    """The share that it was drawn with last; 0 where it never was."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Coming:
    """Shares of those sources of which a coming step draws more. From one of its steps to the next they move evenly."""

    steps: tuple[int, ...]
    shares_S: Mapping[int, tuple[float, ...]]
    """Of each source, one at each of the steps."""
    drawn_S: Mapping[int, float] = field(default_factory=dict)
    """Of those with share 0 at the first of the steps: the share that they were drawn with last, if ever."""

    def rise(self, source: int, start: int, stop: float) -> Rise | None:
        """Return the greatest share of a source at the steps behind ``start`` up to ``stop``, where that is a rise."""
        shares = self.shares_S.get(source)
        if shares is None:
            return None
        stop = math.ceil(stop)  # what jumps at a step is not half there before it
        now = float(np.interp(start, self.steps, shares))
        # Between its steps shares rise or fall, and nothing else, so that they are greatest at one of them.
        known = [each for each in zip(self.steps, shares, strict=True) if start < each[0] < stop]
        known.append((stop, float(np.interp(stop, self.steps, shares))))
        step, then = max(known, key=lambda each: each[1])
        if then < now + _LEAST_RISE:
            return None
        return Rise(step=step, now=now, then=then, drawn=now or self.drawn_S.get(source, 0.0))


@dataclass(frozen=True, slots=True, kw_only=True)
class Ahead:
    """How far the planner is, and what it sees from there."""

    step: int
    """The farthest step that samples are read for at present."""
    coming: Coming | None = None
    """``None`` where no source rises, as far as is known."""


@dataclass(slots=True)
class Foresight:
    """Finds what comes, once for each stretch of steps in which that is the same."""

    _history: History | None = field(default=None, init=False)
    _until: float = field(default=0, init=False)
    _coming: Coming | None = field(default=None, init=False)

    def at(self, history: History, step: int) -> Ahead:
        """Return what is seen from the step that is planned next; it never goes back."""
        step = read_to(history, step)
        if history is not self._history or step >= self._until:
            self._history = history
            steps = _steps_from(history, step)
            self._until = steps[1] if len(steps) > 1 else math.inf
            self._coming = _coming(history, steps)
        return Ahead(step=step, coming=self._coming)


def read_to(history: History, step: int) -> int:
    """Return the farthest step that samples are read for where ``step`` is planned next."""
    return step + PLANS_READ_AHEAD * history.base.steps_at_once


def _changes(history: History, step: int) -> set[int]:
    """Return the steps at which shares begin or end to move, and others at which nothing may happen."""
    mixes = history.at(step), history.latest
    return {edit.step for edit in history.edits}.union(*map(boundaries, mixes))


def _steps_from(history: History, step: int) -> list[int]:
    """Return a step, and those behind it between which shares move evenly."""
    # The last of before a change, too: what jumps at a step is not on its way there.
    each = {k for change in _changes(history, step) for k in (change - 1, change)} | {
        stage.from_step + stage.ramp_steps * part // _BENDS
        for mix in (history.at(step), history.latest)
        for stage in mix.mix.stages
        if stage.ramp == "cosine" and not stage.waits
        for part in range(1, _BENDS)
    }
    return [step, *sorted(k for k in each if k > step)[: _MOST_STEPS - 1]]


def _coming(history: History, steps: list[int]) -> Coming | None:
    shares = [_shares_at(history, k) for k in steps]
    # An edit may add sources behind all others: until then they have no share.
    width = max(map(len, shares))
    of_S = zip(*(each + (0.0,) * (width - len(each)) for each in shares), strict=True)
    # From any of the steps on: what falls to begin with rises above what it has fallen to.
    rising = {
        s: its
        for s, its in enumerate(of_S)
        if any(a + _LEAST_RISE < b for a, b in zip(accumulate(its, min), its, strict=True))
    }
    if not rising:
        return None
    drawn_S = _drawn_last(history, steps[0], [s for s, its in rising.items() if its[0] == 0])
    return Coming(steps=tuple(steps), shares_S=rising, drawn_S=drawn_S)


def _drawn_last(history: History, step: int, sources: Iterable[int]) -> dict[int, float]:
    """Return the share that each source had when it was drawn from last, of those that were."""
    before = sorted({k - 1 for k in _changes(history, step) if 0 < k <= step}, reverse=True)
    found: dict[int, float] = {}
    left = set(sources)
    for shares in (_shares_at(history, k) for k in before[:_MOST_STEPS] if left):
        found |= {s: shares[s] for s in left if s < len(shares) and shares[s] > 0}
        left -= found.keys()
    return found


def _shares_at(history: History, step: int) -> tuple[float, ...]:
    mix = history.at(step)
    return weights_at(mix.mix.stages, mix.names, step)


@dataclass(slots=True)
class Pace:
    """How many steps go by in a time."""

    _reached: tuple[int, float] | None = field(default=None, init=False)
    _steps: float = field(default=0.0, init=False)
    _passed_s: float = field(default=0.0, init=False)
    stride: int = field(default=1, init=False)
    """Steps that are reached at once, where several are planned together."""
    _since_pause_s: float = field(default=math.inf, init=False)
    """That steps have taken, other than long ones, since the last pause."""

    def reach(self, step: int, now_s: float) -> None:
        """Note that a step is reached, or is the last that was reached."""
        before, before_s = self._reached or (step, now_s)
        if self._reached is not None and step == before:
            return
        self._reached = step, now_s
        if step <= before:
            return  # the first, or of a planner that took over and is not as far
        self.stride = step - before
        passed_s = now_s - before_s
        if self._steps:
            usual_s = self.stride * self._passed_s / self._steps
            longest_s = _PAUSE_S + _PAUSE_STEPS * usual_s
            if passed_s <= longest_s:
                self._since_pause_s += passed_s
            elif self._since_pause_s >= _AVERAGE_S:
                passed_s, self._since_pause_s = longest_s, 0.0
        left = math.exp(-passed_s / _AVERAGE_S)
        self._steps = left * self._steps + self.stride
        self._passed_s = left * self._passed_s + passed_s

    def steps_in(self, duration_s: float) -> float:
        """Return how many steps go by in a time; 0 while that is not known."""
        return duration_s * self._steps / self._passed_s if self._passed_s else 0.0


class Weighed(Protocol):
    """What is known of a source's samples."""

    @property
    def token_bytes(self) -> float:
        """Bytes of a loader's memory per token; 0 while none was seen."""
        ...


IsShort = Callable[[int, int], bool]
"""Whether less is known of a source than so many tokens, and more may be read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """Tokens of each source that must be known before steps can be planned, and below which more are asked for."""

    step: int
    """The first of the steps."""
    steps: int
    """How many."""
    needs_S: list[int]
    """What they are likely to draw; at least 1 where they draw any."""
    targets_S: list[int]
    """What the coming steps are likely to draw; more is asked for below it, where memory allows."""
    room_S: list[float]
    """Bytes that the known samples of each may take of a loader's memory."""
    short: set[int] = field(default_factory=set)
    """Sources of which less than the need is known."""

    @classmethod
    def of(cls, history: History, state: MixState, steps: int, num_sources: int) -> Self:
        """Return what ``steps`` behind a state demand of sources, also of those that later edits add."""
        mix, entered = history.entered(state)
        # One that is added draws nothing before the step of its edit, but is read ahead by its target.
        needs_S = _needs_of(mix, entered, steps) + [0] * (num_sources - len(mix.names))
        targets_S = _targets_of(history, state.step, needs_S)
        # Of the memory half: the rest is for decoded blocks, and for samples that are planned and not yet taken.
        room_per_token = history.base.loader.memory / 2 / max(1, sum(targets_S))
        return cls(
            step=state.step,
            steps=steps,
            needs_S=needs_S,
            targets_S=targets_S,
            room_S=[target * room_per_token for target in targets_S],
        )

    def bounds_of(self, source: int, token_bytes: float) -> tuple[int, int]:
        """Return how many tokens of a source are to be known at least, and how many are asked for where they are not.

        Args:
            source: Its number.
            token_bytes: What a token of it takes of memory, with all that goes with it; 0 where that is not known.

        Returns:
            At least what the next plan needs, whatever that weighs.
        """
        need, target, room = self.needs_S[source], self.targets_S[source], self.room_S[source]
        if 2 * target * token_bytes <= room:
            return target, 2 * target
        most = max(need, int(room / token_bytes))
        return max(need, most // 2), most

    def below(
        self, sources: Iterable[int], known_S: Sequence[Weighed], is_short: IsShort
    ) -> Iterator[tuple[int, int, int]]:
        """Yield of sources those of which fewer tokens are known than are to be, each with its bounds."""
        for s in sources:
            if not is_short(s, self.targets_S[s]):
                continue  # before more is looked at: of hundreds of sources few are
            least, most = self.bounds_of(s, known_S[s].token_bytes)
            if is_short(s, least):
                yield s, least, most

    def drop_known(self, sources: Iterable[int], is_short: IsShort) -> None:
        """Drop of these sources those from ``short`` of which enough is known by now."""
        for s in self.short.intersection(sources):
            if not is_short(s, self.needs_S[s]):
                self.short.remove(s)


def _needs_of(mix: MixConfig, state: MixState, steps: int) -> list[int]:
    """Return the tokens of each source that the next steps are likely to draw; at least 1 where they draw any."""
    weights = weights_at(mix.mix.stages, mix.names, state.step)
    if mix.mix.counted == "sample" or mix.pack.method == "none":
        # Drawn by number: no tokens to foresee.
        return [1 if weight > 0 else 0 for weight in weights]
    budget = (mix.rows_per_step * steps + mix.rows_ahead) * mix.pack.length
    return [
        max(1, int(weight * budget + credit / WEIGHT_ONE)) if weight > 0 else 0
        for weight, credit in zip(weights, state.credits_S, strict=True)
    ]


def _targets_of(history: History, step: int, needs_S: Sequence[int]) -> list[int]:
    """Return the tokens of each source that the steps from ``step`` on are likely to draw, over several plans.

    An edit of a coming step counts: what it draws from is read before it holds.
    """
    together = history.base.steps_at_once
    ahead = read_to(history, step)
    mix = history.at(ahead)
    soon = dict(enumerate(weights_at(mix.mix.stages, mix.names, ahead)))
    tokens = mix.batch.tokens * together
    return [
        max(need, int(soon.get(s, 0.0) * tokens)) * PLANS_READ_AHEAD
        for s, need in enumerate(needs_S)
    ]

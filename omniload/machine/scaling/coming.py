"""Foresight: the sources that the mix will soon draw more from, and how soon.

Weights are a function of the step: stages, their ramps, and edits that are journaled with a coming step. So the demand
of a step is known before it begins. Decisions of a policy, and stages that wait for epochs, are known once they are
edits::

    share of web                   ┌── 0.4     steps     (120, 499, 500)
                  0.1 ─────────────┘           shares_S  {web: (0.1, 0.1, 0.4)}
                     step 120     500

The planner knows steps but has no clock. A loader has a clock, and hears for which step it reads.

Known samples lie in the memory of a source loader, so their weight limits how much is read ahead: a thousand tokens
are 5 KB of text, or 2 MB of images.

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
"""Known samples of each source ahead of the next plan, in plans. With half as many, every plan waits for a read. A
source with slow reads has more, see ``scaling.leads``."""
_MOST_STEPS = 16
"""Most steps at which shares are reported; enough for seven changes of the mix, or three ramps."""
_BENDS = 8
"""Straight pieces that stand for a cosine ramp; with a single one, shares are up to 0.09 off, and a rise by half."""
_LEAST_RISE = 1e-6
_AVERAGE_S = 30.0
_PAUSE_S, _PAUSE_STEPS = 5.0, 4.0
"""A step that takes longer than both (the second is a multiple of the usual step) was held up by a pause of the
trainer, if there is at most one in half a minute of other steps. Otherwise steps have become longer, or pauses are part
of the pace."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rise:
    """A source that will soon be drawn from more."""

    step: int
    """First step with the new share."""
    now: float
    """Its present share."""
    then: float
    """Its share at the step."""
    drawn: float
    """The last share above 0 that it was drawn with; 0 if there was none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Coming:
    """Shares of the sources that a coming step draws more from; between two of its steps, shares move linearly."""

    steps: tuple[int, ...]
    shares_S: Mapping[int, tuple[float, ...]]
    """For each source, its share at each of the steps."""
    drawn_S: Mapping[int, float] = field(default_factory=dict)
    """For sources with share 0 at the first of the steps, the share that they were last drawn with, if ever."""

    def rise(self, source: int, start: int, stop: float) -> Rise | None:
        """Return the greatest share of a source after step ``start`` and up to ``stop``, if it is a rise."""
        shares = self.shares_S.get(source)
        if shares is None:
            return None
        stop = math.ceil(stop)  # a share that jumps at a step has not risen at all before it
        now = float(np.interp(start, self.steps, shares))
        # Shares are monotonic between two of the steps, so the greatest one is at a step.
        known = [each for each in zip(self.steps, shares, strict=True) if start < each[0] < stop]
        known.append((stop, float(np.interp(stop, self.steps, shares))))
        step, then = max(known, key=lambda each: each[1])
        if then < now + _LEAST_RISE:
            return None
        return Rise(step=step, now=now, then=then, drawn=now or self.drawn_S.get(source, 0.0))


@dataclass(frozen=True, slots=True, kw_only=True)
class Ahead:
    """The planner's position and its foresight."""

    step: int
    """The farthest step for which samples are being read."""
    coming: Coming | None = None
    """Coming shares; ``None`` if no source is known to rise."""


@dataclass(slots=True)
class Foresight:
    """Computes the coming shares, once for each stretch of steps with the same outcome."""

    _history: History | None = field(default=None, init=False)
    _until: float = field(default=0, init=False)
    _coming: Coming | None = field(default=None, init=False)

    def at(self, history: History, step: int) -> Ahead:
        """Return the foresight at the step that is planned next, which never decreases."""
        step = read_to(history, step)
        if history is not self._history or step >= self._until:
            self._history = history
            steps = _steps_from(history, step)
            self._until = steps[1] if len(steps) > 1 else math.inf
            self._coming = _coming(history, steps)
        return Ahead(step=step, coming=self._coming)


def read_to(history: History, step: int) -> int:
    """Return the farthest step for which samples are read if ``step`` is planned next."""
    return step + PLANS_READ_AHEAD * history.base.steps_at_once


def _changes(history: History, step: int) -> set[int]:
    """Return the steps at which shares begin or stop moving, possibly with further steps."""
    mixes = history.at(step), history.latest
    return {edit.step for edit in history.edits}.union(*map(boundaries, mixes))


def _steps_from(history: History, step: int) -> list[int]:
    """Return a step and later ones, so that shares move linearly between two neighbours."""
    # Includes the last step before a change, because a share that jumps does not move there linearly.
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
    # An edit may add sources after all others; until then these have no share.
    width = max(map(len, shares))
    of_S = zip(*(each + (0.0,) * (width - len(each)) for each in shares), strict=True)
    # Compare from every step on, because a share may fall at first and then rise again.
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
    """Return the share of each source when it was last drawn from, for sources that ever were."""
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
    """Measures how many steps pass in a given time."""

    _reached: tuple[int, float] | None = field(default=None, init=False)
    _steps: float = field(default=0.0, init=False)
    _passed_s: float = field(default=0.0, init=False)
    stride: int = field(default=1, init=False)
    """Steps that are reached together, as several are planned together."""
    _since_pause_s: float = field(default=math.inf, init=False)
    """Seconds of ordinary steps since the last pause."""

    def reach(self, step: int, now_s: float) -> None:
        """Note the step that is reached by now, which may be the same as before."""
        before, before_s = self._reached or (step, now_s)
        if self._reached is not None and step == before:
            return
        self._reached = step, now_s
        if step <= before:
            return  # the first call, or a planner took over that is not as far yet
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
        """Return how many steps pass in ``duration_s`` seconds; 0 while the pace is unknown."""
        return duration_s * self._steps / self._passed_s if self._passed_s else 0.0


class Weighed(Protocol):
    """The known samples of a source."""

    @property
    def token_bytes(self) -> float:
        """Bytes of a loader's memory per token; 0 before the first token was seen."""
        ...

    @property
    def sample_tokens(self) -> float:
        """Tokens of a sample in the mean; 0 before the first one was seen."""
        ...


IsShort = Callable[[int, int], bool]
"""Returns whether a source has fewer known tokens than given, and more can be read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """The demand of steps on each source: tokens that planning needs, and a target below which more are requested."""

    step: int
    """The first of the steps."""
    steps: int
    """Number of steps."""
    needs_S: list[int]
    """Tokens that the steps will probably draw; at least 1 if they draw any."""
    targets_S: list[int]
    """Tokens that the coming steps will probably draw; below this more is requested, if memory allows."""
    room_S: list[float]
    """Bytes of a loader's memory that the known samples of each source may take."""
    short: set[int] = field(default_factory=set)
    """Sources with fewer known tokens than their need."""

    @classmethod
    def of(cls, history: History, state: MixState, steps: int, known_S: Sequence[Weighed]) -> Self:
        """Return the demand of ``steps`` after a state, including sources that later edits add."""
        mix, entered = history.entered(state)
        # An added source is not drawn from before the step of its edit, but its target has it read ahead.
        needs_S = _needs_of(mix, entered, steps, known_S) + [0] * (len(known_S) - len(mix.names))
        targets_S = _targets_of(history, state.step, needs_S)
        # Half of the memory; the rest is for decoded blocks, and for samples that are planned and not taken yet.
        room_per_token = history.base.loader.memory / 2 / max(1, sum(targets_S))
        return cls(
            step=state.step,
            steps=steps,
            needs_S=needs_S,
            targets_S=targets_S,
            room_S=[target * room_per_token for target in targets_S],
        )

    def bounds_of(self, source: int, token_bytes: float) -> tuple[int, int]:
        """Return how many tokens of a source should be known, and how many to request if fewer are.

        Args:
            source: Number of the source.
            token_bytes: Memory of one of its tokens with all its columns; 0 if unknown.

        Returns:
            Both are at least the need of the next plan, whatever its memory.
        """
        need, target, room = self.needs_S[source], self.targets_S[source], self.room_S[source]
        if 2 * target * token_bytes <= room:
            return target, 2 * target
        most = max(need, int(room / token_bytes))
        return max(need, most // 2), most

    def below(
        self, sources: Iterable[int], known_S: Sequence[Weighed], is_short: IsShort
    ) -> Iterator[tuple[int, int, int]]:
        """Yield the sources with fewer known tokens than they should have, each with its bounds."""
        for s in sources:
            if not is_short(s, self.targets_S[s]):
                continue  # the usual case, decided without looking at more
            least, most = self.bounds_of(s, known_S[s].token_bytes)
            if is_short(s, least):
                yield s, least, most

    def drop_known(self, sources: Iterable[int], is_short: IsShort) -> None:
        """Remove the sources from ``short`` that have enough known tokens by now."""
        for s in self.short.intersection(sources):
            if not is_short(s, self.needs_S[s]):
                self.short.remove(s)


def _needs_of(mix: MixConfig, state: MixState, steps: int, known_S: Sequence[Weighed]) -> list[int]:
    """Return the tokens of each source that the next steps are likely to draw; at least 1 where they draw any."""
    weights = weights_at(mix.mix.stages, mix.names, state.step)
    if mix.mix.counted == "sample" or mix.pack.method == "none":
        return _needs_by_number(mix, weights, steps, known_S)
    budget = (mix.rows_per_step * steps + mix.rows_ahead) * mix.pack.length
    return [
        max(1, int(weight * budget + credit / WEIGHT_ONE)) if weight > 0 else 0
        for weight, credit in zip(weights, state.credits_S, strict=True)
    ]


def _needs_by_number(
    mix: MixConfig, weights: Sequence[float], steps: int, known_S: Sequence[Weighed]
) -> list[int]:
    """Return the needs where samples or rows are drawn by number, by the mean length of the samples seen so far.

    It is 1 of each source while samples of one were not seen. With 1 later too, a plan would begin with whatever is
    known, and mostly hold a single step.
    """
    has_rows_alone = mix.pack.method == "none"
    # A row alone takes at most a row's tokens of a sample.
    most = mix.pack.length if has_rows_alone else math.inf
    means = [min(known.sample_tokens, most) for _, known in zip(weights, known_S, strict=False)]
    if any(weight > 0 and not mean for weight, mean in zip(weights, means, strict=True)):
        return [1 if weight > 0 else 0 for weight in weights]
    shares = [
        w * mean if mix.mix.counted == "sample" else w
        for w, mean in zip(weights, means, strict=True)
    ]
    rows = mix.rows_per_step * steps
    if has_rows_alone:
        tokens = rows / sum(
            share / mean for share, mean in zip(shares, means, strict=True) if share > 0
        )
    else:
        tokens = (rows + mix.rows_ahead) * mix.pack.length / sum(shares)
    return [max(1, int(share * tokens)) if share > 0 else 0 for share in shares]


def _targets_of(history: History, step: int, needs_S: Sequence[int]) -> list[int]:
    """Return the tokens of each source that the steps from ``step`` on are likely to draw, over several plans.

    An edit of a coming step counts, so that its sources are read before it takes effect.
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

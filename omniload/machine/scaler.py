"""The Scaler machine: which source loaders there are, and which sources each serves, while a plane runs.

The obvious rule, to deal all sources anew whenever their costs have changed, moves most of them
each time, for a gain that the next change undoes. Here one loader is relieved at a time, and only
what is needed moves. Between the two thresholds nothing does::

    load of a loader, in cores
      0.85 ──  above it for 20 s: its lighter part moves, to a loader with room or to a new one
      0.70 ──  a loader with room is filled up to here
      0.40 ──  two loaders that are together below it for 2 minutes become one

A load is a moving average, or what the mix will make of it soon where that is more: loaders are
there before a stage begins that needs them. Changes are bought with an allowance that grows
slowly, so no mix, however it swings, has sources moved to and fro.

Source:
    OVERLORD / Omniload / MegaScale-Data, arXiv 2504.09844, on scaling with the mixture; thresholds,
    windows and the allowance are ours.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from omniload.plan.balance_methods import balance

__all__ = [
    "LoadersSeen",
    "MergeLoader",
    "MoveSources",
    "Scaler",
    "ScalerCommand",
    "SplitLoader",
    "WorkMeter",
]

_OVER, _FILLED, _UNDER = 0.85, 0.7, 0.4
_HELD_UP = 0.5
"""Load from which a loader is relieved that the planner waits for half of the time."""
_LEAST_PART = 0.1
"""Load below which moving sources is worth nothing."""
_AVERAGE_S = 30.0
_OVER_S, _UNDER_S = 20.0, 120.0
_SETTLE_S = 30.0
"""From one change to the next: averages show by then what the first has done."""
_REGAIN_S = 600.0
"""The allowance grows by one change in this time."""


class WorkMeter:
    """Adds up what each life of each loader has done for its sources, and says how fast it grows."""

    def __init__(self) -> None:
        self._last: dict[tuple[str, int], tuple[float, int]] = {}
        self._done: dict[int, tuple[float, int]] = {}
        self._since_s: float | None = None

    def see(self, loader: str, work: Mapping[int, tuple[float, int]]) -> None:
        """Take in what one life of a loader has done so far: processor seconds and tokens of each source."""
        for source, (busy_s, tokens) in work.items():
            last_s, last_tokens = self._last.get((loader, source), (0.0, 0))
            done_s, done_tokens = self._done.get(source, (0.0, 0))
            self._done[source] = done_s + busy_s - last_s, done_tokens + tokens - last_tokens
            # By life: one that follows counts from nothing, and its first word would seem to be less than none.
            self._last[loader, source] = busy_s, tokens

    def since_last(self, now_s: float) -> tuple[dict[int, float], dict[int, float]]:
        """Return cores and tokens a second of each source since this was asked last; nothing the first time."""
        since_s, done = self._since_s, self._done
        self._since_s, self._done = now_s, {}
        passed_s = 0.0 if since_s is None else now_s - since_s
        if passed_s <= 0:
            return {}, {}
        return (
            {source: busy_s / passed_s for source, (busy_s, _) in done.items()},
            {source: tokens / passed_s for source, (_, tokens) in done.items()},
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadersSeen:
    """The shell has asked all loaders what they have done since it asked last."""

    now_s: float
    """By a clock that never goes back."""
    sources_of: Mapping[str, Sequence[int]]
    """Sources that each loader serves."""
    busy_S: Mapping[int, float]
    """Cores that reading each source has kept busy."""
    tokens_S: Mapping[int, float]
    """Tokens of each source that were read, a second."""
    shares_S: Mapping[int, float]
    """Share of each source in the mix at the step that is planned next."""
    soon_S: Mapping[int, float]
    """Its greatest share in the steps until another loader could be there."""
    waited: frozenset[str] = frozenset()
    """Loaders that the planner waits for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitLoader:
    """Start another loader and move sources to it."""

    role: str
    """The loader that serves them."""
    sources: tuple[int, ...]
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class MoveSources:
    """Move sources to a loader that has room."""

    role: str
    """The loader that serves them."""
    sources: tuple[int, ...]
    to: str
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class MergeLoader:
    """Move all sources of a loader to another, and end it."""

    role: str
    sources: tuple[int, ...]
    to: str
    why: str


ScalerCommand = SplitLoader | MoveSources | MergeLoader


@dataclass(slots=True, kw_only=True)
class Scaler:
    """Changes one loader at a time, and at most ``most`` of them at once and one more every ten minutes."""

    least: int
    """Loaders that are never merged further."""
    most: int
    """Loaders that there are at most; also the changes that the allowance begins with."""
    cost_S: Mapping[int, float]
    """Processor seconds of a token of each source, as measured before or of its kind: of those not read yet."""
    _busy_S: dict[int, float] = field(default_factory=dict, init=False)
    _tokens_S: dict[int, float] = field(default_factory=dict, init=False)
    _waited: dict[str, float] = field(default_factory=dict, init=False)
    """Share of the time that the planner waits for each loader."""
    _over_since_s: dict[str, float] = field(default_factory=dict, init=False)
    _under_since_s: float | None = field(default=None, init=False)
    _seen_s: float | None = field(default=None, init=False)
    _changed_s: float = field(default=-math.inf, init=False)
    _allowance: float = field(init=False)

    def __post_init__(self) -> None:
        # To begin with, a change for each loader that may come to be: a plane finds its size without waiting.
        self._allowance = self.most

    def handle(self, seen: LoadersSeen) -> tuple[ScalerCommand, ...]:
        """Apply one look at all loaders; return the one change that is due, or none."""
        self._average(seen)
        load_S = self._loads(seen)
        loads = {role: sum(load_S[s] for s in each) for role, each in seen.sources_of.items()}
        self._note_thresholds(loads, seen.now_s)
        # Looked at first, changed last: averages and times over a threshold go on while nothing may be changed.
        if self._allowance < 1 or seen.now_s < self._changed_s + _SETTLE_S:
            return ()
        command = self._relief(seen, load_S, loads) or self._merger(seen, loads)
        if command is None:
            return ()
        self._allowance -= 1
        self._changed_s = seen.now_s
        # What was measured so far is of loaders that there were before the change.
        self._over_since_s.clear()
        self._under_since_s = None
        return (command,)

    def _average(self, seen: LoadersSeen) -> None:
        passed_s = 0.0 if self._seen_s is None else max(0.0, seen.now_s - self._seen_s)
        self._seen_s = seen.now_s
        self._allowance = min(float(self.most), self._allowance + passed_s / _REGAIN_S)
        # An average over time, not over looks, which come unevenly.
        part = 1 - math.exp(-passed_s / _AVERAGE_S)
        for averages, found in ((self._busy_S, seen.busy_S), (self._tokens_S, seen.tokens_S)):
            for s in averages.keys() | found.keys():
                before = averages.get(s, 0.0)
                averages[s] = before + part * (found.get(s, 0.0) - before)
        waited = {role: float(role in seen.waited) for role in seen.sources_of}
        self._waited = {
            role: (old := self._waited.get(role, 0.0)) + part * (now - old)
            for role, now in waited.items()
        }

    def _loads(self, seen: LoadersSeen) -> dict[int, float]:
        """Return the cores that each source takes, or soon will."""
        tokens_per_s = sum(self._tokens_S.values())
        loads = {}
        for s in {s for each in seen.sources_of.values() for s in each}:
            busy, soon = self._busy_S.get(s, 0.0), seen.soon_S.get(s, 0.0)
            # What it takes now, scaled by the mix: measured in this run, which the cost of a profile is not.
            if now := seen.shares_S.get(s, 0.0):
                expected = busy * soon / now
            else:
                expected = tokens_per_s * soon * self.cost_S.get(s, 0.0)
            loads[s] = max(busy, expected)
        return loads

    def _note_thresholds(self, loads: Mapping[str, float], now_s: float) -> None:
        over = [role for role, load in loads.items() if self._is_over(role, load)]
        self._over_since_s = {role: self._over_since_s.get(role, now_s) for role in over}
        # The two lightest: where these do not fit into one, no two do.
        two = sum(sorted(loads.values())[:2])
        if len(loads) <= max(self.least, 1) or two > _UNDER:
            self._under_since_s = None
        elif self._under_since_s is None:
            self._under_since_s = now_s

    def _is_over(self, role: str, load: float) -> bool:
        return load > _OVER or (load > _HELD_UP and self._waited[role] > 0.5)

    def _relief(
        self, seen: LoadersSeen, load_S: Mapping[int, float], loads: Mapping[str, float]
    ) -> SplitLoader | MoveSources | None:
        """Return what relieves the loader of the most work that has been over for long enough."""
        late = [role for role, s in self._over_since_s.items() if seen.now_s >= s + _OVER_S]
        for role in sorted(late, key=lambda role: -loads[role]):
            part = _lighter_part(seen.sources_of[role], load_S)
            moved = sum(load_S[s] for s in part)
            if moved < _LEAST_PART:
                continue  # one source is the load: nothing that could move relieves it
            why = f"{role} keeps {loads[role]:.2f} cores busy, or soon will"
            others = {each: load for each, load in loads.items() if each != role}
            to = min(others, key=lambda each: others[each], default=None)
            # Two loaders that are alike after a move would pass the part to and fro.
            if to is not None and others[to] + moved <= min(_FILLED, loads[role] - _LEAST_PART):
                return MoveSources(role=role, sources=part, to=to, why=why)
            if len(loads) < self.most:
                return SplitLoader(role=role, sources=part, why=why)
        return None

    def _merger(self, seen: LoadersSeen, loads: Mapping[str, float]) -> MergeLoader | None:
        if self._under_since_s is None or seen.now_s < self._under_since_s + _UNDER_S:
            return None
        # The one with the fewer sources moves.
        lightest = sorted(loads, key=lambda role: loads[role])[:2]
        role, to = sorted(lightest, key=lambda role: len(seen.sources_of[role]))
        why = f"{role} and {to} keep {loads[role] + loads[to]:.2f} cores busy together"
        return MergeLoader(role=role, sources=tuple(seen.sources_of[role]), to=to, why=why)


def _lighter_part(sources: Sequence[int], load_S: Mapping[int, float]) -> tuple[int, ...]:
    """Return about half of the work of a loader: the half without its heaviest source."""
    if len(sources) < 2:
        return ()
    work = np.asarray([load_S[s] for s in sources])
    bins = balance(work, 2).bins_N
    return tuple(s for s, b in zip(sources, bins.tolist(), strict=True) if b != bins[work.argmax()])

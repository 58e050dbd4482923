"""The Scaler machine: decides which source loaders there are and which sources each serves, while a plane runs.

The obvious rule, to deal all sources anew whenever their costs have changed, moves most of them
each time, for a gain that the next change undoes. Here one loader is relieved at a time, and only
the necessary sources move. Between the thresholds nothing changes::

    load of a loader: busy cores, or a quarter of its concurrent reads
      0.85 ──  above it for 20 s: its lighter part moves, to a loader with room or to a new one
      0.70 ──  a loader with room is filled up to here
      0.40 ──  two loaders that are together below it for 2 minutes become one

A load is a moving average, or the load that the mix will soon cause if that is more, so loaders are
there before a stage that needs them begins. A second signal is how full the read-ahead of each source
is (``scaling.meters``). A loader with two sources that run empty is relieved whatever its load, and its
parts stay apart as long as the mix draws as much from them. Two loaders that are always full are merged
below 0.48 already. Each change is paid from an allowance that grows slowly, so sources do not move to
and fro however a mix or a store swings.

Source:
    OVERLORD / Omniload / MegaScale-Data, arXiv 2504.09844, on scaling with the mixture; thresholds,
    windows and the allowance are ours.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations

import numpy as np

from omniload.machine.scaling.meters import Occupancy
from omniload.plan.balance_methods import balance

__all__ = [
    "LoadersSeen",
    "MergeLoader",
    "MoveSources",
    "Scaler",
    "ScalerCommand",
    "SplitLoader",
]

_OVER, _FILLED, _UNDER = 0.85, 0.7, 0.4
_HELD_UP = 0.5
"""Load above which a loader is relieved if the planner waits for it half of the time."""
_UNDER_FULL = 0.48
"""As ``_UNDER``, for two loaders that are always full; it lies below ``_HELD_UP``."""
_LEAST_PART = 0.1
"""Load below which moving sources is not worthwhile."""
_AVERAGE_S = 30.0
_OVER_S, _UNDER_S = 20.0, 120.0
_SETTLE_S = 30.0
"""Time from one change to the next, so that averages show the effect of the first."""
_REGAIN_S = 600.0
"""The allowance grows by one change in this time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadersSeen:
    """The shell has asked all loaders for their work since the last time."""

    now_s: float
    """Time of a monotonic clock."""
    sources_of: Mapping[str, Sequence[int]]
    """Sources that each loader serves."""
    busy_S: Mapping[int, float]
    """Fraction of a loader that each source kept busy: of its core, or of its four concurrent reads."""
    tokens_S: Mapping[int, float]
    """Tokens read per second, by source."""
    shares_S: Mapping[int, float]
    """Share of each source in the mix at the step that is planned next."""
    soon_S: Mapping[int, float]
    """Its greatest share in the steps until another loader could be there."""
    waited: frozenset[str] = frozenset()
    """Loaders that the planner is waiting for."""
    filled_S: Mapping[int, float] | None = None
    """Known fraction of the read-ahead target of each source below its target; ``None`` if no planner reports it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitLoader:
    """Start another loader and move sources to it."""

    role: str
    """The loader that serves them now."""
    sources: tuple[int, ...]
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class MoveSources:
    """Move sources to a loader that has room."""

    role: str
    """The loader that serves them now."""
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
    """Changes one loader at a time; ``most`` changes in a row at first, and one more every ten minutes."""

    least: int
    """Least number of loaders; merging stops there."""
    most: int
    """Largest number of loaders; the allowance also begins with as many changes."""
    cost_S: Mapping[int, float]
    """Processor seconds per token of each source, by its profile or its kind; used until the source is read."""
    _busy_S: dict[int, float] = field(default_factory=dict, init=False)
    _tokens_S: dict[int, float] = field(default_factory=dict, init=False)
    _waited: dict[str, float] = field(default_factory=dict, init=False)
    """Share of the time that the planner waits for each loader."""
    _occupancy: Occupancy = field(default_factory=Occupancy, init=False)
    _over_since_s: dict[str, float] = field(default_factory=dict, init=False)
    _under_since_s: float | None = field(default=None, init=False)
    _seen_s: float | None = field(default=None, init=False)
    _changed_s: float = field(default=-math.inf, init=False)
    _allowance: float = field(init=False)

    def __post_init__(self) -> None:
        # The allowance begins with a change for each possible loader, so that a plane finds its size without waiting.
        self._allowance = self.most

    def handle(self, seen: LoadersSeen) -> tuple[ScalerCommand, ...]:
        """Apply one look at all loaders; return the one change that is due, or none."""
        self._average(seen)
        load_S = self._loads(seen)
        loads = {role: sum(load_S[s] for s in each) for role, each in seen.sources_of.items()}
        self._note_thresholds(seen, loads)
        # The signals are updated first, because averages and times go on while no change is allowed.
        if self._allowance < 1 or seen.now_s < self._changed_s + _SETTLE_S:
            return ()
        command = self._relief(seen, load_S, loads) or self._merger(seen, loads)
        if command is None:
            return ()
        self._allowance -= 1
        self._changed_s = seen.now_s
        # The measurements so far belong to the loaders before the change.
        self._over_since_s.clear()
        self._under_since_s = None
        return (command,)

    def _average(self, seen: LoadersSeen) -> None:
        passed_s = 0.0 if self._seen_s is None else max(0.0, seen.now_s - self._seen_s)
        self._seen_s = seen.now_s
        self._allowance = min(float(self.most), self._allowance + passed_s / _REGAIN_S)
        # An average over time, not over looks, because looks come at uneven intervals.
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
        served = [s for each in seen.sources_of.values() for s in each]
        self._occupancy.hear(seen.filled_S, served, part, passed_s)

    def _loads(self, seen: LoadersSeen) -> dict[int, float]:
        """Return the fraction of a loader that each source takes now or will take soon."""
        tokens_per_s = sum(self._tokens_S.values())
        loads = {}
        for s in {s for each in seen.sources_of.values() for s in each}:
            busy, soon = self._busy_S.get(s, 0.0), seen.soon_S.get(s, 0.0)
            # The present load scaled by the mix, because it was measured in this run, unlike the cost of a profile.
            if now := seen.shares_S.get(s, 0.0):
                expected = busy * soon / now
            else:
                expected = tokens_per_s * soon * self.cost_S.get(s, 0.0)
            loads[s] = max(busy, expected)
        return loads

    def _note_thresholds(self, seen: LoadersSeen, loads: Mapping[str, float]) -> None:
        now_s = seen.now_s
        over = [
            role
            for role, load in loads.items()
            if self._is_over(role, load) or self._runs_empty(seen, role)
        ]
        self._over_since_s = {role: self._over_since_s.get(role, now_s) for role in over}
        if self._pair(seen, loads) is None:
            self._under_since_s = None
        elif self._under_since_s is None:
            self._under_since_s = now_s

    def _is_over(self, role: str, load: float) -> bool:
        return load > _OVER or (load > _HELD_UP and self._waited[role] > 0.5)

    def _runs_empty(self, seen: LoadersSeen, role: str) -> bool:
        sources = seen.sources_of[role]
        # The reads of a single source hold up no others; only more readers of that source could help.
        several = len(self._occupancy.empty(sources)) > 1
        return several and self._occupancy.may_relieve(sources, seen.soon_S)

    def _relief(
        self, seen: LoadersSeen, load_S: Mapping[int, float], loads: Mapping[str, float]
    ) -> SplitLoader | MoveSources | None:
        """Return the change that relieves the busiest loader that has been overloaded, or empty, for long enough."""
        late = [role for role, s in self._over_since_s.items() if seen.now_s >= s + _OVER_S]
        for role in sorted(late, key=lambda role: -loads[role]):
            command = None
            if self._is_over(role, loads[role]):
                command = self._by_load(seen, load_S, loads, role)
            if command is None and self._runs_empty(seen, role):
                command = self._by_emptiness(seen, load_S, loads, role)
            if command is not None:
                return command
        return None

    def _by_load(
        self,
        seen: LoadersSeen,
        load_S: Mapping[int, float],
        loads: Mapping[str, float],
        role: str,
    ) -> SplitLoader | MoveSources | None:
        """Return the change that takes about half of its load from a loader."""
        sources, load = seen.sources_of[role], loads[role]
        part = _lighter_part(sources, load_S)
        moved = sum(load_S[s] for s in part)
        if moved < _LEAST_PART:
            return None  # a single source makes the load, and moving others would not help
        busy, waited = sum(self._busy_S.get(s, 0.0) for s in sources), self._waited[role]
        why = f"{role} has the work of {min(busy, load):.2f} loaders"
        if load > max(busy, _OVER):
            why += f", and of {load:.2f} by what the mix draws soon"
        elif load <= _OVER:
            why += f", and is waited for {waited:.0%} of the time"
        # Otherwise two loaders that are alike after a move would pass the part to and fro.
        most = min(_FILLED, load - _LEAST_PART)
        fitting = {each: at for each, at in loads.items() if each != role and at + moved <= most}
        return self._moved(role, part, fitting, len(loads), why)

    def _by_emptiness(
        self,
        seen: LoadersSeen,
        load_S: Mapping[int, float],
        loads: Mapping[str, float],
        role: str,
    ) -> SplitLoader | MoveSources | None:
        """Return the change that takes about half of the empty sources from a loader."""
        occupancy, sources = self._occupancy, seen.sources_of[role]
        empty = occupancy.empty(sources)
        part = _lighter_part(empty, {s: 1 - occupancy.filled_S[s] for s in empty})
        moved = sum(load_S[s] for s in part)
        there = f"{occupancy.mean(empty):.0%} is there"
        why = f"{role} runs empty: of what it is to read ahead of {len(empty)} sources {there}"
        fitting = {
            each: at
            for each, at in loads.items()
            if at + moved <= _FILLED and occupancy.is_full(seen.sources_of[each])
        }
        command = self._moved(role, part, fitting, len(loads), why)
        if command is not None:
            occupancy.note_relief(empty, seen.soon_S)
        return command

    def _moved(
        self,
        role: str,
        part: tuple[int, ...],
        fitting: Mapping[str, float],
        num_loaders: int,
        why: str,
    ) -> SplitLoader | MoveSources | None:
        """Return the move of a part of a loader: to the least loaded one with room for it, or to a new one."""
        if fitting:
            to = min(fitting, key=lambda each: fitting[each])
            return MoveSources(role=role, sources=part, to=to, why=why)
        if num_loaders < self.most:
            return SplitLoader(role=role, sources=part, why=why)
        return None

    def _pair(self, seen: LoadersSeen, loads: Mapping[str, float]) -> tuple[str, str] | None:
        """Return the two least loaded loaders that may be merged; ``None`` if there are none."""
        if len(loads) <= max(self.least, 1):
            return None
        occupancy = self._occupancy
        ordered = sorted(loads, key=lambda role: loads[role])
        pairs = sorted(combinations(ordered, 2), key=lambda pair: loads[pair[0]] + loads[pair[1]])
        for one, other in pairs:
            sources = [*seen.sources_of[one], *seen.sources_of[other]]
            most = _UNDER_FULL if occupancy.is_full(sources) else _UNDER
            if loads[one] + loads[other] <= most and occupancy.may_merge(sources, seen.soon_S):
                return one, other
        return None

    def _merger(self, seen: LoadersSeen, loads: Mapping[str, float]) -> MergeLoader | None:
        if self._under_since_s is None or seen.now_s < self._under_since_s + _UNDER_S:
            return None
        pair = self._pair(seen, loads)
        assert pair is not None, "it is noted at each look"
        # The one with the fewer sources moves.
        role, to = sorted(pair, key=lambda role: len(seen.sources_of[role]))
        sources = [*seen.sources_of[role], *seen.sources_of[to]]
        full = ", and what they read ahead is full" if self._occupancy.is_full(sources) else ""
        why = (
            f"{role} and {to} have the work of {loads[role] + loads[to]:.2f} loaders together{full}"
        )
        self._occupancy.note_merger(sources)
        return MergeLoader(role=role, sources=tuple(seen.sources_of[role]), to=to, why=why)


def _lighter_part(sources: Sequence[int], load_S: Mapping[int, float]) -> tuple[int, ...]:
    """Return about half of the work of a loader: the half without its heaviest source."""
    if len(sources) < 2:
        return ()
    work = np.asarray([load_S[s] for s in sources])
    bins = balance(work, 2).bins_N
    return tuple(s for s, b in zip(sources, bins.tolist(), strict=True) if b != bins[work.argmax()])

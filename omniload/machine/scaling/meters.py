"""Signals for the number of loaders: the work of each source, and how full its read-ahead is.

The occupancy that the planner sees shows what processor time does not: that reads which wait for a store,
or in a transform, also wait for each other::

    known fraction of a source's read-ahead target, on average
      0.90 ──  above it for all of their sources, two loaders may become one sooner
      0.60 ──  a loader with a source below it is merged with none
      0.30 ──  below it a source runs empty

Shape suffixes:
    S  sources
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

__all__ = ["Occupancy", "WorkMeter"]

_EMPTY, _LOW, _FULL = 0.3, 0.6, 0.9
_GAIN, _RISE = 0.1, 1.5
"""A source that was moved because it ran empty is moved again only if it has become fuller by the first number since,
or its share has grown by the second factor."""
_FALLEN = 0.5
"""It may be merged again once its share has fallen to this fraction of the share then."""
_LAPSE_S = 3600.0
"""It may also be merged once it has been full for this long, because the cause may be over."""


class WorkMeter:
    """Adds up the work of all lives of each loader for its sources, and returns its rate."""

    def __init__(self) -> None:
        self._last: dict[tuple[str, int], tuple[float, int]] = {}
        self._done: dict[int, tuple[float, int]] = {}
        self._since_s: float | None = None

    def see(self, loader: str, work: Mapping[int, tuple[float, int]]) -> None:
        """Add the work of one life of a loader so far: seconds of its time, and tokens, for each source."""
        for source, (busy_s, tokens) in work.items():
            last_s, last_tokens = self._last.get((loader, source), (0.0, 0))
            done_s, done_tokens = self._done.get(source, (0.0, 0))
            self._done[source] = done_s + busy_s - last_s, done_tokens + tokens - last_tokens
            # Kept by life: a new life counts from zero, and its first report would look like a decrease.
            self._last[loader, source] = busy_s, tokens

    def since_last(self, now_s: float) -> tuple[dict[int, float], dict[int, float]]:
        """Return, for each source, the fraction of a loader and the tokens per second since the last call."""
        since_s, done = self._since_s, self._done
        self._since_s, self._done = now_s, {}
        passed_s = 0.0 if since_s is None else now_s - since_s
        if passed_s <= 0:
            return {}, {}
        return (
            {source: busy_s / passed_s for source, (busy_s, _) in done.items()},
            {source: tokens / passed_s for source, (_, tokens) in done.items()},
        )


@dataclass(slots=True)
class _Relieved:
    """The state of a source when its loader was relieved because the source ran empty."""

    filled: float
    share: float
    full_s: float = 0.0
    """For how long it has been full."""


@dataclass(slots=True)
class Occupancy:
    """The average occupancy of each source's read-ahead, and the moves that were made because of it."""

    filled_S: dict[int, float] = field(default_factory=dict)
    """Known fraction of each source's target; empty until a planner has reported it."""
    _now_S: Mapping[int, float] = field(default_factory=dict, init=False)
    """The last report."""
    _relieved_S: dict[int, _Relieved] = field(default_factory=dict, init=False)
    _tried: set[int] = field(default_factory=set, init=False)
    """Sources that were merged after having been full for long; done once, so that they do not move to and fro."""

    def hear(
        self,
        filled_S: Mapping[int, float] | None,
        sources: Collection[int],
        part: float,
        passed_s: float = 0.0,
    ) -> None:
        """Add a report of the planner.

        Args:
            filled_S: Known fraction of the target of each source below its target; ``None`` without a planner's
                report, which changes nothing.
            sources: All served sources.
            part: Weight of this report in the average.
            passed_s: Seconds since the last report.
        """
        if filled_S is not None:
            self._now_S = filled_S
            # Full until reported otherwise, because nothing is known yet when a plane begins.
            self.filled_S = {
                s: (old := self.filled_S.get(s, 1.0)) + part * (filled_S.get(s, 1.0) - old)
                for s in sources
            }
            for s, each in self._relieved_S.items():
                is_full = self.filled_S.get(s, 1.0) >= _FULL
                each.full_s = each.full_s + passed_s if is_full else 0.0

    def empty(self, sources: Collection[int]) -> list[int]:
        """Return the sources that run empty."""
        return [s for s in sources if self.filled_S.get(s, 1.0) < _EMPTY]

    def is_full(self, sources: Collection[int]) -> bool:
        """Return whether all these sources are known to be always full."""
        return bool(self.filled_S) and all(self.filled_S.get(s, 1.0) >= _FULL for s in sources)

    def mean(self, sources: Collection[int]) -> float:
        """Return the mean occupancy of these sources."""
        return sum(self.filled_S.get(s, 1.0) for s in sources) / max(1, len(sources))

    def may_relieve(self, sources: Collection[int], shares_S: Mapping[int, float]) -> bool:
        """Return whether moving some of a loader's sources may help to fill them.

        It may not if that was done before and they are no fuller since, and not drawn from much more either.
        """
        then = {s: self._relieved_S[s] for s in sources if s in self._relieved_S}
        if not then:
            return True
        before = sum(each.filled for each in then.values()) / len(then)
        if self.mean(then) >= before + _GAIN:
            return True
        share = sum(each.share for each in then.values())
        return sum(shares_S.get(s, 0.0) for s in then) > _RISE * share

    def note_relief(self, sources: Collection[int], shares_S: Mapping[int, float]) -> None:
        """Note that some of these sources are moved because they run empty together."""
        for s in sources:
            # The present value, because an average that is still falling would look worse after any move.
            filled = min(self.filled_S[s], self._now_S.get(s, 1.0))
            self._relieved_S[s] = _Relieved(filled, shares_S.get(s, 0.0))

    def may_merge(self, sources: Collection[int], shares_S: Mapping[int, float]) -> bool:
        """Return whether one loader may serve all these sources.

        It may not if one of them is low, or if one was relieved and is still drawn from as much, unless it has been
        full for an hour since.
        """
        if any(self.filled_S.get(s, 1.0) < _LOW for s in sources):
            return False
        then = {
            s: self._relieved_S[s].share
            for s in sources
            if s in self._relieved_S and not self._has_lapsed(s)
        }
        # Also true if the source was not drawn from then, and is not now.
        return sum(shares_S.get(s, 0.0) for s in then) <= _FALLEN * sum(then.values())

    def note_merger(self, sources: Collection[int]) -> None:
        """Note that one loader serves these sources from now on."""
        for s in sources:
            if self._has_lapsed(s):
                self._tried.add(s)
            self._relieved_S.pop(s, None)

    def _has_lapsed(self, source: int) -> bool:
        then = self._relieved_S.get(source)
        return then is not None and then.full_s >= _LAPSE_S and source not in self._tried

"""What the number of loaders follows: the work of each source, and how full is what is read ahead of it.

How full the planner finds a source says what no processor time does: that reads which wait for a
store, or for a transform, wait for each other too::

    part of its target that is known of a source, on average
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
"""What was moved as it ran empty is moved once more if it is fuller by the first since, or drawn so many times more."""
_FALLEN = 0.5
"""Part of what was drawn of it then, from which on down it may be merged again."""
_LAPSE_S = 3600.0
"""Once it has been full for so long, whatever is drawn of it: what it waited for may be over."""


class WorkMeter:
    """Adds up what each life of each loader has done for its sources, and says how fast it grows."""

    def __init__(self) -> None:
        self._last: dict[tuple[str, int], tuple[float, int]] = {}
        self._done: dict[int, tuple[float, int]] = {}
        self._since_s: float | None = None

    def see(self, loader: str, work: Mapping[int, tuple[float, int]]) -> None:
        """Take in what one life of a loader has done so far: seconds of its time and tokens of each source."""
        for source, (busy_s, tokens) in work.items():
            last_s, last_tokens = self._last.get((loader, source), (0.0, 0))
            done_s, done_tokens = self._done.get(source, (0.0, 0))
            self._done[source] = done_s + busy_s - last_s, done_tokens + tokens - last_tokens
            # By life: one that follows counts from nothing, and its first word would seem to be less than none.
            self._last[loader, source] = busy_s, tokens

    def since_last(self, now_s: float) -> tuple[dict[int, float], dict[int, float]]:
        """Return the part of a loader, and tokens a second, of each source since the last call; nothing at first."""
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
    """How a source stood when its loader was relieved, as it ran empty."""

    filled: float
    share: float
    full_s: float = 0.0
    """How long it has been full by now."""


@dataclass(slots=True)
class Occupancy:
    """How full what is read ahead of each source is, on average, and what was done about it."""

    filled_S: dict[int, float] = field(default_factory=dict)
    """Part of its target that is known of each source; nothing until a planner has said so."""
    _now_S: Mapping[int, float] = field(default_factory=dict, init=False)
    """As was heard last."""
    _relieved_S: dict[int, _Relieved] = field(default_factory=dict, init=False)
    _tried: set[int] = field(default_factory=set, init=False)
    """Sources that were merged as they had been full for long: once, for else they would be moved to and fro."""

    def hear(
        self,
        filled_S: Mapping[int, float] | None,
        sources: Collection[int],
        part: float,
        passed_s: float = 0.0,
    ) -> None:
        """Take in what a planner says.

        Args:
            filled_S: Part of its target that is known of each source where that is not all; ``None`` where no planner
                says so, which changes nothing.
            sources: All that are served.
            part: Of the average that is of now.
            passed_s: Seconds since the last time.
        """
        if filled_S is not None:
            self._now_S = filled_S
            # Full until something else is heard: a plane begins with nothing known.
            self.filled_S = {
                s: (old := self.filled_S.get(s, 1.0)) + part * (filled_S.get(s, 1.0) - old)
                for s in sources
            }
            for s, each in self._relieved_S.items():
                is_full = self.filled_S.get(s, 1.0) >= _FULL
                each.full_s = each.full_s + passed_s if is_full else 0.0

    def empty(self, sources: Collection[int]) -> list[int]:
        """Return those that run empty."""
        return [s for s in sources if self.filled_S.get(s, 1.0) < _EMPTY]

    def is_full(self, sources: Collection[int]) -> bool:
        """Tell whether all are known to be always full."""
        return bool(self.filled_S) and all(self.filled_S.get(s, 1.0) >= _FULL for s in sources)

    def mean(self, sources: Collection[int]) -> float:
        """Return how full they are."""
        return sum(self.filled_S.get(s, 1.0) for s in sources) / max(1, len(sources))

    def may_relieve(self, sources: Collection[int], shares_S: Mapping[int, float]) -> bool:
        """Tell whether moving some of a loader's sources may fill them.

        Unless that was done, and they are no fuller by it, nor much more drawn since.
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
        """Note that some of these are moved, as they run empty together."""
        for s in sources:
            # An average that still falls would seem to be worse later, whatever this has done.
            filled = min(self.filled_S[s], self._now_S.get(s, 1.0))
            self._relieved_S[s] = _Relieved(filled, shares_S.get(s, 0.0))

    def may_merge(self, sources: Collection[int], shares_S: Mapping[int, float]) -> bool:
        """Tell whether one loader may serve these.

        None is low, or was relieved, is drawn as much as then, and has not been full for an hour since.
        """
        if any(self.filled_S.get(s, 1.0) < _LOW for s in sources):
            return False
        then = {
            s: self._relieved_S[s].share
            for s in sources
            if s in self._relieved_S and not self._has_lapsed(s)
        }
        # Also where nothing was drawn of them then, and nothing is now.
        return sum(shares_S.get(s, 0.0) for s in then) <= _FALLEN * sum(then.values())

    def note_merger(self, sources: Collection[int]) -> None:
        """Note that one loader serves these from now on."""
        for s in sources:
            if self._has_lapsed(s):
                self._tried.add(s)
            self._relieved_S.pop(s, None)

    def _has_lapsed(self, source: int) -> bool:
        then = self._relieved_S.get(source)
        return then is not None and then.full_s >= _LAPSE_S and source not in self._tried

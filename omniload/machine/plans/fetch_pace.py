"""How many batches a rank fetches per call through Ray, and whether they are only lent, by the pace of its steps.

A rank trains on every batch that it was given, so a change of the mix takes effect after those. But a call costs half a
millisecond, however many batches it brings. So short steps are fetched many at a time, and long ones when needed.
"""

from collections import deque

__all__ = ["FetchPace"]

_SPAN_S = 0.25
"""Time that the batches of one call last. As many wait at the rank as are under way, so half a second is given out."""
_LONG_S = 0.5
"""A rank with steps this long is only lent the batches that it fetches ahead; confirming one takes milliseconds."""


class FetchPace:
    """The pace at which one rank takes its batches."""

    def __init__(self, most: int) -> None:
        """Fetch up to ``most`` batches per call, as many as are planned together."""
        self._most = most
        self._taken_s: float | None = None
        self._steps_s = deque[float](maxlen=2)
        """Durations of the last two steps, where known. The shorter one counts: the other may hold a checkpoint."""

    def take(self, now_s: float) -> None:
        """Note that a batch is handed out; the time between two of these is a step with its wait."""
        if self._taken_s is not None:
            self._steps_s.append(now_s - self._taken_s)
        self._taken_s = now_s

    @property
    def at_once(self) -> int:
        """Batches to ask for; one while no step has been timed."""
        if not self._steps_s:
            return 1
        step_s = min(self._steps_s)
        return self._most if step_s * self._most <= _SPAN_S else max(1, int(_SPAN_S / step_s))

    @property
    def is_slow(self) -> bool:
        """Whether the last two steps were long; ``False`` while fewer have been timed."""
        return len(self._steps_s) == 2 and min(self._steps_s) >= _LONG_S

"""How many batches a rank fetches at once through Ray, and whether they are lent to it: by the pace of its steps.

What a rank was given it trains on, so a change of the mix holds behind that. A call costs half a millisecond, whatever
it brings: short steps are fetched many at once, and long ones as they are needed.
"""

from collections import deque

__all__ = ["FetchPace"]

_SPAN_S = 0.25
"""Time for which batches are fetched at once. As many lie at hand as are asked for: half a second of steps is given."""
_LONG_S = 0.5
"""A rank whose steps take so long is lent what it fetches ahead: to have it confirmed takes milliseconds."""


class FetchPace:
    """The pace at which one rank takes its batches."""

    def __init__(self, most: int) -> None:
        """Fetch up to ``most`` batches at once: as many as are planned together."""
        self._most = most
        self._taken_s: float | None = None
        self._steps_s = deque[float](maxlen=2)
        """What the last two steps took, where known: the shorter counts, as the other may have been a checkpoint."""

    def take(self, now_s: float) -> None:
        """Note that a batch is handed out: from one to the next is a step, with its wait."""
        if self._taken_s is not None:
            self._steps_s.append(now_s - self._taken_s)
        self._taken_s = now_s

    @property
    def at_once(self) -> int:
        """Batches to ask for; one while no step is known."""
        if not self._steps_s:
            return 1
        step_s = min(self._steps_s)
        return self._most if step_s * self._most <= _SPAN_S else max(1, int(_SPAN_S / step_s))

    @property
    def is_slow(self) -> bool:
        """Whether the last two steps were long; not while fewer are known."""
        return len(self._steps_s) == 2 and min(self._steps_s) >= _LONG_S

"""Calls to stores that are under way in this process: what a wait that is stuck can be blamed on."""

import itertools
import statistics
import time
from collections import deque

__all__ = [
    "ENDED_CALLS",
    "RECENT_CALL",
    "USUAL_CALL",
    "calls_under_way",
    "figures_of_calls",
    "under_way",
]

USUAL_CALL, RECENT_CALL = "usual_call_seconds", "recent_call_seconds"
"""Figures of a process that reads: the median of what its last 64 calls took, and of the last eight, which tells of a
store that has become slow long before the other."""
ENDED_CALLS = "ended_calls_total"
"""Figure of how many have ended."""

_numbers = itertools.count()
_calls: dict[int, tuple[str, float]] = {}
"""By number, so that the oldest comes first. One entry is set or removed at once, so no lock is needed."""


# A median of so many tells how a store is now: what it was an hour ago blames nobody.
_ended_s: deque[float] = deque(maxlen=64)
"""How long the last calls took."""
_ENOUGH = 8
_counted = itertools.count(1)
_ended = [0]
"""How many calls have ended; of threads that end one at once, a later one may say less for a moment."""


class under_way:  # noqa: N801 -- said as a function is: ``with under_way(...)``
    """Notes a call, such as ``reads /data/0.parquet: row group 3``, while it lasts."""

    __slots__ = ("_number", "_what")

    def __init__(self, what: str) -> None:
        self._what, self._number = what, next(_numbers)

    def __enter__(self) -> None:
        _calls[self._number] = self._what, time.monotonic()

    def __exit__(self, *_: object) -> None:
        began_s = _calls.pop(self._number)[1]
        _ended_s.append(time.monotonic() - began_s)
        _ended[0] = next(_counted)


def calls_under_way() -> list[tuple[str, float]]:
    """Return the calls and the monotonic seconds at which they began, the oldest first."""
    return list(_calls.copy().values())


def figures_of_calls() -> dict[str, float]:
    """Return the figures of this process's calls: what they take, in seconds, once there were enough to tell."""
    figures: dict[str, float] = {ENDED_CALLS: _ended[0]}
    if len(ended_s := list(_ended_s)) >= _ENOUGH:
        figures[USUAL_CALL] = statistics.median(ended_s)
        figures[RECENT_CALL] = statistics.median(ended_s[-_ENOUGH:])
    return figures

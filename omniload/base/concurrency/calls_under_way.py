"""Calls to stores that are in progress in this process, so that a stuck wait can be attributed to one of them."""

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
"""Figures of a reading process: the median duration of its last 64 calls, and of the last eight, which shows much
sooner that a store has become slow."""
ENDED_CALLS = "ended_calls_total"
"""Figure: number of calls that have ended."""

_numbers = itertools.count()
_calls: dict[int, tuple[str, float]] = {}
"""Calls by number, so that the oldest comes first. Setting or removing one entry is atomic, so no lock is needed."""


# The median of this many calls shows the present speed of a store; older calls would mislead.
_ended_s: deque[float] = deque(maxlen=64)
"""Durations of the last calls."""
_ENOUGH = 8
_counted = itertools.count(1)
_ended = [0]
"""Number of calls that have ended. If threads end calls at the same time, the number may briefly be too low."""


class under_way:  # noqa: N801 -- said as a function is: ``with under_way(...)``
    """Registers a call, such as ``reads /data/0.parquet: row group 3``, while it lasts."""

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
    """Return the calls with the monotonic seconds at which they began, the oldest first."""
    return list(_calls.copy().values())


def figures_of_calls() -> dict[str, float]:
    """Return the figures of this process's calls; durations, in seconds, only after enough calls."""
    figures: dict[str, float] = {ENDED_CALLS: _ended[0]}
    if len(ended_s := list(_ended_s)) >= _ENOUGH:
        figures[USUAL_CALL] = statistics.median(ended_s)
        figures[RECENT_CALL] = statistics.median(ended_s[-_ENOUGH:])
    return figures

"""Calls to stores that are under way in this process: what a wait that is stuck can be blamed on."""

import itertools
import statistics
import time
from collections import deque

__all__ = ["calls_under_way", "under_way", "usual_call_s"]

_numbers = itertools.count()
_calls: dict[int, tuple[str, float]] = {}
"""By number, so that the oldest comes first. One entry is set or removed at once, so no lock is needed."""


# A median of so many tells how a store is now: what it was an hour ago blames nobody.
_ended_s: deque[float] = deque(maxlen=64)
"""How long the last calls took."""
_ENOUGH = 8


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


def calls_under_way() -> list[tuple[str, float]]:
    """Return the calls and the monotonic seconds at which they began, the oldest first."""
    return list(_calls.copy().values())


def usual_call_s() -> float | None:
    """Return the median of what the last calls took, in seconds; ``None`` while they are too few to tell."""
    ended_s = list(_ended_s)
    return statistics.median(ended_s) if len(ended_s) >= _ENOUGH else None

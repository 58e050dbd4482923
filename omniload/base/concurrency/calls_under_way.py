"""Calls to stores that are under way in this process: what a wait that is stuck can be blamed on."""

import itertools
import statistics
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["calls_under_way", "under_way", "usual_call_s"]

_numbers = itertools.count()
_calls: dict[int, tuple[str, float]] = {}
"""By number, so that the oldest comes first. One entry is set or removed at once, so no lock is needed."""


# A median of so many tells how a store is now: what it was an hour ago blames nobody.
_ended_s: deque[float] = deque(maxlen=64)
"""How long the last calls took."""
_ENOUGH = 8


@contextmanager
def under_way(what: str) -> Iterator[None]:
    """Note a call, such as ``reads /data/0.parquet: row group 3``, while it lasts."""
    number, began_s = next(_numbers), time.monotonic()
    _calls[number] = what, began_s
    try:
        yield
    finally:
        del _calls[number]
        _ended_s.append(time.monotonic() - began_s)


def calls_under_way() -> list[tuple[str, float]]:
    """Return the calls and the monotonic seconds at which they began, the oldest first."""
    return list(_calls.copy().values())


def usual_call_s() -> float | None:
    """Return the median of what the last calls took, in seconds; ``None`` while they are too few to tell."""
    ended_s = list(_ended_s)
    return statistics.median(ended_s) if len(ended_s) >= _ENOUGH else None

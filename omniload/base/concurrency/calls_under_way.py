"""Calls to stores that are under way in this process: what a wait that is stuck can be blamed on."""

import itertools
import time
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["calls_under_way", "under_way"]

_numbers = itertools.count()
_calls: dict[int, tuple[str, float]] = {}
"""By number, so that the oldest comes first. One entry is set or removed at once, so no lock is needed."""


@contextmanager
def under_way(what: str) -> Iterator[None]:
    """Note a call, such as ``reads /data/0.parquet: row group 3``, while it lasts."""
    number = next(_numbers)
    _calls[number] = what, time.monotonic()
    try:
        yield
    finally:
        del _calls[number]


def calls_under_way() -> list[tuple[str, float]]:
    """Return the calls and the monotonic seconds at which they began, the oldest first."""
    return list(_calls.copy().values())

"""Retrying what may succeed later, and nothing else."""

from collections.abc import Callable, Iterator, Sequence
from math import inf
from typing import TypeVar

from omniload.base.errors import UnavailableError

__all__ = ["backoff_s", "with_retries"]

Result = TypeVar("Result")


def backoff_s(
    *, first_s: float = 0.1, longest_s: float = 5.0, attempts: int = 5
) -> Iterator[float]:
    """Yield the waits between ``attempts`` attempts: each twice the one before, capped at ``longest_s``."""
    wait_s = first_s
    for _ in range(attempts - 1):
        yield min(wait_s, longest_s)
        wait_s *= 2


def with_retries(
    attempt: Callable[[], Result],
    waits_s: Sequence[float],
    sleep: Callable[[float], None],
    on_retry: Callable[[UnavailableError, float], None] | None = None,
    left_s: Callable[[], float] = lambda: inf,
) -> Result:
    """Call ``attempt`` until it answers, waiting ``waits_s`` between attempts.

    Only ``UnavailableError`` is retried: an integrity or configuration error would
    be the same the second time.

    Args:
        attempt: What is tried.
        waits_s: Waits between attempts, in seconds.
        sleep: Waits so many seconds.
        on_retry: Told of every failed attempt that is repeated, and of the wait before.
        left_s: Seconds left for all of it; a wait as long as that is not begun.

    Raises:
        UnavailableError: The last attempt's, noting how many there were if not one alone.
    """
    waited_s = 0.0
    # No wait follows the last attempt: it is longer than whatever is left.
    for attempts, wait_s in enumerate((*waits_s, inf), 1):
        try:
            return attempt()
        except UnavailableError as error:
            if wait_s == inf or wait_s >= left_s():
                if attempts > 1:
                    error.add_note(
                        f"gave up after {attempts} attempts over {waited_s:.1f} s of waiting"
                    )
                raise
            if on_retry is not None:
                on_retry(error, wait_s)
        sleep(wait_s)
        waited_s += wait_s
    raise AssertionError("the last attempt returns or raises")

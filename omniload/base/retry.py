"""Retrying calls that may succeed later, and no others."""

from collections.abc import Callable, Iterator, Sequence
from math import inf
from typing import TypeVar

from omniload.base.errors import UnavailableError

__all__ = ["backoff_s", "with_retries"]

Result = TypeVar("Result")


def backoff_s(
    *, first_s: float = 0.1, longest_s: float = 5.0, attempts: int = 5
) -> Iterator[float]:
    """Yield the waits between ``attempts`` attempts: each is twice the previous, up to ``longest_s``."""
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
    """Call ``attempt`` until it succeeds, waiting ``waits_s`` between attempts.

    Only ``UnavailableError`` is retried, because an integrity or configuration error would occur again.

    Args:
        attempt: The call to try.
        waits_s: Waits between attempts, in seconds.
        sleep: Waits for a number of seconds.
        on_retry: Called before the wait with every failed attempt that is repeated, and with the wait.
        left_s: Returns the seconds left for everything; a wait of at least that length is not begun.

    Raises:
        UnavailableError: The error of the last attempt, with a note on the number of attempts if there were several.
    """
    waited_s = 0.0
    # No wait follows the last attempt, because an infinite wait is longer than the time left.
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

"""Waiting for room: a disk or a store that is full for a while does not end a run."""

import threading
import time
from collections.abc import Callable
from pathlib import Path

from omniload.base.clock import overslept_s
from omniload.base.log import get_logger
from omniload.base.retry import backoff_s
from omniload.base.writing import FULL, free_in

__all__ = ["GIVE_UP_S", "WAITS_S", "Room"]

_LOG = get_logger(__name__)
GIVE_UP_S = 60.0
"""Longest time that a planner waits for a silent store or for room; ranks meanwhile have batches prefetched."""
WAITS_S = tuple(backoff_s(first_s=0.1, longest_s=3.0, attempts=30))
"""Seconds between attempts, for both kinds of waiting."""


class Room:
    """Writes data that a run must not lose, and waits if there is no room for it.

    Args:
        pause: Waits for a number of seconds, and returns whether to give up; by default, waits until ``wait_no_more``.
        now_s: Seconds of a clock.
    """

    def __init__(
        self,
        pause: Callable[[float], bool] | None = None,
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._ended = threading.Event()
        self._pause, self._now_s = pause or self._ended.wait, now_s
        self.says: Callable[[str], None] = lambda _: None
        """Receives what is being waited for, as words that follow the name of the waiting role; empty after the
        wait."""

    def wait_no_more(self) -> None:
        """Make current and later waits give up, because the writer is being closed."""
        self._ended.set()

    def write(self, attempt: Callable[[], object], where: object, folder: Path | None) -> None:
        """Call ``attempt`` until there is room for what it writes, for up to ``GIVE_UP_S`` of this process's run time.

        Args:
            attempt: Writes everything, or leaves nothing that is read.
            where: Name of what is written, for messages.
            folder: Folder of what is written, to show the free space; ``None`` if that is unknown.

        Raises:
            OSError: There was no room in all that time, which the message says. Any other error is raised at once.
        """
        began_s = self._now_s()
        for number, wait_s in enumerate((*WAITS_S, GIVE_UP_S)):
            try:
                attempt()
            except OSError as error:
                if error.errno not in FULL:
                    raise
                failed_s = self._now_s()
                turn_s = min(wait_s, GIVE_UP_S - (failed_s - began_s))
                is_over = self._ended.is_set() or turn_s <= 0
                if is_over or self._waits(error, where, free_in(folder), turn_s, number == 0):
                    waited_s = self._now_s() - began_s
                    said = f"{error.strerror}, for {waited_s:.0f} s of the {GIVE_UP_S:.0f} s that room is waited for"
                    raise OSError(error.errno, said, str(where)) from error
                began_s += overslept_s(turn_s, self._now_s() - failed_s)
                continue
            if number:
                self.says("")
                passed_s = self._now_s() - began_s
                _LOG.warning("%s: there is room again, after %.1f s: going on", where, passed_s)
            return

    def _waits(
        self, error: OSError, where: object, free: str, wait_s: float, is_first: bool
    ) -> bool:
        """Report a wait, and wait; return whether to give up."""
        self.says(f"waits for room for {where}: {free}")
        if is_first:
            _LOG.warning(
                "%s: %s, %s; waiting up to %.0f s for room, and nothing that is not written is handed out: "
                "remove files there, or raise the quota",
                *(where, error.strerror, free, GIVE_UP_S),
            )
        return self._pause(wait_s)

"""Whether the data plane of a run is up, as seen from outside: by what it writes into the run's folder."""

import math
import time
from pathlib import Path

from omniload.actors.status_file import read_status
from omniload.base.errors import StateError

__all__ = ["UP_S", "Pulse", "said_of_end"]

_GONE_S = 60.0
"""A status that is older is of a plane that has ended: a restart of its job takes less, or one looks again."""
UP_S = 5.0
"""One that is younger is of a plane that is up."""


def said_of_end(run: Path) -> str:
    """Say that the run of a folder has ended, by its last status; nothing where its plane may be up."""
    try:
        status = read_status(run)
    except StateError:
        return ""
    age_s = time.time() - status.written_at
    if status.has_ended:
        return "the run has ended"
    # One that was killed could not say so.
    return f"the run was killed, or was not heard of for {age_s:.0f} s" if age_s > _GONE_S else ""


class Pulse:
    """Whether the plane of a run is up: its status is written every second.

    The time in it is that of another clock, be it of this host: it may lie in the future. So what counts is when it was
    seen to change, and its age at the first look alone.
    """

    def __init__(self, run: Path) -> None:
        self._run = run
        self._written_at = self._status()
        age_s = math.inf if self._written_at is None else time.time() - self._written_at
        self.was_up = 0 <= age_s <= UP_S
        """Whether it was seen to be up."""
        # From the future: not known to be up, and with the time left to be seen to change.
        silent_s = 2 * UP_S if age_s < 0 else min(age_s, _GONE_S)
        self._changed_s = time.monotonic() - silent_s

    @property
    def is_gone(self) -> bool:
        """Whether the plane has ended: it was silent for longer than a restart of its job takes."""
        return self.silent_s() >= _GONE_S

    @property
    def is_quiet(self) -> bool:
        """Whether none is up at this moment, and one may be started yet."""
        return UP_S < self.silent_s() < _GONE_S

    @property
    def patience_s(self) -> float:
        """Seconds of silence after which a plane has ended."""
        return _GONE_S

    def silent_s(self) -> float:
        """Return for how long the status has not changed."""
        written_at = self._status()
        if written_at is not None and written_at != self._written_at:
            self._written_at, self._changed_s = written_at, time.monotonic()
            self.was_up = True
        return time.monotonic() - self._changed_s

    def _status(self) -> float | None:
        try:
            return read_status(self._run).written_at
        except StateError:
            return None

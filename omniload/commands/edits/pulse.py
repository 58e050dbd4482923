"""Whether the data plane of a run is up, as seen from outside, and commands that run as long as the plane does.

The plane is observed through the files that it writes into the run's folder.
"""

import math
import time
from collections.abc import Callable
from pathlib import Path

import click

from omniload.actors.status_file import read_status
from omniload.base.errors import StateError

__all__ = ["UP_S", "Pulse", "said_of_end", "while_up"]

_GONE_S = 60.0
"""Age at which a status shows that the plane has ended. A restart of its job takes less time, or the user calls
again."""
UP_S = 5.0
"""Age below which a status shows that the plane is up."""


def said_of_end(run: Path) -> str:
    """Return a sentence that the run of a folder has ended, from its last status; empty if its plane may be up."""
    try:
        status = read_status(run)
    except StateError:
        return ""
    age_s = time.time() - status.written_at
    if status.has_ended:
        return "the run has ended"
    # A killed run could not write that it ended.
    return f"the run was killed, or was not heard of for {age_s:.0f} s" if age_s > _GONE_S else ""


class Pulse:
    """Whether the plane of a run is up: its status is written every second.

    The time in the status is that of another clock, even on this host, and may be in the future. So the time at which
    the status was seen to change counts; its age counts only at the first look.
    """

    def __init__(self, run: Path) -> None:
        self._run = run
        self._written_at = self._status()
        age_s = math.inf if self._written_at is None else time.time() - self._written_at
        self.was_up = 0 <= age_s <= UP_S
        """Whether the plane was seen to be up."""
        # A time in the future does not show that the plane is up; there is still time to see the status change.
        silent_s = 2 * UP_S if age_s < 0 else min(age_s, _GONE_S)
        self._changed_s = time.monotonic() - silent_s

    @property
    def is_gone(self) -> bool:
        """Whether the plane has ended: it was silent for longer than a restart of its job takes."""
        return self.silent_s() >= _GONE_S

    @property
    def is_quiet(self) -> bool:
        """Whether no plane is up at this moment, although one may still be started."""
        return UP_S < self.silent_s() < _GONE_S

    def is_up(self) -> bool:
        """Return whether a plane is up at this moment: its status is written, and does not say that it has ended."""
        return self.silent_s() <= UP_S and not read_status(self._run).has_ended

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


def while_up(
    run: Path, look: Callable[[], None], *, every_s: float, goes_on: str, instead: str, after: str
) -> None:
    """Call ``look`` repeatedly until the plane of a run has ended, or until Ctrl-C.

    Args:
        run: Folder of the run.
        look: Does what is due; an error that it raises ends the command.
        every_s: Seconds between two calls.
        goes_on: What continues if a plane is started soon: ``watching``.
        instead: What to do for a run without a plane, as words that follow "start the run and".
        after: What is true once the plane has ended.

    Raises:
        StateError: No plane was up.
    """
    pulse = Pulse(run)
    if pulse.is_quiet:
        click.echo(
            f"no data plane of {run} is up at this moment; {goes_on} goes on if one is started soon",
            err=True,
        )
    try:
        while not pulse.is_gone:
            look()
            time.sleep(every_s)
    except KeyboardInterrupt:
        return
    if not pulse.was_up:
        raise StateError(
            f"{run}: no data plane is up, and none was for {_GONE_S:g} s; start the run and {instead}"
        )
    click.echo(
        f"the data plane of {run} has ended: it was silent for {_GONE_S:g} s; {after}", err=True
    )

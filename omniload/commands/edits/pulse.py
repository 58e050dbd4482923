"""Whether the data plane of a run is up, as seen from outside, and commands that go on for as long as it is.

It is seen by what the plane writes into the run's folder.
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
    """Call ``look`` again and again until the plane of a run has ended, or Ctrl-C.

    Args:
        run: Folder of the run.
        look: Does what is due; what it raises ends the command.
        every_s: Seconds between two calls.
        goes_on: What goes on if a plane is started soon: ``watching``.
        instead: What to do for a run without a plane, as words behind "start the run and".
        after: What holds once the plane has ended.

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

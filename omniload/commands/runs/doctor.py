"""``omniload mix doctor``: look at a running data plane for a while, and show the diagnosis."""

import time
from dataclasses import asdict
from pathlib import Path

import click

from omniload.actors.status_file import read_status
from omniload.base.cli import FiniteRange
from omniload.base.log import last_line_of, log_name, logs_folder
from omniload.commands.display import emit_json, output, progress, say
from omniload.commands.options import json_option, run_argument
from omniload.commands.runs.diagnosis import OLD_S, Diagnosis, diagnose, moment_of
from omniload.commands.runs.roles_view import full_disk
from omniload.machine.status import PlaneStatus

__all__ = ["doctor"]

_EVERY_S = 0.5
"""Seconds between looks, half the time between two writes of the status, so that none is missed."""
_SEEN_S = 2.5
"""Seconds for which an old status must stay unchanged to show that it is not written any more."""


@click.command
@run_argument
@click.option(
    "--seconds",
    type=FiniteRange(0, 3600),
    default=5.0,
    show_default=True,
    help="How long to watch; a run that has ended is looked at once.",
)
@json_option
def doctor(run: Path, seconds: float, as_json: bool) -> None:
    """Show what is slow in RUN, which role waits for which, and what to change.

    RUN is the folder of a run: run_dir= of omniload.open, or that of omniload train. The command watches the status of
    all roles for some seconds. Each finding names the observation and the setting that changes it.

    \b
    Example:
      omniload mix doctor demo/run
      omniload mix doctor demo/run --seconds 30 --json
    """  # noqa: D301 -- click's own marker
    looks, silent_s = _looks(run, seconds)
    names = [role.name for role in looks[-1].roles]
    lines = {name: last_line_of(logs_folder(run) / log_name(name)) for name in names}
    found = diagnose(looks, moment_of(looks, time.time(), silent_s), lines, full_disk(run))
    if as_json:
        emit_json(asdict(found))
        return
    _print(found)


def _looks(run: Path, seconds: float) -> tuple[list[PlaneStatus], float]:
    """Read the status until the time is over; return how long the last status was there. An old one ends it sooner."""
    looks = [read_status(run)]
    begun_s = told_s = changed_s = time.monotonic()
    with progress("seconds", seconds) as advance:
        while (now_s := time.monotonic()) - begun_s < seconds:
            advance(now_s - told_s)
            told_s = now_s
            time.sleep(_EVERY_S)
            status = read_status(run)
            if status.written_at != looks[-1].written_at:
                looks.append(status)
                changed_s = time.monotonic()
            # The status's own time is not enough, because the clock of its host may be behind ours.
            is_old = len(looks) == 1 and time.time() - status.written_at > OLD_S
            if status.has_ended or (is_old and time.monotonic() - changed_s > _SEEN_S):
                break
    return looks, time.monotonic() - changed_s


def _print(found: Diagnosis) -> None:
    console = output()
    waited = "" if found.waited_share is None else f"; ranks waited {found.waited_share:.1%} of it"
    looks = "one look" if found.looks == 1 else f"{found.looks} looks in {found.seconds:.0f} s"
    say(console, looks + waited, "dim")
    for finding in found.findings:
        say(console, finding.what, "bold yellow")
        say(console, f"  seen: {finding.seen}")
        say(console, f"  do:   {finding.do}")
    if found.loaders:
        say(console, found.loaders)
    if not found.findings:
        say(console, "nothing holds it up", "bold green")

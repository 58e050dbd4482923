"""``omniload mix top``: what every role of a running data plane does."""

from pathlib import Path

import click

from omniload.actors.status_file import read_status
from omniload.base.errors import StateError
from omniload.commands.display import emit_json
from omniload.commands.options import json_option, run_argument
from omniload.commands.runs.roles_view import (
    once_option,
    roles_view,
    status_json,
    watch_until_interrupted,
)
from omniload.machine.status import PlaneStatus

__all__ = ["top"]


@click.command
@run_argument
@once_option
@json_option
@click.option(
    "--pid",
    "role",
    metavar="ROLE",
    help="Print only the process id of ROLE (planner, loader-0, 'rank dp=0').",
)
def top(run: Path, once: bool, as_json: bool, role: str | None) -> None:
    """Watch what each role of the data plane of RUN is doing.

    RUN is the folder of a run: run_dir= of omniload.open, or that of omniload train. The table shows the state, buffer,
    rate and memory of each role, the age of its last progress, and the role that it waits for. These figures come from
    a file of the run, which is written once a second. Below the table are the busiest sources and those with several
    readers, with the number of their readers, and the last log line of each role in trouble. All log lines are in
    RUN/logs. Ctrl-C ends the view, not the run.

    \b
    Example:
      omniload mix top demo/run
      omniload mix top demo/run --once --json
      kill -STOP $(omniload mix top demo/run --pid planner)
    """  # noqa: D301 -- click's own marker
    if role is not None:
        click.echo(_pid_of(role, read_status(run), run))
        return
    if as_json:
        emit_json(status_json(run, read_status(run)))
        return
    watch_until_interrupted(lambda: roles_view(run, read_status(run)), once=once)


def _pid_of(name: str, status: PlaneStatus, run: Path) -> int:
    """Return the process of a role's holder, or of one of the role's lives if that is named.

    Raises:
        StateError: There is no such role, or its plane has ended; names the roles that exist.
    """
    lives = {
        int(number or 0): role
        for role in status.roles
        for base, _, number in [role.name.partition("+")]
        if name in (base, role.name)
    }
    if status.has_ended or not lives:
        why = "its plane has ended" if status.has_ended else f"it has no role {name!r:.60}"
        there = ", ".join(role.name for role in status.roles)
        raise StateError(f"{run}: {why}; its roles are {there}")
    # The first one left, because a stand-by was started later.
    return lives[min(lives)].pid

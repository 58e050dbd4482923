"""``omniload mix top``: what every role of a running data plane does."""

from pathlib import Path

import click

from omniload.actors.status_file import read_status
from omniload.commands.display import emit_json
from omniload.commands.options import json_option, run_argument
from omniload.commands.runs.roles_view import (
    once_option,
    roles_view,
    status_json,
    watch_until_interrupted,
)

__all__ = ["top"]


@click.command
@run_argument
@once_option
@json_option
def top(run: Path, once: bool, as_json: bool) -> None:
    """Watch what each role of the data plane of RUN is doing.

    RUN is the folder of a run: run_dir= of omniload.open, or that of omniload train. State, buffer,
    rate, memory, the age of the last progress and what is waited for come from the run's own
    file, written once a second. Below stand the sources that are read much of the time or by several,
    with the number of their readers, and the last line of each role in trouble; all of them are
    in RUN/logs. Ctrl-C ends the view, not the run.

    \b
    Example:
      omniload mix top demo/run
      omniload mix top demo/run --once --json
    """  # noqa: D301 -- click's own marker
    if as_json:
        emit_json(status_json(run, read_status(run)))
        return
    watch_until_interrupted(lambda: roles_view(run, read_status(run)), once=once)

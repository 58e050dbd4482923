"""``omniload train watch``: a run and the roles of its data plane, while they work."""

from pathlib import Path

import click
import orjson
from rich.console import Group, RenderableType

from omniload.actors.status_file import read_status
from omniload.base.errors import StateError
from omniload.commands.runs.roles_view import (
    once_option,
    roles_view,
    status_json,
    watch_until_interrupted,
)
from omniload.machine.status import PlaneStatus
from trainer_integration.commands.run_folder import folder_of, run_argument
from trainer_integration.report.display import run_line, run_now

__all__ = ["watch"]


@click.command("watch")
@run_argument
@once_option
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of tables.")
def watch(run: Path, once: bool, as_json: bool) -> None:
    """Watch the progress of RUN, a run's folder or its training file.

    The view shows the last step with its loss and waits, the last checkpoint, and the activity of every role of the
    data plane. Below is the last log line of each role in trouble. Ctrl-C ends the view, not the run.

    \b
    Example:
      omniload train watch demo/run
      omniload train watch demo/run --once --json
    """  # noqa: D301 -- click's own marker
    folder = folder_of(run)
    if as_json:
        plane = _plane_of(folder)
        content = {
            "run": run_now(folder).to_json(),
            "plane": None if plane is None else status_json(folder, plane),
        }
        click.echo(orjson.dumps(content, option=orjson.OPT_INDENT_2).decode())
        return
    watch_until_interrupted(lambda: _view_of(folder), once=once)


def _view_of(folder: Path) -> RenderableType:
    plane = _plane_of(folder)
    roles = "no data plane is up" if plane is None else roles_view(folder, plane)
    return Group(run_line(run_now(folder)), roles)


def _plane_of(folder: Path) -> PlaneStatus | None:
    try:
        return read_status(folder)
    except StateError:
        return None  # before the plane is up, or of an older release

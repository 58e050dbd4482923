"""The roles of a running data plane as a table that is drawn repeatedly, for ``mix top`` and ``train watch``."""

import shutil
import socket
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import click
from rich.console import Group, RenderableType
from rich.live import Live
from rich.text import Text

from omniload.base.log import last_line_of, log_name, logs_folder
from omniload.base.units import counted, format_bytes
from omniload.commands.display import Cell, FittedTable, output, table
from omniload.commands.runs.looks import OLD_S
from omniload.machine.scaling.measured import Reading
from omniload.machine.status import PlaneStatus, RoleLine

__all__ = [
    "full_disk",
    "once_option",
    "roles_view",
    "status_json",
    "watch_until_interrupted",
    "why_ended",
]

_EVERY_S = 1.0

_ROOM = 1 << 20
"""Free bytes at which a disk counts as full, because most writers need more than a few at a time."""

once_option = click.option("--once", is_flag=True, help="Show the current state once, and exit.")


def status_json(run: Path, status: PlaneStatus) -> dict[str, Any]:
    """Return the status of a run as plain JSON, with the last log lines of roles in trouble, or of one that failed."""
    return {**status.model_dump(mode="json"), "last_lines": _last_lines(run, status)}


def roles_view(run: Path, status: PlaneStatus) -> RenderableType:
    """Return a table of all roles of a run, its much-read sources, and the last line of each role in trouble."""
    lines = [
        Text(f"{role.name}: {name} {reading.said}")
        for role in status.roles
        for name, reading in Reading.in_figures(role.figures).items()
    ]
    lines += [
        Text(f"{role}: {line}  ({logs_folder(run) / log_name(role)})")
        for role, line in _last_lines(run, status).items()
    ]
    return Group(_roles_table(status, full_disk(run)), *lines)


def full_disk(run: Path) -> str:
    """Return why no status of a run can be written, as a clause: its disk is full; empty if it has room."""
    try:
        free = shutil.disk_usage(run).free
    except OSError:  # the reader of the status reports this error
        return ""
    return f"the disk of the run is full, {format_bytes(free)} are free there" * (free < _ROOM)


def _last_lines(run: Path, status: PlaneStatus) -> dict[str, str]:
    """Read the last lines, where this machine sees the run's folder, whatever its path on the role's machine."""
    ended = status.has_ended
    told = [role.name for role in status.roles if role.log and (ended or role.in_trouble)]
    lines = {role: last_line_of(logs_folder(run) / log_name(role)) for role in told}
    return why_ended(lines) if ended else {role: line for role, line in lines.items() if line}


def why_ended(lines: Mapping[str, str]) -> dict[str, str]:
    """Return the last line that says why the plane has ended, out of those of all roles; empty if it ended well.

    An error reaches every role, so if the planner has logged it, no other line is needed.
    """
    # A line begins with the day, the time and the level.
    errors = {role: line for role, line in lines.items() if line.split(" ", 3)[2:3] == ["ERROR"]}
    first = min(errors, key=lambda role: not role.startswith("planner"), default=None)
    return {} if first is None else {first: errors[first]}


def watch_until_interrupted(view: Callable[[], RenderableType], *, once: bool) -> None:
    """Draw a view once a second until Ctrl-C, or once."""
    console = output()
    # In a pipe the view is printed once, because redrawing would print the same table without end.
    if once or not console.is_terminal:
        console.print(view())
        return
    # Drawn only by this loop, because rich's own thread would draw the same table four times a second.
    with Live(view(), console=console, auto_refresh=False) as live:
        try:
            while True:
                time.sleep(_EVERY_S)
                live.update(Group(view()), refresh=True)
        except KeyboardInterrupt:
            return


def _roles_table(status: PlaneStatus, full: str) -> FittedTable:
    """Return all roles as a table; if the status is old, the reason stands above it."""
    # The host that wrote the status has a clock of its own, which may be ahead.
    age_s = max(0.0, time.time() - status.written_at)
    behind = "" if status.host == socket.gethostname() else ", or its host's clock is behind"
    why = f"{full}, or " * bool(full)
    said = f", {age_s:.0f} s ago: {why}the plane has ended, or is stopped{behind}"
    said = said if age_s > OLD_S else ""
    if status.has_ended:
        said = f", which has closed it {age_s:.0f} s ago"
    columns = [("role", False), ("does", False), ("for", True), ("buffer", True), ("rate", True)]
    columns += [("waited", True), ("memory", True), ("heard", True), ("waits for", False)]
    rows = [_row(role) for role in status.roles]
    # Values that are equal for all roles, for instance if they are threads of one process, stand above the table.
    for heading, is_number, values in (
        ("process", True, [str(role.pid) for role in status.roles]),
        ("on", False, [role.host for role in status.roles]),
    ):
        if len(set(values)) > 1:
            columns.insert(1, (heading, is_number))
            rows = [[row[0], value, *row[1:]] for row, value in zip(rows, values, strict=True)]
    return table(f"data plane of process {status.pid} on {status.host}{said}", columns, rows)


def _row(role: RoleLine) -> list[Cell]:
    waited_s = role.figures.get("wait_seconds_total")
    return [
        role.name,
        role.state,
        f"{role.task_s:.0f} s",
        _buffer(role),
        _rate(role),
        "" if waited_s is None else f"{waited_s:.1f} s",
        "" if role.memory_bytes is None else format_bytes(role.memory_bytes),
        f"{role.age_s:.0f} s ago",
        ", ".join(role.waits_for),
    ]


def _buffer(role: RoleLine) -> str:
    if "queued_steps" in role.figures:
        return counted(round(role.figures["queued_steps"]), "step")
    if "held_bytes" in role.figures:
        return format_bytes(int(role.figures["held_bytes"]))
    return ""


def _rate(role: RoleLine) -> str:
    if "read_bytes_total" in role.rates:
        return f"{format_bytes(int(role.rates['read_bytes_total']))}/s"
    for name in ("built_steps_total", "taken_steps_total"):
        if name in role.rates:
            return f"{role.rates[name]:.1f} steps/s"
    return ""

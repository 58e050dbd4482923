"""Output of ``omniload fs``: reports, the result of a prefetch, the progress of a copy, and notes that it waits."""

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import click
from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TransferSpeedColumn,
)

from fusefs.tools.fsck import Report
from fusefs.tools.prefetch import Kept
from omniload.base.units import counted, format_bytes

__all__ = ["progress", "show_kept", "show_report", "waiting_line"]


def show_report(report: Report, *, as_json: bool) -> None:
    """Print the findings of a check."""
    if as_json:
        faults = [{"kind": f.kind, "path": f.path, "detail": f.detail} for f in report.faults]
        numbers = {
            "files": report.files,
            "manifests": report.manifests,
            "objects": report.objects,
            "bytes_verified": report.bytes_verified,
            "faults": faults,
            "repaired": report.repaired,
        }
        click.echo(json.dumps(numbers, indent=2))
        return
    for fault in report.faults:
        click.echo(f"{fault.kind}: {fault.path}: {fault.detail}")
    click.echo(
        f"{counted(report.files, 'file')}, {report.manifests} striped, {counted(report.objects, 'object')}, "
        f"{format_bytes(report.bytes_verified)} read, {counted(len(report.faults), 'fault')}, "
        f"{len(report.repaired)} repaired"
    )


def show_kept(kept: Sequence[Kept], *, as_json: bool) -> None:
    """Print the result of a prefetch: the bytes that stay, and where."""
    sums = {
        name: sum(getattr(file, name) or 0 for file in kept)
        for name in ("size_bytes", "memory_bytes", "disk_bytes", "left_out_bytes")
    }
    if as_json:
        click.echo(json.dumps({"files": [file.as_dict() for file in kept], **sums}, indent=2))
        return
    shown = {name: format_bytes(size) for name, size in sums.items()}
    click.echo(
        f"{counted(len(kept), 'file')}, {shown['size_bytes']}: {shown['disk_bytes']} on the disk, "
        f"{shown['memory_bytes']} in memory"
    )
    for file in kept:
        if file.left_out_bytes:
            size, left_out = format_bytes(file.size_bytes), format_bytes(file.left_out_bytes)
            click.echo(
                f"{file.path}: no room for {left_out} of {size}, or too new to be kept: "
                "a plain file can be distinguished from its next version some seconds after it was written"
            )


@contextmanager
def progress(what: str, total_bytes: int) -> Iterator[Callable[[int], None]]:
    """Show the progress of a copy, on a terminal only; call the yielded function with the bytes just done."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(True))
    with Progress(
        *columns,
        TransferSpeedColumn(),
        console=console,
        transient=True,
        # In a log, each redraw would be a line.
        disable=not console.is_terminal,
    ) as shown:
        task = shown.add_task(what, total=total_bytes)
        yield lambda size: shown.advance(task, size)


def waiting_line(mountpoint: str) -> Callable[[float], None]:
    """Return a function that reports, once or (on a terminal) with the seconds, that an unmount waits."""
    console = Console(stderr=True)
    waiting = f"{mountpoint} is unmounted; its process publishes what was written"
    said: list[float] = []

    def report(waited_s: float) -> None:
        if console.is_terminal:
            click.echo(f"\r{waiting}: {waited_s:.0f} s", nl=False, err=True)
        elif not said:
            click.echo(waiting, err=True)
        said.append(waited_s)

    return report

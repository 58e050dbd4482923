"""Progress of a long step: reported by the step, shown on a terminal."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TextIO

__all__ = ["Progress", "shown_progress"]

Progress = Callable[[str, int, int], None]
"""Called with the step's name, the amount that is done, and the total amount."""


@contextmanager
def shown_progress(*, in_bytes: bool = True) -> Iterator[Progress]:
    """Show long work on a terminal, in bytes or by number; show nothing if there is no terminal."""
    stderr: TextIO | None = sys.stderr  # None if it was closed before this process began
    if stderr is None or not stderr.isatty():
        yield lambda *_: None
        return
    # Import lazily, because a warm restore is over before this would be loaded.
    from rich.console import Console  # noqa: PLC0415
    from rich.progress import BarColumn, DownloadColumn, MofNCompleteColumn, TextColumn  # noqa: PLC0415
    from rich.progress import Progress as Bars  # noqa: PLC0415

    amount = DownloadColumn() if in_bytes else MofNCompleteColumn()
    columns = (TextColumn("{task.description}"), BarColumn(), amount)
    with Bars(*columns, console=Console(stderr=True), transient=True) as bars:
        tasks: dict[str, Any] = {}

        def report(what: str, done: int, total: int) -> None:
            if what not in tasks:
                tasks[what] = bars.add_task(what, total=total)
            bars.update(tasks[what], completed=done, total=total)

        yield report

"""What a person sees of a running job: a progress bar, a line per logged step, events as they come."""

from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
)

from omniload.base.units import format_count
from trainer_integration.launch import Launcher
from trainer_integration.run_log import EventLine, StepLine

__all__ = ["RunDisplay"]

_STEPS_BETWEEN_HEADS = 20


class RunDisplay:
    """Shows one job; use it in a ``with``."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._progress = Progress(
            TextColumn("[bold]{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=console,
            # A bar that cannot be redrawn would leave a line per refresh.
            disable=not console.is_terminal,
        )
        self._task: TaskID | None = None
        self._shown = 0

    def expect(self, steps: int) -> None:
        """Set the length of the bar."""
        self._task = self._progress.add_task("training", total=steps)

    def observe(self, _launcher: Launcher, line: StepLine | EventLine) -> None:
        """Show a step or an event; an observer for ``Launcher``."""
        if isinstance(line, EventLine):
            self._console.print(
                f"[dim]{line.seconds:7.1f} s[/]  [bold]{line.what}[/]  {line.detail}"
            )
            return
        if self._shown % _STEPS_BETWEEN_HEADS == 0:
            self._console.print(_HEAD)
        self._shown += 1
        self._console.print(_row(line))
        if self._task is not None:
            self._progress.update(self._task, completed=line.step + 1)

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._progress.stop()


_HEAD = "[bold]  step    loss   tok/s   wait  max/mean  max/bound  shares[/]"


def _row(line: StepLine) -> str:
    total = sum(line.tokens_by_source.values()) or 1
    shares = " ".join(
        f"{name} {100 * tokens / total:.0f}%" for name, tokens in line.tokens_by_source.items()
    )
    wait = max(line.wait_s) / line.seconds if line.seconds else 0.0
    return (
        f"{line.step:6d} {line.loss:7.3f} {format_count(line.tokens / line.seconds):>7} {wait:6.1%} "
        f"{line.imbalance:9.4f} {line.imbalance / line.bound:10.5f}  [dim]{shares}[/]"
    )

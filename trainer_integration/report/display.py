"""Terminal output of a job: a bar and lines while it runs, its last line read, tables of its results.

Lines of figures fit 80 columns. A line of any length, such as an error, is never wrapped here, so that a pipe gets it
whole.
"""

import math
import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Self

from rich.console import Console
from rich.markup import escape
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
)
from rich.table import Table
from rich.text import Text
from typing_extensions import override

from omniload.base.reading import open_file
from omniload.base.state import JsonObject
from omniload.base.units import counted, format_bytes, format_count
from omniload.mix.config import MixConfig
from omniload.mix.edits.edits_file import read_history
from trainer_integration.report.proof import Proof
from trainer_integration.report.run_summary import (
    Evaluated,
    RunSummary,
    SourceShare,
    excess,
    source_shares,
    wait_share,
)
from trainer_integration.run.run_log import LOG_NAME, EventLine, StepLine, no_log_in, parse_line

__all__ = [
    "HEAD",
    "JobConsole",
    "RunDisplay",
    "RunNow",
    "evaluation_line",
    "print_proof",
    "print_summary",
    "run_line",
    "run_now",
    "share_lines",
    "step_line",
]

_FEW_STEPS = 40
_ROUND = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000)
_STEPS_BETWEEN_SHARES = 10
_WIDTH = 80
_INDENT = " " * 10
_SHOWN_SOURCES = 9
_LONGEST_NAME = 20
_FIGURES_WIDTH = 15
_SHOWN_KINDS = 3
_FAR_OFF_POINTS = 1.0
HEAD = "  step     loss    tok/s   FLOP/s    wait   max/mean   over bound   experts"
"""Heading of ``step_line``."""
_TAIL_BYTES = 1 << 20
"""Bytes read from the end of a log: thousands of steps."""


class JobConsole(Console):
    """Standard output, whose reader may end before the job: ``omniload train run FILE | head``."""

    @override
    def on_broken_pipe(self) -> None:
        """Print nothing more, because rich's own would end the process, or the thread that listens to a rank."""
        self.quiet = True
        # Python flushes its own buffer at the end, and would encounter the closed pipe again.
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)


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
        self._mix: MixConfig | None = None
        self._run_dir: Path | None = None
        self._every = 1
        self._total = 0
        self._attempt = -1
        self._seen: dict[int, StepLine] = {}

    def expect(self, steps: int, mix: MixConfig, run_dir: Path | None = None) -> None:
        """Show the length of the job, and the target shares of its mix and of the edits in its run's folder."""
        self._total, self._mix, self._run_dir = steps, mix, run_dir
        self._every = next((n for n in _ROUND if steps <= _FEW_STEPS * n), _ROUND[-1])
        self._task = self._progress.add_task("training", total=steps)

    def observe(self, _job: object, line: StepLine | EventLine) -> None:
        """Show a step or an event; an observer of a job."""
        if isinstance(line, EventLine):
            self._show_event(line)
        else:
            self._show_step(line)

    def say(self, markup: str) -> None:
        """Show a line of other origin among those of the job."""
        self._print(f"          {markup}")

    def _show_event(self, line: EventLine) -> None:
        failed = line.what == "exit" and not line.detail.endswith(": code 0")
        style = "bold red" if failed else "bold green" if line.what == "resume" else "bold"
        # Brackets in a path or an error are not markup.
        detail = escape(line.detail) + ("" if line.took_s is None else f" in {line.took_s:.2f} s")
        text = (
            f"[dim]{line.seconds:6.1f} s[/]  [{style}]{line.what.replace('_', ' '):<10}[/] {detail}"
        )
        self._console.print(text, soft_wrap=True, highlight=False)

    def _show_step(self, line: StepLine) -> None:
        self._seen[line.step] = line
        begins = line.attempt != self._attempt
        self._attempt = line.attempt
        if begins:
            self._print(f"[bold]{HEAD}[/]")
        if begins or line.step % self._every == 0 or line.step + 1 == self._total:
            self._print(step_line(line))
        if line.evaluation:
            self._print(evaluation_line(line.step, line.evaluation))
        done = line.step + 1
        shares_due = done % max(_STEPS_BETWEEN_SHARES, 10 * self._every) == 0 or done == self._total
        if shares_due and self._mix is not None:
            # Only the last run of each step, because lost work does not count.
            trained = [self._seen[step] for step in sorted(self._seen)]
            mix = read_history(self._run_dir, self._mix).latest
            when = f"of steps {trained[0].step} to {line.step}"
            for text in share_lines(source_shares(trained, mix), when):
                self._print(f"[dim]{text}[/]")
        if self._task is not None:
            self._progress.update(self._task, completed=done)

    def _print(self, text: str) -> None:
        self._console.print(text, soft_wrap=True, highlight=False)

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()


def step_line(line: StepLine) -> str:
    """Return a step under ``HEAD``, in at most 80 characters."""
    speed = format_count(line.tokens / line.seconds) if line.seconds > 0 else "-"
    flops = "-"
    if line.model_flops is not None and line.seconds > 0:
        flops = format_count(line.model_flops / line.seconds)
    experts = "-" if line.expert_imbalance is None else f"{line.expert_imbalance:.3f}"
    return (
        f"{line.step:6d} {line.loss:8.3f} {speed:>8} {flops:>8} {wait_share(line):7.2%} "
        f"{line.imbalance:10.4f} {excess(line.imbalance / line.bound):12.5%} {experts:>9}"
    )


def evaluation_line(step: int, losses: Mapping[str, float]) -> str:
    """Return the losses on the evaluation mix after a step; of many sources, those with the highest loss."""
    # Chosen by loss and shown in the order of the mix, so that lines can be compared.
    chosen = sorted(losses, key=lambda name: -losses[name])[:_SHOWN_SOURCES]
    shown = ", ".join(f"{escape(name)} {losses[name]:.3f}" for name in losses if name in chosen)
    more = f" and {len(losses) - len(chosen)} more" if len(losses) > len(chosen) else ""
    return f"{_INDENT}evaluation after step {step}: {shown}{more}"


def share_lines(shares: Sequence[SourceShare], when: str) -> list[str]:
    """Return shares against targets, a few sources to a line of at most 80 characters.

    Of many sources, those farthest from their targets are shown.
    """
    chosen = sorted(shares, key=lambda share: -abs(share.share - (share.target or 0.0)))
    kept = {share.name for share in chosen[:_SHOWN_SOURCES]}
    shown = [share for share in shares if share.name in kept]
    width = min(max((len(share.name) for share in shown), default=0), _LONGEST_NAME)
    cells = [_share_cell(share, width) for share in shown]
    per_line = (_WIDTH - len(_INDENT)) // (width + _FIGURES_WIDTH)
    rows = [cells[at : at + per_line] for at in range(0, len(cells), per_line)]
    head = f"{_INDENT}share of tokens {when}, and target (%)"
    return [head, *(_INDENT + "".join(row).rstrip() for row in rows)]


def _share_cell(share: SourceShare, width: int) -> str:
    name = share.name if len(share.name) <= width else share.name[: width - 1] + "…"
    target = "-" if share.target is None else f"{100 * share.target:.1f}"
    return f"{name:<{width}} {100 * share.share:5.1f} {'(' + target + ')':<8}"


def print_summary(console: Console, summary: RunSummary) -> None:
    """Print the results of a run."""
    figures = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    figures.add_column(style="dim")
    figures.add_column(justify="right")
    figures.add_column(style="dim")
    for what, value, note in _figures(summary):
        figures.add_row(what, value, note)
    console.print(figures)
    console.print(_share_table(summary.sources))


def _figures(summary: RunSummary) -> list[tuple[str, str, str]]:
    kinds = [f"{kind} {format_bytes(size)}" for kind, size in summary.peak_bytes.items()]
    peaks = ", ".join([*kinds[:_SHOWN_KINDS], *(["…"] if len(kinds) > _SHOWN_KINDS else [])])
    return [
        ("outcome", summary.outcome, f"after {summary.seconds:.0f} s"),
        ("steps", str(summary.steps), f"{format_count(summary.tokens)} tokens"),
        (
            "restarts",
            str(summary.attempts - 1),
            f"{counted(summary.repeated_steps, 'step')} run again",
        ),
        ("loss", f"{summary.last_loss:.3f}", f"from {summary.first_loss:.3f}"),
        *_of_evaluations(summary.evaluations),
        ("speed", f"{format_count(summary.tokens_per_s)}", "tokens/s, median"),
        ("wait for data", f"{summary.wait_share:.2%}", "of the step, median"),
        ("imbalance", f"{summary.imbalance:.4f}", "planned max over mean, median"),
        ("over the bound", f"{excess(summary.over_bound):.4%}", "above the least possible, median"),
        ("compute", f"{summary.compute_imbalance:.3f}", "measured max over mean, median"),
        ("experts", f"{summary.expert_imbalance:.3f}", "busiest over mean, worst layer, median"),
        *_of_routers(summary),
        (
            "save",
            _seconds(summary.save_s),
            f"median of {summary.saves}; longest {_seconds(summary.longest_save_s)}",
        ),
        ("memory", format_bytes(sum(summary.peak_bytes.values())), peaks or "not sampled"),
    ]


def _of_evaluations(evaluations: Sequence[Evaluated]) -> list[tuple[str, str, str]]:
    if not evaluations:
        return []
    first, last = evaluations[0], evaluations[-1]
    note = f"after step {last.step}, from {first.mean:.3f} after step {first.step}"
    return [("evaluation", f"{last.mean:.3f}", note)]


def _of_routers(summary: RunSummary) -> list[tuple[str, str, str]]:
    if math.isnan(summary.router_entropy):
        return []
    note = f"nats of entropy; choices dropped: {summary.drop_rate:.2%}"
    return [("routers", f"{summary.router_entropy:.3f}", note)]


def _seconds(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:.2f} s"


def _share_table(sources: Sequence[SourceShare]) -> Table:
    table = Table(title="Share of the tokens", title_justify="left", header_style="dim")
    table.add_column("source")
    for heading in ("tokens", "share", "target", "off, points"):
        table.add_column(heading, justify="right")
    for source in sources:
        row: list[str | Text] = [
            Text(source.name),
            format_count(source.tokens),
            f"{source.share:.2%}",
        ]
        if source.target is None:
            table.add_row(*row, "-", "-")
            continue
        off = source.points_off or 0.0
        style = "yellow" if abs(off) > _FAR_OFF_POINTS else ""
        table.add_row(*row, f"{source.target:.2%}", Text(f"{off:+.2f}", style=style))
    return table


def print_proof(console: Console, proof: Proof) -> None:
    """Print a proof: the steps that differ, or those that were run again with the same result."""
    shown = [step for step in proof.steps if not step.holds] or list(proof.repeated)
    if shown:
        title = "Steps that differ" if not proof.holds else "Steps that were run again"
        table = Table(title=title, title_justify="left", header_style="dim")
        table.add_column("step", justify="right")
        table.add_column("unbroken replay")
        table.add_column("as trained, each attempt")
        for step in shown:
            table.add_row(
                str(step.step),
                step.replayed or "no such step",
                " ".join(step.logged) or "not logged",
            )
        console.print(table)
    verdict = "[bold green]proved[/]" if proof.holds else "[bold red]not proved[/]"
    console.print(
        f"{verdict}: steps {proof.steps[0].step} to {proof.steps[-1].step}, {proof.num_logged} logged "
        f"digests against an unbroken replay of {proof.seconds:.1f} s",
        highlight=False,
        soft_wrap=True,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class RunNow:
    """The latest report of a run about itself."""

    step: int | None
    """The last step; ``None`` before the first."""
    loss: float | None
    tokens_per_s: float | None
    """Tokens per second over the last steps."""
    wait_s: tuple[float, ...]
    """Time each rank waited for its batch of the last step, ``[ranks]``."""
    restarts: int
    checkpoint_step: int | None
    """Step of the last checkpoint; ``None`` before the first."""
    last_event: str
    silent_s: float
    """Seconds since the run wrote its last line."""

    def to_json(self) -> JsonObject:
        """Return it as plain JSON."""
        return asdict(self)


def run_now(folder: Path) -> RunNow:
    """Return the latest report of the run in a folder.

    Raises:
        StateError: The folder contains no log of a run.
    """
    path = folder / LOG_NAME
    try:
        with open_file(path) as log:
            size = os.fstat(log.fileno()).st_size
            # Read from the end, because the log of a long run has gigabytes.
            log.seek(max(0, size - _TAIL_BYTES))
            text = log.read(_TAIL_BYTES).decode(errors="replace")
            silent_s = max(0.0, time.time() - os.fstat(log.fileno()).st_mtime)
    except FileNotFoundError:
        raise no_log_in(folder) from None
    # The first line may be cut off by the window, the last line by a kill.
    lines = [line for part in text.split("\n") if (line := _parsed(part)) is not None]
    steps = [line for line in lines if isinstance(line, StepLine)]
    events = [line for line in lines if isinstance(line, EventLine)]
    saved = [event.step for event in events if event.what == "checkpoint"]
    seconds = sum(line.seconds for line in steps[-20:])
    return RunNow(
        step=steps[-1].step if steps else None,
        loss=steps[-1].loss if steps else None,
        tokens_per_s=sum(line.tokens for line in steps[-20:]) / seconds if seconds else None,
        wait_s=steps[-1].wait_s if steps else (),
        restarts=max((*(s.attempt for s in steps), *(e.attempt for e in events)), default=0),
        checkpoint_step=saved[-1] if saved else None,
        last_event=f"{events[-1].what} {events[-1].detail}".strip() if events else "",
        silent_s=silent_s,
    )


def _parsed(text: str) -> StepLine | EventLine | None:
    try:
        line = parse_line(text)
    except ValueError:
        return None
    return line if isinstance(line, StepLine | EventLine) else None


def run_line(run: RunNow) -> str:
    """Return it as one line."""
    if run.step is None:
        said = ["no step yet"]
    else:
        said = [f"step {run.step}", f"loss {run.loss:.4f}"]
        said += [f"waits {max(run.wait_s):.2f} s at most"] if run.wait_s else []
    if run.tokens_per_s is not None:
        said.append(f"{run.tokens_per_s:,.0f} tokens/s")
    said.append(
        "no checkpoint" if run.checkpoint_step is None else f"checkpoint {run.checkpoint_step}"
    )
    return ", ".join(
        [*said, counted(run.restarts, "restart"), f"last line {run.silent_s:.0f} s ago"]
    )

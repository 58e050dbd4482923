"""The report of a run: one HTML file that needs nothing beside it."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from omniload.base.errors import ConfigError, StateError
from omniload.base.extras import missing_extra
from omniload.base.units import format_bytes, format_count
from omniload.mix.config import MixConfig
from omniload.mix.run_record import read_run_record
from trainer_integration.report.proof import Proof, read_proof
from trainer_integration.report.run_summary import (
    RunSummary,
    TimedEvent,
    attempts_of,
    events_of,
    excess,
    memory_by_kind,
    shares_of,
    summary_of,
    wait_share,
)
from trainer_integration.run.launch_record import LaunchRecord, read_launch_record
from trainer_integration.run.run_log import (
    EventLine,
    MemoryLine,
    StepLine,
    last_of_each_step,
    read_log,
)

if TYPE_CHECKING:
    from jinja2 import Environment

__all__ = ["REPORT_NAME", "Chart", "Finished", "Tile", "page_of", "read_finished", "write_report"]

REPORT_NAME = "report.html"
"""File of the report in the run's folder."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """All that is known of a run."""

    name: str
    """Its folder, with the one around it."""
    lines: Sequence[StepLine | EventLine | MemoryLine]
    mix: MixConfig
    mix_text: str
    """The mix file as it read at the last launch."""
    launch: LaunchRecord
    proof: Proof | None
    summary: RunSummary


@dataclass(frozen=True, slots=True)
class Tile:
    """One figure at the head of the page."""

    label: str
    value: str
    note: str


@dataclass(frozen=True, slots=True)
class Chart:
    """One picture, with what it says in words for who cannot see it."""

    title: str
    svg: str
    caption: str


def read_finished(run_dir: Path) -> Finished:
    """Read what a run's folder holds.

    Raises:
        StateError: A record is missing or damaged.
    """
    lines = read_log(run_dir)
    life = read_run_record(run_dir).last
    try:
        mix = life.mix()
    except ConfigError as error:
        raise StateError(f"the run's mix is read no longer: {error}") from error
    return Finished(
        name="/".join(run_dir.resolve().parts[-2:]),
        lines=lines,
        mix=mix,
        mix_text=life.text,
        launch=read_launch_record(run_dir),
        proof=read_proof(run_dir),
        summary=summary_of(lines, mix),
    )


def write_report(run_dir: Path) -> Path:
    """Write the report of a run into its folder and return its path.

    Raises:
        ConfigError: A package of the extra ``report`` is not installed.
        StateError: The folder holds no finished step.
    """
    page = page_of(read_finished(run_dir))
    path = run_dir / REPORT_NAME
    partial = path.with_name(path.name + ".partial")
    partial.write_text(page, encoding="utf-8")
    partial.replace(path)
    return path


def page_of(run: Finished) -> str:
    """Return the page.

    Raises:
        ConfigError: A package of the extra ``report`` is not installed.
        StateError: The run has no step.
    """
    if not run.summary.steps:
        raise StateError("the log holds no step yet; train first")
    try:
        template = _environment().get_template("report.html.j2")
        charts = _charts(run)
    except ModuleNotFoundError as error:
        raise missing_extra("the report (`omniload train show RUN --html`)", error) from error
    return template.render(
        run=run,
        summary=run.summary,
        tiles=_tiles(run.summary),
        charts=charts,
        events=_told(events_of(run.lines)),
        train_json=run.launch.train.model_dump_json(indent=2),
        percent=lambda value: f"{value:.2%}",
        count=format_count,
    )


def _environment() -> "Environment":
    from jinja2 import Environment, PackageLoader, StrictUndefined  # noqa: PLC0415 -- an extra

    return Environment(
        loader=PackageLoader("trainer_integration.report.report", "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )


def _tiles(summary: RunSummary) -> list[Tile]:
    restarts = summary.attempts - 1
    return [
        Tile("Loss", f"{summary.last_loss:.2f}", f"from {summary.first_loss:.2f} nats per token"),
        Tile("Trained on", format_count(summary.tokens), f"tokens in {summary.steps} steps"),
        Tile("Speed", format_count(summary.tokens_per_s), "tokens per second, median"),
        Tile("Wait for data", f"{summary.wait_share:.2%}", "of the step, median"),
        Tile("Imbalance", f"{summary.imbalance:.4f}", "planned max / mean, median"),
        Tile("Over the bound", _over(summary.over_bound), "above the least possible, median"),
        Tile("Experts", _ratio(summary.expert_imbalance), "busiest / mean, worst layer, median"),
        Tile("Saves", _save(summary.save_s), f"each, median of {summary.saves}; between steps"),
        Tile("Restarts", str(restarts), f"{summary.repeated_steps} steps run again"),
        Tile("Wall time", f"{summary.seconds:.0f} s", "launch to end, restarts included"),
    ]


def _over(ratio: float) -> str:
    over = excess(ratio)
    return "none" if over < 5e-7 else f"{over:.1e}" if over < 1e-4 else f"{over:.3%}"


def _ratio(value: float) -> str:
    return "not logged" if math.isnan(value) else f"{value:.3f}"


def _save(seconds: float) -> str:
    return "not logged" if math.isnan(seconds) else f"{seconds:.2f} s"


def _charts(run: Finished) -> list[Chart]:
    # An extra, absent for who wants no report; a second to import.
    from trainer_integration.report import charts  # noqa: PLC0415

    steps = last_of_each_step(run.lines)
    attempts = attempts_of(run.lines)
    summary = run.summary
    shares = shares_of(steps, run.mix)
    seconds, memory = memory_by_kind(run.lines)
    failures = [event.seconds for event in events_of(run.lines) if _failed(event)]
    drawn = [
        Chart("Loss", charts.loss_chart(attempts), _loss_caption(summary)),
        Chart("Shares of the sources", charts.share_chart(shares), _share_caption(summary)),
        Chart(
            "Evenness of the ranks",
            charts.imbalance_chart(steps),
            f"Planned cost of the heaviest rank over the mean: median {summary.imbalance:.4f}, "
            f"{_over(summary.over_bound)} above what these rows allow at best. "
            f"Measured time of the passes: median {summary.compute_imbalance:.3f}.",
        ),
        Chart(
            "Wait and speed",
            charts.speed_chart(steps),
            f"Median wait for data {summary.wait_share:.2%} of a step (target "
            f"{charts.WAIT_TARGET:.0%}), longest {max(map(wait_share, steps)):.2%}; "
            f"median speed {format_count(summary.tokens_per_s)} tokens per second.",
        ),
    ]
    if not math.isnan(summary.expert_imbalance):
        caption = (
            "Token slots of the busiest expert over the mean of its layer, in the worst layer, over all "
            f"ranks: median {summary.expert_imbalance:.3f}. The balance loss pulls it towards 1."
        )
        drawn.append(Chart("Evenness of the experts", charts.expert_chart(steps), caption))
    if len(seconds) > 1:
        peaks = ", ".join(f"{kind} {format_bytes(n)}" for kind, n in summary.peak_bytes.items())
        caption = f"Proportional set size, shared pages counted once. Greatest: {peaks}."
        drawn.append(
            Chart("Memory by role", charts.memory_chart(seconds, memory, failures), caption)
        )
    return drawn


def _failed(event: TimedEvent) -> bool:
    return event.line.what == "exit" and not event.line.detail.endswith(": code 0")


def _loss_caption(summary: RunSummary) -> str:
    text = f"Mean cross entropy fell from {summary.first_loss:.3f} to {summary.last_loss:.3f} nats."
    if summary.repeated_steps:
        text += (
            f" {summary.repeated_steps} steps were lost with a killed attempt (pale) and run again "
            "from the checkpoint."
        )
    return text


def _share_caption(summary: RunSummary) -> str:
    offs = [abs(s.points_off) for s in summary.sources if s.points_off is not None]
    if not offs or math.isnan(max(offs)):
        return (
            "Share of all tokens; the weights of this mix count samples, so tokens have no target."
        )
    return (
        f"Share of the tokens trained on, against the mix file's weights. At the end the source "
        f"farthest from its target is off by {max(offs):.2f} percentage points."
    )


def _told(events: Sequence[TimedEvent]) -> list[tuple[str, str, str, str, bool]]:
    """Return time, what, step and detail of each event, and whether it is a failure."""
    return [
        (
            f"{event.seconds:.1f}",
            event.line.what.replace("_", " "),
            _step_text(event),
            event.line.detail
            + ("" if event.line.took_s is None else f" in {event.line.took_s:.2f} s"),
            _failed(event),
        )
        for event in events
    ]


def _step_text(event: TimedEvent) -> str:
    if event.line.step is not None:
        return f"before {event.line.step}"
    return "" if event.after_step is None else f"after {event.after_step}"

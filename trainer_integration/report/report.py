"""The report of a run: one HTML file that needs nothing beside it."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from omniload.base.errors import ConfigError, StateError
from omniload.base.extras import missing_extra
from omniload.base.state import Json, JsonObject
from omniload.base.units import format_count
from omniload.base.writing import write_whole
from omniload.mix.config import MixConfig
from omniload.mix.edits.edits_file import read_history
from omniload.mix.edits.history import History
from omniload.mix.run_record import read_run_record
from trainer_integration.report.charts import Chart, charts_of, over_text
from trainer_integration.report.figures import edit_places, run_figures
from trainer_integration.report.proof import Proof, read_proof
from trainer_integration.report.run_summary import (
    RunSummary,
    TimedEvent,
    events_of,
    memory_by_kind,
    shares_of,
    summary_of,
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

__all__ = ["REPORT_NAME", "Finished", "Tile", "page_of", "read_finished", "write_report"]

REPORT_NAME = "report.html"
"""File of the report in the run's folder."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """All that is known of a run."""

    name: str
    """Its folder, with the one around it."""
    lines: Sequence[StepLine | EventLine | MemoryLine]
    history: History
    """The mix and its edits."""
    mix_text: str
    """The mix file as it read at the last launch."""
    launch: LaunchRecord
    proof: Proof | None
    summary: RunSummary

    @property
    def mix(self) -> MixConfig:
        """The mix with all its edits."""
        return self.history.latest


@dataclass(frozen=True, slots=True)
class Tile:
    """One figure at the head of the page."""

    label: str
    value: str
    note: str


def read_finished(run_dir: Path) -> Finished:
    """Read what a run's folder holds.

    Raises:
        StateError: A record is missing or damaged.
    """
    lines = read_log(run_dir)
    life = read_run_record(run_dir).last
    try:
        history = read_history(run_dir, life.mix())
    except ConfigError as error:
        raise StateError(f"the run's mix is read no longer: {error}") from error
    return Finished(
        name="/".join(run_dir.resolve().parts[-2:]),
        lines=lines,
        history=history,
        mix_text=life.text,
        launch=read_launch_record(run_dir),
        proof=read_proof(run_dir),
        summary=summary_of(lines, history.latest),
    )


def write_report(
    run_dir: Path, *, beside: Path | None = None, reload_s: float | None = None
) -> Path:
    """Write the report of a run into its folder and return its path.

    Args:
        run_dir: Folder of the run.
        beside: Folder of another run, to be shown with it.
        reload_s: The run goes on: a browser reads the page again so often.

    Raises:
        ConfigError: A package of the extra ``report`` is not installed.
        StateError: A folder holds no finished step.
    """
    other = None if beside is None else read_finished(beside)
    page = page_of(read_finished(run_dir), beside=other, reload_s=reload_s)
    path = run_dir / REPORT_NAME
    # At once: a browser reads the page while it is written again.
    write_whole(path, page.encode())
    return path


def page_of(run: Finished, *, beside: Finished | None = None, reload_s: float | None = None) -> str:
    """Return the page; the arguments are those of ``write_report``.

    Raises:
        ConfigError: A package of the extra ``report`` is not installed.
        StateError: A run has no step.
    """
    runs = [run] if beside is None else [run, beside]
    for each in runs:
        if not each.summary.steps:
            raise StateError(f"the log of {each.name} holds no step yet; train first")
    try:
        template = _environment().get_template("report.html.j2")
    except ModuleNotFoundError as error:
        raise missing_extra("the report (`omniload train show RUN --html`)", error) from error
    figures = [run_figures(each.name, each.lines, each.history) for each in runs]
    charts = _charts(run, figures[0])
    return template.render(
        run=run,
        beside=beside,
        summary=run.summary,
        tiles=_tiles_of(runs),
        charts=charts,
        data=_data(figures, charts, reload_s),
        is_running=reload_s is not None,
        events=_told(events_of(run.lines)),
        edits=edit_places(run.history.edits),
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


def _tiles_of(runs: Sequence[Finished]) -> list[tuple[Tile, Tile | None]]:
    """Return the tiles of a run, each with that of the run beside it."""
    first, *others = (_tiles(run.summary) for run in runs)
    return list(zip(first, others[0] if others else [None] * len(first), strict=True))


def _tiles(summary: RunSummary) -> list[Tile]:
    restarts = summary.attempts - 1
    return [
        Tile("Loss", f"{summary.last_loss:.2f}", f"from {summary.first_loss:.2f} nats per token"),
        Tile("Trained on", format_count(summary.tokens), f"tokens in {summary.steps} steps"),
        Tile("Speed", format_count(summary.tokens_per_s), "tokens per second, median"),
        Tile("Wait for data", f"{summary.wait_share:.2%}", "of the step, median"),
        Tile("Imbalance", f"{summary.imbalance:.4f}", "planned max / mean, median"),
        Tile("Over the bound", over_text(summary.over_bound), "above the least possible, median"),
        Tile("Experts", _ratio(summary.expert_imbalance), "busiest / mean, worst layer, median"),
        Tile("Saves", _save(summary.save_s), f"each, median of {summary.saves}; between steps"),
        Tile("Restarts", str(restarts), f"{summary.repeated_steps} steps run again"),
        Tile("Wall time", f"{summary.seconds:.0f} s", "launch to end, restarts included"),
    ]


def _ratio(value: float) -> str:
    return "not logged" if math.isnan(value) else f"{value:.3f}"


def _save(seconds: float) -> str:
    return "not logged" if math.isnan(seconds) else f"{seconds:.2f} s"


def _charts(run: Finished, figures: JsonObject) -> list[Chart]:
    """Return the charts of a run, without panels of figures that its log does not hold."""
    seconds_N, memory = memory_by_kind(run.lines)
    shares = shares_of(last_of_each_step(run.lines), run.mix)
    charts = charts_of(run.summary, shares, list(memory) if len(seconds_N) > 1 else [])
    return [replace(c, panels=tuple(p for p in c.panels if p.is_held_by(figures))) for c in charts]


def _data(
    figures: Sequence[JsonObject], charts: Sequence[Chart], reload_s: float | None
) -> JsonObject:
    """Return what the page's script draws."""
    panels: list[Json] = [panel.to_json() for chart in charts for panel in chart.panels]
    return {"version": 1, "runs": list(figures), "charts": panels, "reload_s": reload_s}


def _failed(event: TimedEvent) -> bool:
    return event.line.what == "exit" and not event.line.detail.endswith(": code 0")


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

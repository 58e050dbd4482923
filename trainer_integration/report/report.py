"""The report of a run: one self-contained HTML file, which is rewritten repeatedly while the run continues."""

import math
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Self

from omniload.base.errors import ConfigError, OmniloadError, StateError
from omniload.base.extras import missing_extra
from omniload.base.log import get_logger
from omniload.base.state import Json, JsonObject
from omniload.base.units import counted, format_count
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
from trainer_integration.run.run_lock import running_or_cut_off
from trainer_integration.run.run_log import (
    LOG_NAME,
    EventLine,
    MemoryLine,
    StepLine,
    last_of_each_step,
    read_log,
)

if TYPE_CHECKING:
    from jinja2 import Environment

__all__ = [
    "REPORT_NAME",
    "Finished",
    "ReportProcess",
    "Tile",
    "kept_report",
    "main",
    "page_of",
    "read_finished",
    "write_report",
]

REPORT_NAME = "report.html"
"""File of the report in the run's folder."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """Everything known of a run."""

    name: str
    """Name of its folder, with its parent folder."""
    lines: Sequence[StepLine | EventLine | MemoryLine]
    history: History
    """The mix and its edits."""
    mix_text: str
    """Text of the mix file at the last launch."""
    launch: LaunchRecord
    proof: Proof | None
    summary: RunSummary

    @property
    def mix(self) -> MixConfig:
        """The mix with all its edits."""
        return self.history.latest


@dataclass(frozen=True, slots=True)
class Tile:
    """One figure at the top of the page."""

    label: str
    value: str
    note: str


def read_finished(run_dir: Path) -> Finished:
    """Read the content of a run's folder.

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
        # With the parent folder, because of several runs many are called ``run``.
        name="/".join(run_dir.resolve().parts[-2:]),
        lines=lines,
        history=history,
        mix_text=life.text,
        launch=read_launch_record(run_dir),
        proof=read_proof(run_dir),
        summary=summary_of(lines, history.latest, running_or_cut_off(run_dir)),
    )


def write_report(
    run_dir: Path, *, beside: Path | None = None, reload_s: float | None = None
) -> Path:
    """Write the report of a run into its folder and return its path.

    Args:
        run_dir: Folder of the run.
        beside: Folder of another run, to be shown with it.
        reload_s: The run continues, and a browser reloads the page at this interval.

    Raises:
        ConfigError: A package of the extra ``report`` is not installed.
        StateError: A folder has no finished step.
    """
    other = None if beside is None else read_finished(beside)
    page = page_of(read_finished(run_dir), beside=other, reload_s=reload_s)
    path = run_dir / REPORT_NAME
    # Replaced in one rename, because a browser may read the page while it is rewritten.
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
        # A name that the page uses and this module does not set is an error, not an empty place.
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )


def _tiles_of(runs: Sequence[Finished]) -> list[tuple[Tile, Tile | None]]:
    """Return the tiles of a run, each with the other run's tile."""
    first, *others = (_tiles(run.summary) for run in runs)
    return list(zip(first, others[0] if others else [None] * len(first), strict=True))


def _tiles(summary: RunSummary) -> list[Tile]:
    restarts = summary.attempts - 1
    return [
        Tile("Loss", f"{summary.last_loss:.2f}", f"from {summary.first_loss:.2f} nats per token"),
        Tile(
            "Trained on",
            format_count(summary.tokens),
            f"tokens in {counted(summary.steps, 'step')}",
        ),
        Tile("Speed", format_count(summary.tokens_per_s), "tokens per second, median"),
        Tile("Wait for data", f"{summary.wait_share:.2%}", "of the step, median"),
        Tile("Imbalance", f"{summary.imbalance:.4f}", "planned max / mean, median"),
        Tile("Over the bound", over_text(summary.over_bound), "above the least possible, median"),
        Tile("Experts", _ratio(summary.expert_imbalance), "busiest / mean, worst layer, median"),
        Tile("Saves", _save(summary.save_s), f"each, median of {summary.saves}; between steps"),
        Tile("Restarts", str(restarts), f"{counted(summary.repeated_steps, 'step')} run again"),
        Tile("Wall time", f"{summary.seconds:.0f} s", "launch to end, restarts included"),
    ]


def _ratio(value: float) -> str:
    return "not logged" if math.isnan(value) else f"{value:.3f}"


def _save(seconds: float) -> str:
    return "not logged" if math.isnan(seconds) else f"{seconds:.2f} s"


def _charts(run: Finished, figures: JsonObject) -> list[Chart]:
    """Return the charts of a run, without panels of figures that its log lacks."""
    seconds_N, memory = memory_by_kind(run.lines)
    shares = shares_of(last_of_each_step(run.lines), run.mix)
    # A line needs two samples.
    charts = charts_of(run.summary, shares, list(memory) if len(seconds_N) > 1 else [])
    return [replace(c, panels=tuple(p for p in c.panels if p.is_held_by(figures))) for c in charts]


def _data(
    figures: Sequence[JsonObject], charts: Sequence[Chart], reload_s: float | None
) -> JsonObject:
    """Return the figures that the page's script draws."""
    panels: list[Json] = [panel.to_json() for chart in charts for panel in chart.panels]
    return {"version": 1, "runs": list(figures), "charts": panels, "reload_s": reload_s}


def _failed(event: TimedEvent) -> bool:
    return event.line.what == "exit" and not event.line.detail.endswith(": code 0")


def _told(events: Sequence[TimedEvent]) -> list[tuple[str, str, str, str, bool]]:
    """Return time, kind, step and detail of each event, and whether it is a failure."""
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


_LOG = get_logger(__name__)
_LEAST_S = 30.0
_SHARE = 0.02
"""Share of the time that the report may take; a long log is read and drawn less often."""
_END_S = 60.0
_NICE = 10
"""Niceness of a report next to a rank, which needs its core."""


@contextmanager
def kept_report(run_dir: Path, least_s: float | None = None) -> Iterator[None]:
    """Within this context, write the report of a run from a thread, every 30 s (``least_s``) or less often.

    The caller writes the last report.
    """
    ended = threading.Event()
    thread = threading.Thread(
        target=_keep,
        args=(run_dir, ended, least_s or _LEAST_S),
        name="omniload-report",
        daemon=True,
    )
    thread.start()
    try:
        yield
    finally:
        ended.set()
        # The caller writes the last report, which a late thread would replace by an older page.
        thread.join(_END_S)
        if thread.is_alive():
            _LOG.warning("the report of %s is still being written after %.0f s", run_dir, _END_S)


class ReportProcess:
    """The same in a process of its own, because training must not share its interpreter. Use it in a ``with``."""

    def __init__(self, least_s: float | None = None) -> None:
        self._least_s = least_s or _LEAST_S
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, run_dir: Path) -> None:
        """Keep the report of a run up to date from now on; call it once."""
        assert self._process is None, "it keeps one report"
        self._process = subprocess.Popen(  # noqa: S603 -- our own interpreter and module
            [sys.executable, "-m", __name__, str(run_dir), str(self._least_s)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            start_new_session=True,  # a terminal's Ctrl-C is for the rank
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """End the process, so that it does not overwrite a later report."""
        process, self._process = self._process, None
        if process is None:
            return
        assert process.stdin is not None
        # The sign to end, which a rank that is killed gives just as well.
        process.stdin.close()
        try:
            process.wait(_END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _keep(run_dir: Path, ended: threading.Event, least_s: float) -> None:
    wait_s, seen = least_s, None
    while not ended.wait(wait_s):
        began_s = time.monotonic()
        try:
            # A run without progress is not drawn again.
            written = (run_dir / LOG_NAME).stat().st_mtime_ns
            if written != seen:
                write_report(run_dir, reload_s=wait_s)
                seen = written
        except ConfigError as error:  # a package is missing, which is reported at the end
            _LOG.debug("no report while the run goes on: %s", error)
            return
        except (OmniloadError, OSError) as error:
            _LOG.debug("no report yet: %s", error)
        # According to the time of the last one, which grows with the log.
        wait_s = max(least_s, (time.monotonic() - began_s) / _SHARE)


def main() -> None:
    """Keep the report of the run in the first argument up to date, until standard input ends with the rank."""
    os.nice(_NICE)
    with kept_report(Path(sys.argv[1]), float(sys.argv[2])):
        sys.stdin.buffer.read()


if __name__ == "__main__":
    main()

"""The page of a start-up: one HTML file that needs nothing beside it."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from omniload.base.errors import ConfigError
from omniload.base.extras import missing_extra
from snapshot.startup import Attempt
from snapshot.startup_difference import Difference
from snapshot.startup_tables import (
    format_moved,
    format_ratio,
    format_seconds,
    notes_of,
    verdict_of,
)
from snapshot.startup_timeline import looks_of, spread_of, timeline_of

if TYPE_CHECKING:
    from jinja2 import Environment

__all__ = ["Report", "Tile", "page_of", "write_report"]

_TEMPLATE = "startup.html.j2"


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What a page is about."""

    attempts: Sequence[Attempt]
    """All of the job."""
    chosen: Attempt
    torn: int
    """Lines that were cut short."""
    difference: Difference | None = None


@dataclass(frozen=True, slots=True)
class Tile:
    """One figure at the head of the page."""

    label: str
    value: str
    note: str


def write_report(path: Path, report: Report) -> None:
    """Write the page; it is there whole or not at all.

    Raises:
        ConfigError: A package of the extra ``report`` is not installed, or the page cannot be written.
    """
    page = page_of(report)
    partial = path.with_name(path.name + ".partial")
    try:
        partial.write_text(page, encoding="utf-8")
        partial.replace(path)
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}") from error


def page_of(report: Report) -> str:
    """Return the page.

    Raises:
        ConfigError: A package of the extra ``report`` is not installed.
    """
    try:
        template = _environment().get_template(_TEMPLATE)
    except ModuleNotFoundError as error:
        raise missing_extra("the page", error) from error
    chosen, difference = report.chosen, report.difference
    timeline = timeline_of(chosen)
    notes = list(notes_of(chosen, report.torn))
    if timeline.hidden:
        notes.append(f"{timeline.hidden} nodes are not drawn; those that took longest are")
    return template.render(
        report=report,
        attempt=chosen,
        tiles=_tiles(chosen),
        timeline=timeline,
        looks=looks_of([stage.name for stage in chosen.stages]),
        spreads={stage.name: spread_of(stage, chosen) for stage in chosen.stages},
        notes=notes,
        verdict=None if difference is None else verdict_of(difference),
        longest=_longest(difference),
        moved=format_moved,
        ratio=format_ratio,
        seconds=format_seconds,
    )


def _environment() -> "Environment":
    from jinja2 import Environment, PackageLoader, StrictUndefined  # noqa: PLC0415 -- an extra

    return Environment(
        loader=PackageLoader("snapshot", "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )


def _tiles(attempt: Attempt) -> list[Tile]:
    longest = max(attempt.stages, key=lambda stage: stage.path_s, default=None)
    worst = attempt.worst
    return [
        Tile("Job level", format_seconds(attempt.job_s), "submission to the end of the first step"),
        Tile("Node level", format_seconds(attempt.node_s), "from the image on, nodes held"),
        Tile(
            "Held in all", format_seconds(attempt.held_node_s), "by all nodes together, until then"
        ),
        Tile(
            "Longest stage",
            "-" if longest is None else format_seconds(longest.path_s),
            "no stage" if longest is None else f"{longest.name}, on the critical path",
        ),
        Tile(
            "Worst straggler",
            "-" if worst is None else format_seconds(worst.lost_s),
            "no stage ended"
            if worst is None
            else f"over the median, {worst.name}: {worst.slowest}",
        ),
        Tile("Nodes", str(attempt.num_held), f"{len(attempt.stages)} stages"),
    ]


def _longest(difference: Difference | None) -> float:
    """Return the longest stage of either start, which a full bar stands for; never 0."""
    if difference is None:
        return 1.0
    both = (max(each.path_before_s, each.path_after_s) for each in difference.stages)
    return max(both, default=0.0) or 1.0

"""``omniload image startup``: a start as tables, and as Chrome trace events, which https://ui.perfetto.dev draws.

One process of the trace is one node, one thread of it a lane in which no two runs overlap.
Process 0 is the critical path.

Source:
    "Trace Event Format", Google, 2016: complete events (``X``), metadata events (``M``).
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import click
import orjson
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from omniload.base.errors import ConfigError
from omniload.base.units import format_bytes
from omniload.base.writing import write_whole
from snapshot.startup.attempts import BETWEEN, Attempt, Difference, attempts_of, difference_of
from snapshot.startup.path import is_meeting
from snapshot.startup.reading import Run, read_events

__all__ = [
    "format_moved",
    "format_seconds",
    "notes_of",
    "print_attempt",
    "print_difference",
    "startup_command",
    "trace_of",
    "verdict_of",
    "write_trace",
]

_SHOWN_JOBS = 10
_SHOWN_NODES = 5
_SHORT_S = 9.995
_WIDE = 200


@click.command("startup")
@click.argument(
    "paths", metavar="PATH...", nargs=-1, required=True, type=click.Path(path_type=Path)
)
@click.option("--job", help="Job to show, if the files hold several.")
@click.option("--attempt", type=click.IntRange(min=0), help="Attempt to show; default: the last.")
@click.option(
    "--against",
    multiple=True,
    metavar="PATH",
    type=click.Path(path_type=Path),
    help="File or folder of an earlier start to compare with; repeatable.",
)
@click.option(
    "--against-attempt",
    type=click.IntRange(min=0),
    help="Attempt of that start; default: the last.",
)
@click.option(
    "--perfetto",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Write the timeline for ui.perfetto.dev.",
)
def startup_command(
    paths: tuple[Path, ...],
    job: str | None,
    attempt: int | None,
    against: tuple[Path, ...],
    against_attempt: int | None,
    perfetto: Path | None,
) -> None:
    """Show how long a start-up took, from the event files of its nodes.

    Each PATH is a file that OMNILOAD_STARTUP_LOG named, or a folder of *.jsonl files.

    \b
    Example:
      omniload image startup /mnt/logs/pretrain-7
      omniload image startup /mnt/logs/pretrain-7 --perfetto startup.json
      omniload image startup new/ --against old/
    """  # noqa: D301 -- click's own marker
    log = read_events(paths)
    # Join all attempts, even if one is shown, because the report also names the last one and the times of the others.
    attempts = _of_job(attempts_of(log.events), job)
    chosen = _chosen(attempts, attempt)
    difference = None
    if against:
        olds = attempts_of(read_events(against).events)
        # The other start may be of another job, so its name counts only if it matches.
        same = [each for each in olds if each.job == chosen.job]
        difference = difference_of(_chosen(same or _of_job(olds, None), against_attempt), chosen)
    if perfetto is not None:
        write_trace(perfetto, chosen)
        click.echo(f"timeline: {perfetto.resolve()}", err=True)
    console = Console()
    if not console.is_terminal:
        console.width = _WIDE  # a pipe has no width, and a table cut to 80 columns is of no use
    if len(attempts) > 1:
        known = ", ".join(f"{each.number} ({format_seconds(each.seconds)})" for each in attempts)
        console.print(f"attempt {chosen.number} of {known}\n", highlight=False, soft_wrap=True)
    print_attempt(console, chosen, log.torn)
    if difference is not None:
        console.print("\ncritical path, before and after", highlight=False)
        print_difference(console, difference)


def _of_job(attempts: Sequence[Attempt], job: str | None) -> Sequence[Attempt]:
    """Return the attempts of the chosen job."""
    jobs = list(dict.fromkeys(each.job for each in attempts))
    known = ", ".join(map(repr, jobs[:_SHOWN_JOBS])) + (" ..." if len(jobs) > _SHOWN_JOBS else "")
    if not jobs:
        raise ConfigError("the files hold no event; was OMNILOAD_STARTUP_LOG set for the start?")
    if job is None and len(jobs) > 1:
        raise ConfigError(f"the files hold {len(jobs)} jobs: {known}; choose one with --job")
    if job is not None and job not in jobs:
        raise ConfigError(f"no job {job!r} in the files; they hold {known}")
    return [each for each in attempts if job is None or each.job == job]


def _chosen(attempts: Sequence[Attempt], number: int | None) -> Attempt:
    if number is None:
        return attempts[-1]
    for each in attempts:
        if each.number == number:
            return each
    raise ConfigError(
        f"no attempt {number} in the files; they hold {attempts[0].number} to {attempts[-1].number}"
    )


def format_seconds(seconds: float | None, *, signed: bool = False) -> str:
    """Format seconds for people; a dash if there are none."""
    if seconds is None:
        return "-"
    digits = 2 if abs(seconds) < _SHORT_S else 1
    seconds = round(seconds, digits) + 0.0  # no minus before a zero
    return f"{seconds:+.{digits}f} s" if signed else f"{seconds:.{digits}f} s"


def format_moved(moved: Mapping[str, int], *, signed: bool = False) -> str:
    """Format bytes by tier, nearest first."""
    sign = "+" if signed else ""
    return (
        ", ".join(
            f"{tier} {sign if size > 0 else ''}{format_bytes(size)}" for tier, size in moved.items()
        )
        or "-"
    )


def notes_of(attempt: Attempt, torn: int = 0) -> Iterator[str]:
    """Yield notes about the figures: missing events, and possible effects of clocks."""
    for stage in attempt.stages:
        if stage.unfinished:
            yield f"{stage.name} has no end on {_some(stage.unfinished)}; it is not in its figures"
        if stage.failed:
            errors = sorted({node.error for node in stage.nodes if node.error is not None})
            yield f"{stage.name} failed on {_some(stage.failed)}: {_some(errors)}"
    if not attempt.reached:
        yield "the first step was not reached; the total ends at the last line of any node"
    yield from _clock_notes(attempt)
    if attempt.strays:
        yield f"{attempt.strays} ends have no begin and are left out"
    if attempt.backward:
        yield f"{attempt.backward} runs end before they begin (a clock was set back) and count as 0 s"
    if torn:
        yield f"{torn} lines were cut short by the end of their writer and are left out"


def _clock_notes(attempt: Attempt) -> Iterator[str]:
    """Yield a note about the meeting with the largest contradiction of clocks: a node left before another entered."""
    found = []
    for stage in attempt.stages:
        ends = [(each.end_ns, each.node) for each in stage.nodes if each.end_ns is not None]
        if is_meeting(stage.name) and ends:
            entered_ns, entered = max((each.begin_ns, each.node) for each in stage.nodes)
            left_ns, left = min(ends)
            found.append((entered_ns - left_ns, stage.name, left, entered))
    apart_ns, name, left, entered = max(found, default=(0, "", "", ""))
    if apart_ns > 0:
        yield (
            f"clocks are at least {format_seconds(apart_ns / 1e9)} apart: {left} left {name} before "
            f"{entered} entered it; the critical path is as wrong"
        )


def verdict_of(difference: Difference) -> str:
    """Return a sentence that names the stage which explains the difference."""
    total, ratio = difference.seconds, difference.ratio
    stage = difference.explaining
    if stage is None:
        return "Both starts took the same time."
    times = "" if ratio is None else f", {ratio:.2f} of before"
    word = "less" if total < 0 else "more"
    return (
        f"{format_seconds(abs(total))} {word}{times}. {stage.name} explains "
        f"{difference.explained or 0:.0%} of it: {format_seconds(stage.path_before_s)} to "
        f"{format_seconds(stage.path_after_s)} on the critical path."
    )


def print_attempt(console: Console, attempt: Attempt, torn: int = 0) -> None:
    """Print the stages of an attempt, its totals, and notes about them."""
    heads = ("Stage", ">Nodes", ">Median", ">Max", "Slowest", ">Critical path", "Bytes by tier")
    table = _table(*heads)
    for stage in attempt.stages:
        ended = len(stage.nodes) - len(stage.unfinished)
        table.add_row(
            _shown(stage.name),
            f"{ended}/{len(stage.nodes)}" if stage.unfinished else str(ended),
            format_seconds(stage.median_s),
            format_seconds(stage.max_s),
            _shown(stage.slowest or "-"),
            format_seconds(stage.path_s),
            format_moved(stage.bytes),
        )
    blank = [""] * 4
    table.add_row("between stages", *blank, format_seconds(attempt.between_s), end_section=True)
    total = (format_seconds(attempt.seconds), format_moved(attempt.bytes))
    table.add_row("total", str(attempt.num_held), *blank[1:], *total)
    console.print(table)
    for note in notes_of(attempt, torn):
        console.print(_shown(f"note: {note}"), highlight=False, soft_wrap=True)


def print_difference(console: Console, difference: Difference) -> None:
    """Print the changes of each stage, and the stage that explains the difference."""
    table = _table("Stage", ">Before", ">After", ">Change", "Bytes by tier")
    for each in difference.stages:
        table.add_row(
            _shown(each.name),
            format_seconds(each.path_before_s),
            format_seconds(each.path_after_s),
            format_seconds(each.path_s, signed=True),
            format_moved(each.changed_bytes, signed=True),
        )
    table.add_section()
    table.add_row(
        "total",
        format_seconds(difference.before.seconds),
        format_seconds(difference.after.seconds),
        format_seconds(difference.seconds, signed=True),
    )
    console.print(table)
    console.print(_shown(verdict_of(difference)), highlight=False, soft_wrap=True)


def _table(*heads: str) -> Table:
    """Return a table; ``>`` before a head aligns its column to the right."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for head in heads:
        table.add_column(head.removeprefix(">"), justify="right" if head[0] == ">" else "left")
    return table


def _shown(text: str) -> str:
    """Return text without codes for a terminal or the table, whatever a log holds."""
    return escape("".join(c if c.isprintable() else ascii(c)[1:-1] for c in text))


def _some(names: Sequence[str]) -> str:
    more = len(names) - _SHOWN_NODES
    return ", ".join(names[:_SHOWN_NODES]) + (f" and {more} more" if more > 0 else "")


_PATH = 0
"""Process of the critical path."""
_NS_PER_US = 1e3


def write_trace(path: Path, attempt: Attempt) -> None:
    """Write the trace atomically.

    Raises:
        ConfigError: It cannot be written.
    """
    try:
        write_whole(path, orjson.dumps(trace_of(attempt)))
    except OSError as error:
        raise ConfigError(f"trace {path} cannot be written: {error.strerror}") from error


def trace_of(attempt: Attempt) -> dict[str, Any]:
    """Return the document: microseconds since the begin of the attempt; a run without an end lasts to the last line.

    The arguments of an event are the run's bytes by tier and its facts.
    """
    events = [_named(_PATH, "critical path")]
    for part in attempt.path:
        args: dict[str, Any] = {"node": part.node}
        events.append(
            _event(attempt, part.stage or BETWEEN, (_PATH, 0), (part.begin_ns, part.end_ns), args)
        )
    for process, node in enumerate(attempt.nodes, start=1):
        events.append(_named(process, node))
        for lane, stage, run in _lanes(attempt, node):
            args = {"bytes": dict(run.bytes), **run.facts}
            if run.end_ns is None:
                args["unfinished"] = "true"
            span = (run.begin_ns, max(run.begin_ns, _last_ns(attempt, run)))
            events.append(_event(attempt, stage, (process, lane), span, args))
    return {
        "displayTimeUnit": "ms",
        "otherData": {"job": attempt.job, "attempt": str(attempt.number)},
        "traceEvents": events,
    }


def _lanes(attempt: Attempt, node: str) -> Iterator[tuple[int, str, Run]]:
    """Yield the runs of a node in order of their begin, each in the first lane that is free at that time."""
    runs = [
        (run.begin_ns, stage.name, run)
        for stage in attempt.stages
        for each in stage.nodes
        if each.node == node
        for run in each.runs
    ]
    free_ns: list[int] = []
    for begin_ns, stage, run in sorted(runs, key=lambda found: found[:2]):
        lane = next((i for i, end_ns in enumerate(free_ns) if end_ns <= begin_ns), len(free_ns))
        free_ns[lane : lane + 1] = [max(_last_ns(attempt, run), begin_ns)]
        yield lane, stage, run


def _last_ns(attempt: Attempt, run: Run) -> int:
    return attempt.end_ns if run.end_ns is None else run.end_ns


def _event(
    attempt: Attempt, name: str, place: tuple[int, int], span: tuple[int, int], args: dict[str, Any]
) -> dict[str, Any]:
    return {
        "name": name,
        "ph": "X",
        "pid": place[0],
        "tid": place[1],
        "ts": (span[0] - attempt.begin_ns) / _NS_PER_US,
        "dur": (span[1] - span[0]) / _NS_PER_US,
        "args": args,
    }


def _named(process: int, name: str) -> dict[str, Any]:
    return {"name": "process_name", "ph": "M", "pid": process, "tid": 0, "args": {"name": name}}

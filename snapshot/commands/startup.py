"""``omniload image startup``: what a start-up took, stage by stage and node by node."""

from collections.abc import Sequence
from pathlib import Path

import click
from rich.console import Console

from omniload.base.errors import ConfigError
from snapshot.startup.attempts import Attempt, attempts_of
from snapshot.startup.difference import difference_of
from snapshot.startup.perfetto import write_trace
from snapshot.startup.reading import read_events
from snapshot.startup.tables import print_attempt, print_attempts, print_difference

__all__ = ["startup_command"]

_SHOWN_JOBS = 10
_WIDE = 200


@click.command("startup")
@click.argument(
    "paths", metavar="PATH...", nargs=-1, required=True, type=click.Path(path_type=Path)
)
@click.option("--job", help="Which job, where the files hold several.")
@click.option("--attempt", type=click.IntRange(min=0), help="Which attempt; default: the last.")
@click.option(
    "--against",
    multiple=True,
    metavar="PATH",
    type=click.Path(path_type=Path),
    help="Files or folder of an earlier start to compare with; repeatable.",
)
@click.option(
    "--against-attempt", type=click.IntRange(min=0), help="Which attempt of it; default: the last."
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
    """Show what a start-up took, from the event files of its nodes.

    Each PATH is a file that OMNILOAD_STARTUP_LOG named, or a folder with *.jsonl files.

    \b
    Example:
      omniload image startup /mnt/logs/pretrain-7
      omniload image startup /mnt/logs/pretrain-7 --perfetto startup.json
      omniload image startup new/ --against old/
    """  # noqa: D301 -- click's own marker
    log = read_events(paths)
    attempts = _of_job(attempts_of(log.events), job)
    chosen = _chosen(attempts, attempt)
    difference = None
    if against:
        olds = attempts_of(read_events(against).events)
        # The other start may be of another job; the name counts only where it helps.
        same = [each for each in olds if each.job == chosen.job]
        difference = difference_of(_chosen(same or _of_job(olds, None), against_attempt), chosen)
    if perfetto is not None:
        write_trace(perfetto, chosen)
        click.echo(f"timeline: {perfetto.resolve()}", err=True)
    console = Console()
    if not console.is_terminal:
        console.width = _WIDE  # a pipe has no width, and a table cut to 80 columns helps nobody
    if len(attempts) > 1:
        print_attempts(console, attempts)
        console.print(f"\nattempt {chosen.number}", highlight=False)
    print_attempt(console, chosen, log.torn)
    if difference is not None:
        console.print("\ncritical path, before and after", highlight=False)
        print_difference(console, difference)


def _of_job(attempts: Sequence[Attempt], job: str | None) -> Sequence[Attempt]:
    """Return the attempts of the one job that is meant."""
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

"""Size of a journal over many steps, and the time to continue it, with all steps kept and with the last ones.

python -m benchmarks.planner.journal_length --help
"""

import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import TypeVar

import click

from benchmarks.planner.plan_time import Case, steps_of
from benchmarks.report import Table, print_table, write_report
from omniload.mix.journal.journal import Journal
from omniload.mix.journal.lines import base_of, sound_lines
from omniload.mix.journal.reading import read_base, read_extent, read_tail

__all__ = ["Continued", "Kept", "continued", "kept_of", "main"]

_PASSES = 3
_AHEAD = 64
"""Steps that a planner which takes over plans again."""
_Found = TypeVar("_Found")


@dataclass(frozen=True, slots=True, kw_only=True)
class Continued:
    """What continuing a journal takes, in seconds of the thread."""

    resume_s: float
    """A run that resumes checks every line up to its state."""
    take_over_s: float
    """A planner that takes over reads from a base on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """A journal whose old steps were dropped while it was written."""

    path: Path
    most_bytes: int
    """Largest size of the file."""
    written_bytes: int
    """Bytes of records and bases, and of those that were written anew."""
    restarts: int
    """How often the file was written anew."""
    restart_s: float
    """Longest time of the thread for that."""


def kept_of(whole: Path, path: Path, keep_steps: int) -> Kept:
    """Append every line of a journal to another one, which keeps the last steps."""
    lines = sound_lines(whole)
    first = next(lines)
    size = most = written = restarts = 0
    longest_s = 0.0
    begin = str(first.parsed()["after"])
    with Journal.leading_up(
        path, base_of(first)[0], begin, durable=True, keep_steps=keep_steps
    ) as journal:
        for line in lines:
            began_s = time.thread_time()
            if line.is_note:
                journal.append_base(base_of(line)[0], str(line.parsed()["after"]))
            else:
                journal.append(line.parsed())
            passed_s, before, size = time.thread_time() - began_s, size, path.stat().st_size
            most, written = max(most, before + len(bytes(line))), written + len(bytes(line))
            if size < before:
                restarts, written, longest_s = (
                    restarts + 1,
                    written + size,
                    max(longest_s, passed_s),
                )
    return Kept(
        path=path,
        most_bytes=most,
        written_bytes=written,
        restarts=restarts,
        restart_s=longest_s,
    )


def continued(path: Path) -> Continued:
    """Measure how long it takes to continue a journal; its steps after the last base are cut off."""
    take_over_s = median(_timed(lambda: read_tail(path, _AHEAD))[0] for _ in range(_PASSES))
    base = next(line for line in reversed(read_tail(path, 0).lines) if line.is_note)
    state, digest = base_of(base)[0], str(base.parsed()["after"])

    def resume() -> None:
        Journal.leading_up(path, state, digest, durable=True).close()

    return Continued(
        resume_s=median(_timed(resume)[0] for _ in range(_PASSES)), take_over_s=take_over_s
    )


def _timed(call: Callable[[], _Found]) -> tuple[float, _Found]:
    began_s = time.thread_time()
    found = call()
    return time.thread_time() - began_s, found


def rows_of(case: Case, steps: int, keep_steps: int, folder: Path) -> Iterator[tuple[str, ...]]:
    """Plan steps with a journal; yield a row for the journal with all of them, and for one with the last ones."""
    for planned, _ in enumerate(steps_of(case, folder), start=1):
        if planned >= steps:
            break
    whole = folder / "journal.jsonl"
    size, extent = whole.stat().st_size, read_extent(whole)
    kept = kept_of(whole, folder / "kept.jsonl", keep_steps)
    for what, path, most, written, restarts, restart_s in (
        ("all", whole, size, size, 0, 0.0),
        (
            f"last {keep_steps:,}",
            kept.path,
            kept.most_bytes,
            kept.written_bytes,
            kept.restarts,
            kept.restart_s,
        ),
    ):
        end, begin = path.stat().st_size, read_base(path)["step"]
        took = continued(path)
        yield (
            f"{case.sources}",
            f"{extent.next_step:,}",
            what,
            f"{size / extent.next_step:,.0f}",
            f"{begin:,}",
            f"{end / 2**20:.1f}",
            f"{most / 2**20:.1f}",
            f"{written / size:.2f}",
            f"{took.resume_s:.3f}",
            f"{took.take_over_s * 1e3:.1f}",
            f"{restarts}",
            f"{restart_s:.2f}",
        )


COLUMNS = (
    "sources", "steps", "kept", "bytes a step", "first step there", "at the end, MiB", "at most, MiB",
    "written, over its records", "resume, s", "take over, ms", "written anew", "longest, s",
)  # fmt: skip
READING = """\
A planner machine with its journal on a local disk; loaders answer at once and from memory, and there is no Ray. The
journal with the last steps gets the same records one after another. To resume, every line up to the state is checked;
to take over, a planner reads from a base on. Times are those of the thread, medians of three; the longest rewrite is
one."""


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--steps", default=200_000, show_default=True, type=click.IntRange(5_000))
@click.option("--sources", default=(8, 300), show_default=True, multiple=True, type=int)
@click.option("--samples", default=8, show_default=True, help="Approximate documents of a step.")
@click.option("--keep", default=20_000, show_default=True, help="Steps that are kept.")
@click.option("--report/--no-report", default=True, show_default=True, help="Write the report.")
def main(*, steps: int, sources: tuple[int, ...], samples: int, keep: int, report: bool) -> None:
    """Measure a journal over many steps.

    \b
    Example:
      python -m benchmarks.planner.journal_length --steps 10000 --sources 8 --keep 2048 --no-report
    """  # noqa: D301 -- click's own marker
    rows: list[tuple[str, ...]] = []
    for number in sources:
        with tempfile.TemporaryDirectory() as folder:
            case = Case(sources=number, samples=samples, dp=4, microbatches=1)
            rows.extend(rows_of(case, steps, keep, Path(folder)))
    table = Table(columns=COLUMNS, rows=tuple(rows), caption="Journals in a file")
    print_table(table)
    if report:
        asked = " ".join(f"--sources {number}" for number in sources)
        path = write_report(
            __file__,
            "journal_length",
            "The length of a journal",
            f"python -m benchmarks.planner.journal_length --steps {steps} {asked} --samples {samples} --keep {keep}",
            [table],
            READING.replace("\n", " "),
        )
        click.echo(f"wrote {path.name}")


if __name__ == "__main__":
    main()

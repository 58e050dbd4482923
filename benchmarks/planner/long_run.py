"""Memory of a planner of thousands of ranks, with its journal, after 10,000 steps and after 1,000.

python -m benchmarks.planner.long_run --help
"""

import gc
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import click
import numpy as np
import psutil

from benchmarks.planner.plan_time import Case, steps_of
from benchmarks.report import Table, print_table, write_report

__all__ = ["Mark", "main", "marks_of", "slope_of"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """Memory of the process after some steps."""

    step: int
    resident_bytes: int
    took_s: float
    """Wall time since the previous mark."""


def marks_of(case: Case, steps: int, every: int, folder: Path) -> Iterator[Mark]:
    """Run a planner with its journal in ``folder``; yield the memory of its process after every ``every`` steps."""
    process, began_s = psutil.Process(), time.monotonic()
    for planned, _ in enumerate(steps_of(case, folder), start=1):
        if planned % every == 0:
            gc.collect()  # objects that wait for a collection are no leak
            now_s = time.monotonic()
            yield Mark(
                step=planned, resident_bytes=process.memory_info().rss, took_s=now_s - began_s
            )
            began_s = now_s
        if planned >= steps:
            return


def slope_of(steps: Sequence[int], held_bytes: Sequence[int]) -> tuple[float, float]:
    """Return the growth of memory in bytes per step, by least squares, and its standard error.

    Args:
        steps: Step of each mark; at least three.
        held_bytes: Memory at each mark.
    """
    at, held = np.asarray(steps, np.float64), np.asarray(held_bytes, np.float64)
    at -= at.mean()
    spread = float(at @ at)
    slope = float(at @ held) / spread
    left = held - held.mean() - slope * at
    return slope, float(np.sqrt(left @ left / (len(at) - 2) / spread))


def tables_of(case: Case, marks: Sequence[Mark]) -> list[Table]:
    """Return the marks, and the growth of memory from the first of them on."""
    held = [mark.resident_bytes for mark in marks]
    slope, error = slope_of([mark.step for mark in marks], held)
    of_thousand = 1_000 / 2**20
    return [
        Table(
            columns=("steps", "resident, MiB", "took, s"),
            rows=tuple(
                (f"{mark.step:,}", f"{mark.resident_bytes / 2**20:.1f}", f"{mark.took_s:.0f}")
                for mark in marks
            ),
            caption=f"Memory of a planner of {case.dp:,} ranks, {case.samples:,} samples a step",
        ),
        Table(
            columns=("MiB in 1,000 steps", "standard error", "last mark over first, MiB"),
            rows=(
                (
                    f"{slope * of_thousand:+.3f}",
                    f"{error * of_thousand:.3f}",
                    f"{(held[-1] - held[0]) / 2**20:+.2f}",
                ),
            ),
            caption=f"Least squares over the {len(marks)} marks",
        ),
    ]


READING = """\
A planner machine with its journal on a local disk, and the reports of its data constructors, one message for eight
ranks. Loaders answer at once and from memory; nothing is sent or built, and there is no Ray. Marks are taken after a
collection of cycles. The first mark comes after the steps in which sources are first read."""


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--steps", default=10_000, show_default=True, type=click.IntRange(30), help="Steps.")
@click.option(
    "--marks",
    default=10,
    show_default=True,
    type=click.IntRange(3),
    help="Number of looks at memory.",
)
@click.option("--dp", default=4_096, show_default=True, help="Ranks.")
@click.option(
    "--samples", default=8_192, show_default=True, help="Approximate number of documents of a step."
)
@click.option(
    "--microbatches", default=2, show_default=True, help="Microbatches of a rank, one row each."
)
@click.option(
    "--name", default="long_run", show_default=True, help="Further word in the name of the report."
)
@click.option("--report/--no-report", default=True, show_default=True, help="Write the report.")
def main(  # noqa: PLR0913, PLR0917 -- an option each
    steps: int, marks: int, dp: int, samples: int, microbatches: int, name: str, report: bool
) -> None:
    """Measure the memory of a planner over many steps.

    \b
    Example:
      python -m benchmarks.planner.long_run --steps 300 --dp 64 --samples 256 --no-report
    """  # noqa: D301 -- click's own marker
    case = Case(sources=16, samples=samples, dp=dp, microbatches=microbatches)
    with tempfile.TemporaryDirectory() as folder:
        found = list(marks_of(case, steps, max(1, steps // marks), Path(folder)))
    tables = tables_of(case, found)
    for shown in tables:
        print_table(shown)
    if report:
        asked = f"--steps {steps} --marks {marks} --dp {dp} --samples {samples}"
        path = write_report(
            __file__,
            name,
            "The planner's memory over many steps",
            f"python -m benchmarks.planner.long_run {asked} --microbatches {microbatches} --name {name}",
            tables,
            READING.replace("\n", " "),
        )
        click.echo(f"wrote {path.name}")


if __name__ == "__main__":
    main()

"""Time of the planner for a step, from the reports of its loaders to the published plan.

python -m benchmarks.planner.plan_time --help
"""

import time
from collections import deque
from collections.abc import Iterator
from contextlib import closing, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import click
import numpy as np
import psutil

from benchmarks.loaders.mixed_sources import MixedSources, lengths_of, mix_of
from benchmarks.planner.planned_steps import Lengths, table_at
from benchmarks.report import Table, print_table, write_report
from omniload.actors.planner_journal import Kept, keep, open_journal
from omniload.machine.messages import (
    PlannerEvent,
    PublishPlans,
    ReadAhead,
    SamplesReported,
    Started,
    StepsTaken,
)
from omniload.machine.planner import Planner
from omniload.machine.plans import ahead as planner_module
from omniload.machine.strategy import place
from omniload.mix.config import MixConfig
from omniload.mix.journal.journal import Journal
from omniload.mix.state import MixState
from omniload.plan.place_tree import ClientPlaceTree
from omniload.plan.records import StepPlan
from omniload.plan.world import World

__all__ = ["Case", "main", "steps_of"]

_LENGTH = 8_192
_MEAN_TOKENS = 650
_RECORDS = 20_000
"""Records of a source in an epoch."""
_WARM_UP = 8
"""Steps planned while sources are first read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """The size of a job."""

    sources: int
    samples: int
    """Approximate number of documents of a step."""
    dp: int
    microbatches: int | None = None
    """Microbatches of a rank.

    By default as many as rows of 8,192 tokens need; if given, rows are as long as fits.
    """
    ranks_each: int = 8
    """Ranks of a data constructor."""

    def mix(self) -> MixConfig:
        """Return a mix of such steps, with one row in a microbatch."""
        corpus = MixedSources(sources=self.sources)
        tokens = self.samples * _MEAN_TOKENS
        if self.microbatches is None:
            rows, length = max(1, round(tokens / _LENGTH / self.dp)) * self.dp, _LENGTH
        else:
            rows = self.microbatches * self.dp
            length = round(tokens / rows)
        return mix_of(corpus.names, corpus.weights, rows=rows, micro_rows=1, length=length)

    def lengths(self) -> list[Lengths]:
        """Return the lengths of the documents of each source."""
        return [
            Lengths(lengths_of(np.random.default_rng(s), _RECORDS).astype(np.int32))
            for s in range(self.sources)
        ]

    def planner(self) -> Planner:
        """Return a planner of such steps in its first state."""
        return Planner(
            mix=self.mix(),
            world=World(tree=ClientPlaceTree.of(dp=self.dp)),
            records_S=[_RECORDS] * self.sources,
            state=MixState.start(self.sources),
            fingerprint={},
        )

    def words(self, step: int) -> Iterator[StepsTaken]:
        """Yield the report of each data constructor once its ranks have a step."""
        for first in range(0, self.dp, self.ranks_each):
            ranks = range(first, min(first + self.ranks_each, self.dp))
            yield StepsTaken(steps={(rank, 0): step for rank in ranks})


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """Time to plan one step, and the size of the step."""

    seconds: float
    placing_s: float
    """Part of the time in which rows are costed and dealt to ranks and microbatches."""
    hearing_s: float
    """Part of the time in which reports of ranks are handled, except the last reports, which start the next plan."""
    samples: int
    rows: int
    imbalance: float
    bound: float
    microbatch_imbalance: float
    microbatch_bound: float


def steps_of(case: Case, folder: Path | None = None) -> Iterator[Planned]:
    """Run a planner as its shell would, with loaders that answer at once, and measure only the planner.

    Args:
        case: The size of the job.
        folder: Folder of its journal; no journal is written without one.
    """
    placed, planner = [0.0], case.planner()
    journal = open_journal(folder, planner)
    with timed_placing(placed), nullcontext() if journal is None else closing(journal):
        yield from _steps_of(case, planner, placed, journal)


def _steps_of(
    case: Case, planner: Planner, placed: list[float], journal: Journal | None
) -> Iterator[Planned]:
    lengths = case.lengths()
    events: deque[PlannerEvent] = deque([Started()])
    seconds, hearing_s = 0.0, 0.0
    while True:
        event = events.popleft()
        began_s = time.thread_time()
        commands = planner.handle(event)
        took_s = time.thread_time() - began_s
        seconds += took_s
        if isinstance(event, StepsTaken) and not commands:
            hearing_s += took_s
        if journal is not None:
            keep(journal, [command for command in commands if isinstance(command, Kept)])
        for command in commands:
            if isinstance(command, ReadAhead):
                s, start = command.source, command.start
                table = table_at(lengths[s], start, command.stop - start)
                events.append(SamplesReported(source=s, table=table))
        published = [command for command in commands if isinstance(command, PublishPlans)]
        plans = [plan for command in published for plan in command.plans]
        for plan in plans:
            yield Planned(
                seconds=seconds / len(plans),
                placing_s=placed[0] / len(plans),
                hearing_s=hearing_s / len(plans),
                samples=len(plan.pieces),
                rows=plan.num_rows,
                imbalance=plan.imbalance,
                bound=plan.bound,
                microbatch_imbalance=plan.microbatch_imbalance,
                microbatch_bound=plan.microbatch_bound,
            )
            events.extend(case.words(plan.step))
        if plans:
            seconds, hearing_s, placed[0] = 0.0, 0.0, 0.0


@contextmanager
def timed_placing(total_s: list[float]) -> Iterator[None]:
    """Add up the time that the planner spends in placing."""

    def timed(*args: Any, **named: Any) -> StepPlan:  # noqa: ANN401 -- of place
        began_s = time.thread_time()
        plan = place(*args, **named)
        total_s[0] += time.thread_time() - began_s
        return plan

    with mock.patch.object(planner_module, "place", timed):
        yield


def measured(case: Case, steps: int) -> tuple[str, ...]:
    """Return the row of the table; the first steps, planned while sources are first read, are left out."""
    found = [planned for planned, _ in zip(steps_of(case), range(steps + _WARM_UP), strict=False)]
    found = found[_WARM_UP:]
    times_ms = np.array([planned.seconds for planned in found]) * 1e3
    return (
        str(case.sources),
        f"{case.dp} x {found[0].rows // case.dp}",
        f"{np.median([planned.samples for planned in found]):,.0f}",
        f"{np.median(times_ms):.1f}",
        f"{np.quantile(times_ms, 0.9):.1f}",
        f"{np.median([planned.placing_s for planned in found]) * 1e3:.1f}",
        f"{np.median([planned.hearing_s for planned in found]) * 1e3:.1f}",
        f"{max(planned.imbalance / planned.bound for planned in found):.6f}",
        f"{max(planned.microbatch_imbalance / planned.microbatch_bound for planned in found):.6f}",
    )


def soaked(case: Case, steps: int) -> tuple[str, ...]:
    """Return the growth of the planner's memory over many steps, after a tenth of them."""
    running, process = steps_of(case), psutil.Process()
    for _ in zip(range(steps // 10), running, strict=False):
        pass
    before = process.memory_info().rss
    for _ in zip(range(steps - steps // 10), running, strict=False):
        pass
    grown = process.memory_info().rss - before
    return (f"{steps:,}", f"{before / 2**20:.0f}", f"{grown / 2**20:+.1f}")


READING = """\
The figures are of the whole planner machine: it handles reports of the loaders, draws sources by weight, packs
documents into rows of {length:,} tokens, computes the costs of rows and balances them over ranks, makes the record of
the journal, and decides the next reads. Everything runs in one thread of Python over arrays, and the figures are that
thread's processor time, so other work on the machine does not count. Loaders answer at once and from memory, and
their work is not counted; neither is writing the journal. Documents are log-normal (mean about 650 tokens, cut at
32k), with one row in a microbatch. Reports of all data constructors that their ranks took a step, one for eight
ranks, are counted; the cost of publishing is in the report of published steps. The last columns compare the worst
step's heaviest rank, and its heaviest microbatch, with the least that any dealing of its rows can reach."""


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--steps", default=60, show_default=True, type=click.IntRange(1), help="Steps of each case."
)
@click.option("--most", default=65_536, show_default=True, help="Most samples in a step.")
@click.option(
    "--soak",
    default=10_000,
    show_default=True,
    help="Steps for the growth of memory; 0 for none.",
)
@click.option("--report/--no-report", default=True, show_default=True, help="Write the report.")
def main(steps: int, most: int, soak: int, report: bool) -> None:
    """Time the planner, step by step.

    \b
    Example:
      python -m benchmarks.planner.plan_time --steps 10 --no-report
    """  # noqa: D301 -- click's own marker
    cases = [
        Case(sources=16, samples=512, dp=8),
        Case(sources=16, samples=4_096, dp=64),
        Case(sources=306, samples=4_096, dp=64),
        Case(sources=306, samples=16_384, dp=256),
        Case(sources=16, samples=65_536, dp=4_096, microbatches=8),
    ]
    table = Table(
        columns=(
            "sources",
            "ranks x microbatches",
            "pieces a step",
            "ms a step",
            "nine of ten below, ms",
            "of it placing, ms",
            "of it hearing ranks, ms",
            "worst imbalance over bound",
            "worst microbatch over bound",
        ),
        rows=tuple(measured(case, steps) for case in cases if case.samples <= most),
        caption=f"Medians of {steps} steps",
    )
    tables = [table]
    if soak:
        grown = Table(
            columns=("steps", "resident after a tenth of them, MiB", "more at the end, MiB"),
            rows=(soaked(cases[0], soak),),
            caption=f"Memory of a planner of {cases[0].dp} ranks and {cases[0].sources} sources",
        )
        tables.append(grown)
    for shown in tables:
        print_table(shown)
    if report:
        path = write_report(
            __file__,
            "plan_time",
            "The planner's time for a step",
            f"python -m benchmarks.planner.plan_time --steps {steps} --most {most} --soak {soak}",
            tables,
            READING.format(length=_LENGTH).replace("\n", " "),
        )
        click.echo(f"wrote {path.name}")


if __name__ == "__main__":
    main()

"""How long the planner takes for a step, from the reports of its loaders to the published plan.

python -m benchmarks.plan_time --help
"""

import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

import click
import numpy as np

from benchmarks.mixed_sources import MixedSources, lengths_of, mix_of
from benchmarks.planned_steps import Lengths, table_at
from benchmarks.report import Table, print_table, write_report
from omniload.machine.messages import (
    PlannerEvent,
    PublishPlans,
    ReadAhead,
    SamplesReported,
    Started,
    StepTaken,
)
from omniload.machine.planner import Planner
from omniload.mix.config import MixConfig
from omniload.mix.state import MixState
from omniload.plan.place_tree import ClientPlaceTree

__all__ = ["main"]

_LENGTH = 8_192
_MEAN_TOKENS = 650


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """What planning one step took, and what it held."""

    seconds: float
    samples: int
    rows: int
    imbalance: float
    bound: float


def a_mix(num_sources: int, num_samples: int, dp: int) -> MixConfig:
    """Return a mix whose steps hold about ``num_samples`` documents, a whole number of rows a rank."""
    corpus = MixedSources(sources=num_sources)
    rows = max(1, round(num_samples * _MEAN_TOKENS / _LENGTH / dp)) * dp
    return mix_of(corpus.names, corpus.weights, rows=rows, micro_rows=1, length=_LENGTH)


def steps_of(mix: MixConfig, dp: int) -> Iterator[Planned]:
    """Run a planner as its shell would, with loaders that answer at once, and time it alone."""
    lengths = [
        Lengths(lengths_of(np.random.default_rng(s), 20_000).astype(np.int32))
        for s in range(len(mix.names))
    ]
    planner = Planner(
        mix=mix,
        tree=ClientPlaceTree.of(dp=dp),
        positions_per_epoch_S=[20_000] * len(mix.names),
        state=MixState.start(len(mix.names)),
        fingerprint={},
    )
    events: deque[PlannerEvent] = deque([Started()])
    seconds = 0.0
    while True:
        began_s = time.perf_counter()
        commands = planner.handle(events.popleft())
        seconds += time.perf_counter() - began_s
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
                samples=len(plan.pieces),
                rows=plan.num_rows,
                imbalance=plan.imbalance,
                bound=plan.bound,
            )
            events.extend(StepTaken(step=plan.step, dp_rank=rank) for rank in range(dp))
        seconds = 0.0 if plans else seconds


def measured(num_sources: int, num_samples: int, dp: int, steps: int) -> tuple[str, ...]:
    """Return the row of the table; the first steps, planned while sources are first read, are left out."""
    running = steps_of(a_mix(num_sources, num_samples, dp), dp)
    warm_up = 8
    found = [planned for planned, _ in zip(running, range(steps + warm_up), strict=False)][warm_up:]
    times_ms = np.array([planned.seconds for planned in found]) * 1e3
    return (
        str(num_sources),
        str(dp),
        f"{np.median([planned.samples for planned in found]):,.0f}",
        str(found[0].rows),
        f"{np.median(times_ms):.1f}",
        f"{np.quantile(times_ms, 0.9):.1f}",
        f"{max(planned.imbalance / planned.bound for planned in found):.6f}",
    )


READING = """\
The figures are of the planner machine whole: reports of the loaders taken in, sources drawn by weight,
documents packed into rows of {length:,} tokens, rows costed and balanced over ranks, the record of the
journal made, and what must be read next. Everything runs in one thread of Python over arrays. Loaders answer
at once and from memory, and their work is not counted, nor is writing the journal. Documents are log-normal
(mean about 650 tokens, cut at 32k), one row a microbatch. The last column is the worst step's heaviest rank
over what no dealing of its rows can beat."""


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--steps", default=60, show_default=True, type=click.IntRange(1), help="Steps of each case."
)
@click.option("--most", default=4_096, show_default=True, help="Most samples in a step.")
@click.option("--report/--no-report", default=True, show_default=True, help="Write the report.")
def main(steps: int, most: int, report: bool) -> None:
    """Time the planner, step by step.

    \b
    Example:
      python -m benchmarks.plan_time --steps 10 --no-report
    """  # noqa: D301 -- click's own marker
    cases = [(16, 512, 8), (16, 4_096, 64), (306, 4_096, 64), (306, 16_384, 256)]
    table = Table(
        columns=(
            "sources",
            "ranks",
            "pieces a step",
            "rows a step",
            "ms a step",
            "nine of ten below, ms",
            "worst imbalance over bound",
        ),
        rows=tuple(
            measured(num_sources, num_samples, dp, steps)
            for num_sources, num_samples, dp in cases
            if num_samples <= most
        ),
        caption=f"Medians of {steps} steps",
    )
    print_table(table)
    if report:
        path = write_report(
            "plan_time",
            "The planner's time for a step",
            f"python -m benchmarks.plan_time --steps {steps} --most {most}",
            [table],
            READING.format(length=_LENGTH).replace("\n", " "),
        )
        click.echo(f"wrote {path.name}")


if __name__ == "__main__":
    main()

"""Step time of the included vision model, balanced and in order: by measured costs, and of two ranks in wall time.

python -m benchmarks.trainer.vision_balance --help
"""

import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import cache
from itertools import islice
from pathlib import Path
from statistics import mean

import click
import torch
import torch.distributed as dist

from benchmarks.report import Table, print_table, write_report
from benchmarks.trainer.vision_corpus import (
    LENGTH,
    MODEL,
    VISION,
    Layout,
    Work,
    imbalance_of,
    steps_of,
    works_of,
    write_documents,
)
from benchmarks.trainer.vision_costs import (
    DOCUMENTS,
    IMAGES,
    Cost,
    Costs,
    measured_costs,
    seconds_of_step,
)
from omniload.batch.microbatch import Batch
from tests.support.trainer.moe_group import Ranks
from trainer_integration.config import OptimizerConfig
from trainer_integration.moe.parallel.collectives import Peers
from trainer_integration.moe.parallel.process_groups import ProcessGroups
from trainer_integration.training.optimizer import FlatAdamW
from trainer_integration.training.step import train_step
from trainer_integration.vision.model import VisionLanguageModel

__all__ = ["bin_of", "main", "timed_step"]

BINS = {3.2: (2.7, 4.0), 5.0: (4.0, 5.9), 6.9: (5.9, 8.0)}
"""Imbalances to look at, and the range that counts as each.

An imbalance is the FLOPs of the heaviest rank in order over those of the lightest.
"""
PAPER = 1.77
"""Mean gain of balance over their settings, as OVERLORD reports it (arXiv 2504.09844)."""
LAYOUTS = (Layout(4, 1, 4), Layout(4, 2, 4), Layout(4, 1, 8))
CLOCKED = (Layout(2, 1, 4), Layout(2, 1, 12))
_DOCUMENTS = 6_000
_SCANNED = 200
"""Most steps that are searched for ranks in wall time."""

READING = """\
Documents of bytes (log-normal, median 245), of which three in ten have one to three images (Pareto, exponent 0.6,
16 to 4,096 patches), are packed into rows of {length:,}. In order, each rank takes the next rows and encodes their
images; balanced is the strategy hybrid with the costs that omniload train run gives it. Steps are sorted by their
imbalance in order alone. Simulated steps add up fitted costs in the way in which the trainer waits: in order at the
end of a step, balanced in every microbatch for embeddings and for their gradients. Sending is free in the
simulation, and is included in the figures of wall time. The mean gain of four ranks over layouts and imbalances is
{gain:.2f}, {least:.2f} to {most:.2f}; the paper's mean is {paper}. An image is never cut. If a microbatch has few
images, all ranks wait for the largest, so layouts of more rows gain more. Two ranks at an imbalance of r cannot
gain more than 2r / (r + 1), the last column."""


@dataclass(frozen=True, slots=True)
class Pair:
    """Times of a step both ways."""

    imbalance: float
    """FLOPs of the heaviest rank in order over those of the lightest."""
    in_order_s: float
    balanced_s: float


def bin_of(imbalance: float) -> float | None:
    """Return the imbalance of ``BINS`` to which this one belongs; ``None`` if there is none."""
    return next((name for name, (least, most) in BINS.items() if least <= imbalance < most), None)


def simulated(folder: Path, layout: Layout, costs: Costs, steps: int) -> list[Pair]:
    """Return the steps of ranks that pay measured costs."""
    with (
        closing(steps_of(folder, "in_order", layout)) as in_order,
        closing(steps_of(folder, "hybrid", layout)) as dealt,
    ):
        both = zip(map(works_of, in_order), map(works_of, dealt), strict=False)
        return [pair_of(first, second, costs) for first, second in islice(both, steps)]


def pair_of(in_order: list[list[Work]], dealt: list[list[Work]], costs: Costs) -> Pair:
    """Return the time of a step both ways by measured costs."""
    return Pair(
        imbalance_of(in_order),
        seconds_of_step(in_order, costs, dealt=False),
        seconds_of_step(dealt, costs, dealt=True),
    )


@cache
def _trained(group: dist.ProcessGroup) -> tuple[VisionLanguageModel, FlatAdamW]:
    peers = Peers(group=group, rank=dist.get_rank(group), size=dist.get_world_size(group))
    model = VisionLanguageModel(MODEL, VISION, dp_peers=peers)
    return model, FlatAdamW(model, OptimizerConfig(), 1 << 20)


def timed_step(groups: ProcessGroups, *, batches: Sequence[Batch]) -> float:
    """Train on this rank's batch of a step; return its seconds, counted from the arrival of all ranks."""
    assert groups.dp is not None
    model, optimizer = _trained(groups.dp)
    batch = batches[dist.get_rank(groups.dp)]
    dist.barrier(groups.dp)
    began_s = time.perf_counter()
    train_step(model, optimizer, batch, groups)
    return time.perf_counter() - began_s


def chosen(
    folder: Path, layout: Layout, each: int
) -> Iterator[tuple[Sequence[Batch], Sequence[Batch]]]:
    """Yield steps both ways: the first step, then ``each`` steps of every imbalance, as they come."""
    left = dict.fromkeys(BINS, each)
    with (
        closing(steps_of(folder, "in_order", layout)) as in_order,
        closing(steps_of(folder, "hybrid", layout)) as dealt,
    ):
        both = islice(zip(in_order, dealt, strict=False), _SCANNED)
        yield next(both)
        for first, second in both:
            found = bin_of(imbalance_of(works_of(first)))
            if found is not None and left[found]:
                left[found] -= 1
                yield first, second
            if not any(left.values()):
                return


def clocked(folder: Path, layout: Layout, costs: Costs, each: int) -> list[tuple[Pair, Pair]]:
    """Return steps in wall time, alternately, with the simulation of them."""
    found = []
    steps = list(chosen(folder, layout, each))
    with Ranks(layout.ranks) as ranks:
        for at, step in enumerate(steps):
            seconds = [0.0, 0.0]
            for way in (0, 1) if at % 2 else (1, 0):
                seconds[way] = max(ranks.run(timed_step, dp=layout.ranks, batches=step[way]))
            by_costs = pair_of(*map(works_of, step), costs)
            found.append((Pair(by_costs.imbalance, *seconds), by_costs))
    return found[1:]  # the first call pays for costs that later ones do not have


def gain_of(pairs: Sequence[Pair]) -> float:
    """Return the time of all steps in order over that of the balanced ones."""
    return sum(pair.in_order_s for pair in pairs) / sum(pair.balanced_s for pair in pairs)


def rows_of_costs(costs: Costs) -> Iterator[tuple[str, ...]]:
    """Yield a row for each measured call: its time and the fitted time."""
    for at, sizes in enumerate(IMAGES):
        name = f"{len(sizes)} x {sizes[0]:,} patches"
        yield f"encoder, forward, {name}", *_beside(costs.encoder_forward, at, sizes)
        yield f"encoder, backward, {name}", *_beside(costs.encoder_backward, at, sizes)
    for at, sizes in enumerate(DOCUMENTS):
        name = f"{len(sizes)} x {sizes[0]:,} tokens"
        yield f"backbone, both, {name}", *_beside(costs.backbone, at, sizes)
    yield "optimiser, a step", f"{1e3 * costs.update_s:.1f}", ""


def _beside(cost: Cost, at: int, sizes: Sequence[int]) -> tuple[str, str]:
    return f"{1e3 * cost.measured_s[at]:.1f}", f"{1e3 * cost(sizes):.1f}"


def rows_of_pairs(name: str, pairs: Sequence[Pair]) -> Iterator[tuple[str, ...]]:
    """Yield a row for each imbalance that occurs in some steps."""
    for wanted in BINS:
        mine = [pair for pair in pairs if bin_of(pair.imbalance) == wanted]
        if mine:
            yield (
                name,
                f"{wanted} x",
                str(len(mine)),
                f"{mean(pair.imbalance for pair in mine):.2f} x",
                f"{1e3 * mean(pair.in_order_s for pair in mine):,.0f}",
                f"{1e3 * mean(pair.balanced_s for pair in mine):,.0f}",
                f"{gain_of(mine):.2f}",
            )


def with_bounds(name: str, pairs: Sequence[Pair]) -> Iterator[tuple[str, ...]]:
    """Yield the rows of two ranks, each with the largest gain that is possible at its imbalances.

    If both ranks had half of the work, a step in order would take ``2 r / (r + 1)`` times as long, at an imbalance r.
    """
    for row in rows_of_pairs(name, pairs):
        mine = [pair for pair in pairs if f"{bin_of(pair.imbalance)} x" == row[1]]
        even_s = sum(p.in_order_s * (p.imbalance + 1) / (2 * p.imbalance) for p in mine)
        yield *row, f"{sum(pair.in_order_s for pair in mine) / even_s:.2f}"


def _named(layout: Layout) -> str:
    return f"{layout.ranks} ranks, {layout.microbatches} x {layout.rows} rows"


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--repetitions", default=5, show_default=True, type=click.IntRange(1))
@click.option(
    "--steps",
    default=40,
    show_default=True,
    type=click.IntRange(1),
    help="Number of steps to simulate.",
)
@click.option(
    "--clock",
    default=4,
    show_default=True,
    type=click.IntRange(0),
    help="Steps in wall time for each imbalance.",
)
@click.option("--report/--no-report", default=True, show_default=True, help="Write the report.")
def main(repetitions: int, steps: int, clock: int, report: bool) -> None:
    """Measure costs, simulate four ranks, run two.

    \b
    Example:
      python -m benchmarks.trainer.vision_balance --clock 0 --no-report
    """  # noqa: D301 -- click's own marker
    torch.set_num_threads(1)
    costs = measured_costs(repetitions)
    columns = ("ranks", "imbalance", "steps", "of theirs", "in order, ms", "balanced, ms", "gain")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_documents(folder, _DOCUMENTS)
        found = {layout: simulated(folder, layout, costs, steps) for layout in LAYOUTS}
        timed = {each: clocked(folder, each, costs, clock) for each in CLOCKED if clock}
    tables = [
        Table(
            columns=("call", "measured, ms", "by the fit, ms"),
            rows=tuple(rows_of_costs(costs)),
            caption="Costs: processor time of one thread, medians",
        ),
        Table(
            columns=columns,
            rows=tuple(
                row for layout in LAYOUTS for row in rows_of_pairs(_named(layout), found[layout])
            ),
            caption="Four ranks by simulation of these costs, means of the steps of an imbalance",
        ),
    ]
    for layout, pairs in timed.items():
        rows = (
            *with_bounds("wall time", [pair for pair, _ in pairs]),
            *with_bounds("the same steps, simulated", [pair for _, pair in pairs]),
        )
        caption = f"{_named(layout)} over gloo, one thread each, both ways alternately"
        tables.append(Table(columns=(*columns, "largest possible"), rows=rows, caption=caption))
    for table in tables:
        print_table(table)
    gains = [float(str(row[-1])) for row in tables[1].rows]
    if report and gains:
        reading = READING.format(
            length=LENGTH, gain=mean(gains), least=min(gains), most=max(gains), paper=PAPER
        )
        path = write_report(
            __file__,
            "vision_balance",
            "Step time of the included vision model, balanced against in order",
            f"python -m benchmarks.trainer.vision_balance --repetitions {repetitions} --steps {steps} --clock {clock}",
            tables,
            reading.replace("\n", " "),
        )
        click.echo(f"wrote {path.name}")


if __name__ == "__main__":
    main()

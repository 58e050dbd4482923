"""Batches per second of a loader: torch's, torchdata's and ours, alternately.

python -m benchmarks.loaders.dataloader --help
"""

import itertools
import os
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import chdir
from pathlib import Path
from statistics import median
from typing import Any, cast

import click
import torch
from torch.utils.data import DataLoader as TorchLoader

from benchmarks.loaders.mixed_sources import MixedSources, build_sources, mix_of
from benchmarks.loaders.ranks_memory import memory_rows
from benchmarks.loaders.work import CONTENDERS, Tokens, Turn, turn_of
from benchmarks.report import Table, print_table, write_report
from omniload.front.batches.training_batch import TrainingBatch
from trainer_integration import DataLoader

__all__ = ["main", "rows_of"]

CASES = (
    ("tokens", 2, False),
    ("tokens and labels", 2, False),
    ("tokens", 0, False),
    ("tokens and labels", 0, False),
    ("images", 2, False),
    ("images", 2, True),
)
"""Work, workers, and whether each batch is copied by the consumer."""
_BATCHES = {"tokens": 2_000, "tokens and labels": 2_000, "images": 100}
_RESUMED = 10_000


def rows_of(case: tuple[str, int, bool], turns: dict[str, list[Turn]]) -> Iterator[tuple[str, ...]]:
    """Yield one row for each contender: medians, and the ratio of ours to theirs, turn by turn."""
    work, workers, read = case
    for name, own in turns.items():
        pairs = zip(turns["ours"], own, strict=True)
        ratios = [ours.rate / theirs.rate for ours, theirs in pairs]
        yield (
            f"{work}, {'read' if read else 'not read'}",
            str(workers),
            name,
            f"{median(turn.rate for turn in own):,.0f}",
            f"{min(turn.rate for turn in own):,.0f}",
            f"{median(turn.cpu_ms for turn in own):.2f}",
            f"{median(ratios):.2f}",
        )


def throughput(rounds: int, share: float) -> Table:
    """Give every loader its turn in every round; the order rotates."""
    rows: list[tuple[str, ...]] = []
    for case in CASES:
        work, workers, read = case
        turns: dict[str, list[Turn]] = {name: [] for name in CONTENDERS}
        for number in range(rounds):
            names = list(CONTENDERS)
            for name in names[number % 3 :] + names[: number % 3]:
                batches = max(16, int(_BATCHES[work] * share))
                turn = turn_of(name, work, workers=workers, batches=batches, read=read)
                turns[name].append(turn)
        rows += rows_of(case, turns)
    columns = (
        "samples",
        "workers",
        "loader",
        "batches/s",
        "slowest",
        "CPU ms/batch",
        "ours over it",
    )
    caption = f"Batches of 32, median of {rounds} interleaved turns; the ratio is the median over pairs of turns"
    return Table(columns=columns, rows=tuple(rows), caption=caption)


def resumes(rounds: int) -> Table:
    """Time a new loader from ``load_state_dict`` to its first batch after 10,000 batches."""
    rows = [
        _resume("map dataset, 2 workers", _map_loader, rounds),
        _resume("map dataset, 0 workers", lambda: _map_loader(0), rounds),
    ]
    corpus = MixedSources(sources=2, shards=1, documents=4_000)
    with tempfile.TemporaryDirectory() as name, chdir(name):
        folder = Path(name, "corpus")
        build_sources(folder, corpus)  # this makes its folder again
        os.chdir(folder)
        rows.append(_resume("mix of 2 sources", lambda: _mix_loader(corpus), rounds))
    columns = ("dataset", "median s", "slowest s", "same batch")
    caption = f"From load_state_dict to the first batch, after {_RESUMED:,} batches, {rounds} times"
    return Table(columns=columns, rows=tuple(rows), caption=caption)


def _map_loader(workers: int = 2) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(1)
    samples = Tokens(4 * (_RESUMED + 100))
    return DataLoader(samples, 4, shuffle=True, num_workers=workers, generator=generator)


def _mix_loader(corpus: MixedSources) -> DataLoader[Any]:
    mix = mix_of(corpus.names, corpus.weights, rows=1, micro_rows=1, length=256)
    return DataLoader(mix)


def _resume(name: str, make: Callable[[], DataLoader[Any]], rounds: int) -> tuple[str, ...]:
    loader = make()
    batches = iter(loader)
    next(itertools.islice(batches, _RESUMED - 1, _RESUMED))
    state = loader.state_dict()
    expected = _digest(next(batches))
    del batches
    loader.close()
    waits_s, same = [], True
    for _ in range(rounds):
        again = make()
        began_s = time.perf_counter()
        again.load_state_dict(state)
        batches = iter(again)
        first = next(batches)
        waits_s.append(time.perf_counter() - began_s)
        same = same and _digest(first) == expected
        del batches
        again.close()
    return name, f"{median(waits_s):.2f}", f"{max(waits_s):.2f}", "yes" if same else "NO"


def _digest(batch: object) -> list[int]:
    tokens = batch if isinstance(batch, torch.Tensor) else cast("TrainingBatch", batch).tokens
    return [int(each) for each in tokens.flatten()]


@click.command()
@click.option("--rounds", default=5, show_default=True, help="Turns of every loader.")
@click.option("--share", default=1.0, show_default=True, help="Part of the batches of a turn.")
@click.option(
    "--samples", default=2_000_000, show_default=True, help="Samples of the part 'memory'."
)
@click.option(
    "--parts", default="throughput,resume,memory", show_default=True, help="Parts to measure."
)
@click.option("--report/--no-report", default=True, help="Write the dated report.")
def main(rounds: int, share: float, samples: int, parts: str, report: bool) -> None:
    """Measure loaders of plain datasets compared with torch's and torchdata's."""
    warnings.filterwarnings("ignore", message="This DataLoader will create")
    warnings.filterwarnings("ignore", message="'set_vital'")
    tables = []
    if "throughput" in parts:
        tables.append(throughput(rounds, share))
    if "resume" in parts:
        tables.append(resumes(rounds))
    if "memory" in parts:
        rows = tuple(memory_rows(4, samples))
        columns = ("loader", "processes", "PSS, MiB", "of torch's")
        caption = f"4 ranks, 2 workers each, one shuffled epoch of {samples:,} small dicts read, each rank its part"
        tables.append(Table(columns=columns, rows=rows, caption=caption))
    for table in tables:
        print_table(table)
    if report:
        command = f"python -m benchmarks.loaders.dataloader --rounds {rounds} --share {share:g} --parts {parts}"
        print(
            write_report(
                __file__, "dataloader", "Loaders of plain datasets", command, tables, _READING
            )
        )


_READING = (
    f"torch is {torch.__version__}. The samples lie in memory, so the loaders themselves are measured and not the "
    f"reading or decoding of files. *read* means that the consumer copies each batch once. The machine is shared: "
    f"ratios within a turn and CPU time say more than rates. {TorchLoader.__name__} and torchdata run "
    "with their own defaults."
)

if __name__ == "__main__":
    main()

"""Tokens per second of one rank, from the data plane and from the usual loaders of today.

python -m benchmarks.loaders.throughput --help
"""

import multiprocessing
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from statistics import median

import click

from benchmarks.loaders.baseline_loaders import Rows, dataloader, torchdata_nodes
from benchmarks.loaders.mixed_sources import MixedSources, build_sources, mix_of
from benchmarks.report import Table, print_table, write_report
from omniload.actors.local.plane import LocalPlane
from omniload.actors.plane import PlaneSpec
from omniload.batch.microbatch import Microbatch
from omniload.client import Client
from omniload.plan.place_tree import ClientPlaceTree

__all__ = ["CONTENDERS", "main", "rate_of"]

_ROWS_PER_STEP = 64
_WARM_UP_S = 1.0
OURS = "omniload, local runtime"
LISTS = "DataLoader, 2 workers, lists"
ARRAYS = "DataLoader, 2 workers, numpy views"
NODES = "torchdata.nodes, threads, numpy views"


def omniload(work: Rows) -> Iterator[int]:
    """Read through the local runtime; a step has the rows that the others yield at a time."""
    mix = mix_of(
        work.corpus.names,
        work.corpus.weights,
        rows=work.step_rows or work.rows,
        micro_rows=work.rows,
        length=work.length,
    )
    spec = PlaneSpec(mix=mix, base_dir=work.folder, tree=ClientPlaceTree.of(dp=1))
    with LocalPlane(spec) as plane, Client(plane.handle(0)) as client:
        for batch in client:
            for rows in batch.microbatches:
                assert isinstance(rows, Microbatch), "no cp peers share them"
                _ = rows.labels_RT, rows.positions_RT  # made on the first access, as in a trainer
            yield sum(batch.tokens_by_source.values())  # padding does not count


CONTENDERS: Mapping[str, Callable[[Rows], Iterator[int]]] = {
    OURS: omniload,
    LISTS: lambda work: dataloader(work, "lists", 2),
    ARRAYS: lambda work: dataloader(work, "arrays", 2),
    NODES: torchdata_nodes,
}


def rate_of(stream: Iterator[int], *, warm_up_s: float, measure_s: float) -> float:
    """Return the tokens per second of ``stream`` once it is warm."""
    began_s = time.perf_counter()
    next(stream)
    while time.perf_counter() - began_s < warm_up_s:
        next(stream)
    began_s, tokens = time.perf_counter(), 0
    while (passed_s := time.perf_counter() - began_s) < measure_s or not tokens:
        tokens += next(stream)
    return tokens / passed_s


def measured_alone(name: str, work: Rows, measure_s: float) -> float:
    """Measure one contender; called in a process of its own."""
    return rate_of(CONTENDERS[name](work), warm_up_s=_WARM_UP_S, measure_s=measure_s)


def rounds_of(work: Rows, repeats: int, measure_s: float) -> dict[str, list[float]]:
    """Measure every contender ``repeats`` times, alternately, each time in a fresh process."""
    rates: dict[str, list[float]] = {name: [] for name in CONTENDERS}
    spawn = multiprocessing.get_context("spawn")
    for turn in range(repeats):
        names = list(CONTENDERS)
        # The order rotates, because the first contender after a pause finds a cooler machine.
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            with ProcessPoolExecutor(1, mp_context=spawn) as pool:
                rates[name].append(pool.submit(measured_alone, name, work, measure_s).result())
            click.echo(f"{turn + 1}/{repeats} {name}: {rates[name][-1] / 1e6:.1f} million tokens/s")
    return rates


def table_of(rates: Mapping[str, list[float]]) -> Table:
    """Return the medians, and the ratio of ours to each."""
    ours = median(rates[OURS])
    rows = tuple(
        (
            name,
            f"{median(found) / 1e6:.1f}",
            f"{min(found) / 1e6:.1f}",
            f"{max(found) / 1e6:.1f}",
            f"{ours / median(found):.2f}",
        )
        for name, found in rates.items()
    )
    return Table(
        columns=("loader", "million tokens/s", "least", "most", "omniload over it"),
        rows=rows,
        caption=f"Medians of {len(rates[OURS])} runs of each, in turns",
    )


READING = """\
omniload gives {lists:.1f} times the tokens of a `DataLoader` with two workers that keeps documents as lists, as
tutorials do, {arrays:.2f} times those of the same `DataLoader` with views of the Arrow column and one copy of every
token, and {nodes:.2f} times those of `torchdata.nodes` with a decoding thread for every source and the same views.
All read the same files, {sources} sources of log-normal documents (mean about 650 tokens, cut at 32k) with weights
from 1 to {sources}, and give {rows} rows of {length:,} tokens at a time. The work is not the same, to our
disadvantage. The baselines give tokens alone, in random order of sources and stored order of documents, and keep no
exact place to resume from. omniload shuffles rows within blocks, meets the weights to the token, packs best-fit
without cutting documents, balances, and also gives labels, positions, source numbers, document bounds and keys. The
baselines give padding-free rows; padding of ours is not counted. Every run is a fresh process, warmed up for
{warm:.0f} s and measured for {seconds:.0f} s; files are in the page cache. The consumer reads labels and positions of
ours, which are made on access, and touches nothing else."""


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--repeats", default=5, show_default=True, type=click.IntRange(1), help="Runs of each loader."
)
@click.option("--seconds", default=5.0, show_default=True, help="Time of a measured run.")
@click.option(
    "--documents", default=3_000, show_default=True, help="Documents in each of 32 files."
)
@click.option(
    "--folder",
    type=click.Path(file_okay=False, path_type=Path),
    help="Folder that keeps the corpus.",
)
@click.option("--report/--no-report", default=True, show_default=True, help="Write the report.")
def main(repeats: int, seconds: float, documents: int, folder: Path | None, report: bool) -> None:
    """Compare loaders on a mix of pre-tokenised parquet sources.

    \b
    Example:
      python -m benchmarks.loaders.throughput --repeats 1 --seconds 2 --no-report
    """  # noqa: D301 -- click's own marker
    corpus = MixedSources(documents=documents)
    with tempfile.TemporaryDirectory() as made:
        work = Rows(
            folder=folder or Path(made),
            corpus=corpus,
            length=8_192,
            rows=8,
            step_rows=_ROWS_PER_STEP,
        )
        build_sources(work.folder, corpus)
        rates = rounds_of(work, repeats, seconds)
    table = table_of(rates)
    print_table(table)
    if report:
        ours = median(rates[OURS])
        reading = READING.format(
            lists=ours / median(rates[LISTS]),
            arrays=ours / median(rates[ARRAYS]),
            nodes=ours / median(rates[NODES]),
            sources=corpus.sources,
            rows=work.rows,
            length=work.length,
            warm=_WARM_UP_S,
            seconds=seconds,
        )
        path = write_report(
            __file__,
            "throughput",
            "Tokens a second of one rank",
            f"python -m benchmarks.loaders.throughput --repeats {repeats} --seconds {seconds:g} "
            f"--documents {documents}",
            [table],
            reading.replace("\n", " "),
        )
        click.echo(f"wrote {path.name}")


if __name__ == "__main__":
    main()

"""What several ranks get through Ray, and what all processes take of memory, beside what people use today.

python -m benchmarks.loaders.ranks --help
"""

import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median

import click

from benchmarks.loaders.ranks_jobs import (
    DATALOADER,
    JOBS,
    OURS,
    Job,
    Pss,
    build_corpus,
    running,
)
from benchmarks.report import Table, print_table, write_report

__all__ = ["main", "memory_table", "rates_table"]

_MIB, _GIB = 1 << 20, 1 << 30
_RANKS = 4
_SPEEDS = ((16, 2), (16, 16), (128, 2))
"""Sources, and rows of a rank and step, whose rates are measured."""
_SPEED_GROUP, _MEMORY_GROUP = 4 * _MIB // 3, 8 * _MIB
"""Bytes of token ids in a row group: as many documents as a reader takes at a time, and large ones."""
_SOURCES = (8, 128)
_MANY_SOURCES, _MANY_RANKS = 306, 8
"""The paper's sources; memory of the others is extrapolated to them, since no machine here would hold it."""

Rate = tuple[float, float]
"""Tokens a second, and tokens a CPU second of all processes."""


def rate_of(name: str, job: Job, seconds: float) -> Rate:
    """Measure a job once its ranks are warm."""
    with running(name, job) as found:
        began_s, tokens, used_s = time.perf_counter(), found.tokens, found.cpu_s()
        time.sleep(seconds)
        tokens, passed_s = found.tokens - tokens, time.perf_counter() - began_s
        return tokens / passed_s, tokens / (found.cpu_s() - used_s)


def rates_table(found: Sequence[tuple[Job, dict[str, list[Rate]]]]) -> Table:
    """Return million tokens a second, and a CPU second, of every job and loader."""
    rows = []
    for job, rates in found:
        ours = median(rate for rate, _ in rates[OURS])
        for name, measured in rates.items():
            rate = median(rate for rate, _ in measured)
            rows.append(
                (
                    f"{job.sources} sources, {job.rows * 4}k a rank and step",
                    name,
                    f"{rate / 1e6:.1f}",
                    f"{median(each for _, each in measured) / 1e6:.1f}",
                    f"{ours / rate:.2f}",
                )
            )
    return Table(
        columns=("job", "loader", "million tokens/s", "a CPU second", "omniload over it"),
        rows=tuple(rows),
        caption=f"{_RANKS} ranks, medians in turns",
    )


def memory_table(ours: dict[tuple[int, int], Pss], others: dict[int, Pss]) -> Table:
    """Return what all processes of jobs take; of ours also by sources and ranks, of others by sources.

    Args:
        ours: By sources and ranks.
        others: By sources, at four ranks of two workers.
    """
    few, many = sorted(others)
    a_source = (others[many].total - others[few].total) / (many - few) / _RANKS
    rows = []
    for (sources, ranks), found in sorted(ours.items()):
        extrapolated = (others[few].total / _RANKS + a_source * (sources - few)) * ranks
        measured = others[sources].total if ranks == _RANKS and sources in others else None
        total = measured or extrapolated
        rows.append(
            (
                sources,
                ranks,
                f"{found.total / _GIB:.2f}",
                f"{found.others / _GIB:.2f}",
                f"{total / _GIB:.1f}{'' if measured else ' (from its line)'}",
                f"{total / found.total:.1f}",
            )
        )
    slope = (ours[many, _RANKS].total - ours[few, _RANKS].total) / (many - few) / _MIB
    return Table(
        columns=(
            "sources",
            "ranks",
            "omniload, GiB",
            "of that without the ranks' processes",
            f"{DATALOADER}, GiB",
            "times",
        ),
        rows=tuple(rows),
        caption=f"Proportional set sizes of all processes; a source more takes {slope:.1f} MiB of ours",
    )


READING = """\
Log-normal documents of 400 tokens in the median, cut at 4,096, in parquet; each rank gets rows of 4,096 tokens. Every
rank of torch's loaders reads every source in each of two workers, as people do; ranks of ours are processes on one
data plane of Ray on the same machine, and read tokens, labels and positions. Every process counts, what several share
once. The work is not the same, to our disadvantage, as in the report of `benchmarks.loaders.throughput`."""


def _measured_rates(folder: Path, repeats: int, seconds: float) -> Table:
    found = []
    for sources, rows in _SPEEDS:
        corpus = folder / f"speed-{sources}"
        if not corpus.exists():
            corpus.mkdir()
            build_corpus(corpus, sources=sources, group_bytes=_SPEED_GROUP)
        job = Job(folder=corpus, sources=sources, ranks=_RANKS, rows=rows)
        rates: dict[str, list[Rate]] = {name: [] for name in JOBS}
        for _ in range(repeats):
            for name in JOBS:
                rates[name].append(rate_of(name, job, seconds))
                rate, each = rates[name][-1]
                click.echo(
                    f"{sources} sources, {rows} rows, {name}: {rate / 1e6:.1f}, {each / 1e6:.1f}"
                )
        found.append((job, rates))
    return rates_table(found)


def _measured_memory(folder: Path) -> Table:
    ours, others = {}, {}
    jobs = [(sources, _RANKS) for sources in _SOURCES]
    for sources, ranks in [*jobs, (_SOURCES[0], 16), (_MANY_SOURCES, _MANY_RANKS)]:
        corpus = folder / f"memory-{sources}"
        if not corpus.exists():
            corpus.mkdir()
            build_corpus(corpus, sources=sources, group_bytes=_MEMORY_GROUP)
        job = Job(folder=corpus, sources=sources, ranks=ranks)
        with running(OURS, job) as found:
            ours[sources, ranks] = found.pss()
        click.echo(f"{sources} sources, {ranks} ranks, {OURS}: {ours[sources, ranks]}")
        if (sources, ranks) in jobs:
            with running(DATALOADER, job) as found:
                others[sources] = found.pss()
            click.echo(f"{sources} sources, {ranks} ranks, {DATALOADER}: {others[sources]}")
    return memory_table(ours, others)


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--rates/--no-rates", default=True, show_default=True, help="Measure tokens a second."
)
@click.option("--memory/--no-memory", default=True, show_default=True, help="Measure memory.")
@click.option(
    "--repeats",
    default=3,
    show_default=True,
    type=click.IntRange(1),
    help="Runs of each, of rates.",
)
@click.option("--seconds", default=5.0, show_default=True, help="Measured time of a run.")
@click.option("--report/--no-report", default=True, show_default=True, help="Write the report.")
def main(rates: bool, memory: bool, repeats: int, seconds: float, report: bool) -> None:
    """Compare what four ranks and more get and take, on the data plane and with loaders of their own.

    \b
    Example:
      python -m benchmarks.loaders.ranks --no-memory --repeats 1 --no-report
    """  # noqa: D301 -- click's own marker
    with tempfile.TemporaryDirectory() as made:
        tables = [_measured_rates(Path(made), repeats, seconds)] if rates else []
        tables += [_measured_memory(Path(made))] if memory else []
    for table in tables:
        print_table(table)
    if report:
        parts = "".join(f" --no-{p}" for p, on in (("rates", rates), ("memory", memory)) if not on)
        path = write_report(
            "ranks",
            "Several ranks: tokens a second, and memory of all processes",
            f"python -m benchmarks.loaders.ranks --repeats {repeats} --seconds {seconds:g}{parts}",
            tables,
            READING.replace("\n", " "),
        )
        click.echo(f"wrote {path.name}")


if __name__ == "__main__":
    main()

"""Rates of several ranks through Ray and memory of all processes, compared with the usual loaders of today.

python -m benchmarks.loaders.ranks --help
"""

import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import click

from benchmarks.loaders.ranks_jobs import (
    DATALOADER,
    JOBS,
    OURS,
    Job,
    Pss,
    RunningJob,
    build_corpus,
    running,
)
from benchmarks.report import Table, print_table, write_report

__all__ = ["main", "memory_table", "rates_table"]

_MIB, _GIB = 1 << 20, 1 << 30
_RANKS = 4
_SPEEDS = ((16, 2), (16, 16), (128, 2))
"""Sources, and rows of a rank and step, of the measured rates."""
_SPEED_GROUP, _MEMORY_GROUP = 4 * _MIB // 3, 8 * _MIB
"""Bytes of token ids in a row group: the documents that a reader takes at a time, and large groups."""
_SOURCES = (8, 128)
_FLAT_RANKS, _LOOKS = (4, 16, 32), 12
_KINDS = {
    "ray::LoaderActor": "loaders",
    "ray::ConstructorActor": "constructors",
    "ray::PlannerActor": "planner",
}
_MANY_SOURCES, _MANY_RANKS = 306, 8
"""The paper's sources. The memory of other loaders is extrapolated to them, because no machine here would hold it."""

Rate = tuple[float, float]
"""Tokens per second, and tokens per CPU second of all processes."""


def rate_of(name: str, job: Job, seconds: float) -> Rate:
    """Measure a job once its ranks are warm."""
    with running(name, job) as found:
        began_s, tokens, used_s = time.perf_counter(), found.tokens, found.cpu_s()
        time.sleep(seconds)
        tokens, passed_s = found.tokens - tokens, time.perf_counter() - began_s
        return tokens / passed_s, tokens / (found.cpu_s() - used_s)


def rates_table(found: Sequence[tuple[Job, dict[str, list[Rate]]]]) -> Table:
    """Return million tokens per second, and per CPU second, of every job and loader."""
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
    """Return the memory of all processes of jobs: ours by sources and ranks, others by sources.

    Args:
        ours: Memory by sources and ranks.
        others: Memory by sources, at four ranks of two workers.
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


def flat_table(found: Mapping[int, Pss]) -> Table:
    """Return the memory of all processes except the ranks' own, by kind."""
    rows = []
    kinds = [*_KINDS.values(), "Ray and the opener"]
    for ranks, of in sorted(found.items()):
        by_kind = dict.fromkeys(kinds, 0)
        for name, size in of.by_name.items():
            if not name.startswith("bench-rank"):
                by_kind[_KINDS.get(name.partition(".")[0], kinds[-1])] += size
        rows.append(
            (ranks, f"{of.others / _MIB:,.0f}", *(f"{by_kind[kind] / _MIB:,.0f}" for kind in kinds))
        )
    return Table(
        columns=("ranks", "all but the ranks' own, MiB", *kinds),
        rows=tuple(rows),
        caption=f"{_SOURCES[0]} sources, ranks without torch: what ranks more take beside their own processes",
    )


READING = """\
Log-normal documents of 400 tokens in the median, cut at 4,096, in parquet; each rank gets rows of 4,096 tokens. With
torch's loaders every rank reads every source in each of two workers, which is the usual way. Our ranks are processes
on one data plane of Ray on the same machine, and read tokens, labels and positions. Every process counts, and shared
memory counts once. The work is not the same, to our disadvantage, as in the report of
`benchmarks.loaders.throughput`. The memory by ranks is measured without torch in them. It is the most of {looks}
looks a second apart, because source loaders fill their memory with decoded blocks first."""


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


def _most(job: RunningJob) -> Pss:
    """Return the most memory of a job in a while: source loaders fill their memory with decoded blocks first."""
    found = []
    for _ in range(_LOOKS):
        found.append(job.pss())
        time.sleep(1.0)
    return max(found, key=lambda pss: pss.others)


def _measured_flat(folder: Path, ranks: Sequence[int]) -> Table:
    corpus = folder / f"memory-{_SOURCES[0]}"
    if not corpus.exists():
        corpus.mkdir()
        build_corpus(corpus, sources=_SOURCES[0], group_bytes=_MEMORY_GROUP)
    found = {}
    for count in ranks:
        job = Job(folder=corpus, sources=_SOURCES[0], ranks=count, has_torch=False)
        with running(OURS, job) as its:
            found[count] = _most(its)
        click.echo(f"{count} ranks without torch: {found[count]}")
    return flat_table(found)


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--rates/--no-rates", default=True, show_default=True, help="Measure tokens per second."
)
@click.option("--memory/--no-memory", default=True, show_default=True, help="Measure memory.")
@click.option(
    "--flat/--no-flat",
    default=True,
    show_default=True,
    help="Measure memory by ranks, without torch.",
)
@click.option("--flat-ranks", type=int, multiple=True, default=_FLAT_RANKS, show_default=True)
@click.option(
    "--repeats",
    default=3,
    show_default=True,
    type=click.IntRange(1),
    help="Runs of each rate.",
)
@click.option("--seconds", default=5.0, show_default=True, help="Time of a measured run.")
@click.option("--report/--no-report", default=True, show_default=True, help="Write the report.")
def main(
    *,
    rates: bool,
    memory: bool,
    flat: bool,
    repeats: int,
    seconds: float,
    **how: Any,  # noqa: ANN401 -- what is left of the options
) -> None:
    """Compare rates and memory of four ranks and more, on the data plane and with loaders of their own.

    \b
    Example:
      python -m benchmarks.loaders.ranks --no-memory --repeats 1 --no-report
    """  # noqa: D301 -- click's own marker
    with tempfile.TemporaryDirectory() as made:
        tables = [_measured_rates(Path(made), repeats, seconds)] if rates else []
        tables += [_measured_memory(Path(made))] if memory else []
        tables += [_measured_flat(Path(made), how["flat_ranks"])] if flat else []
    for table in tables:
        print_table(table)
    if how["report"]:
        measured = (("rates", rates), ("memory", memory), ("flat", flat))
        parts = "".join(f" --no-{part}" for part, on in measured if not on)
        path = write_report(
            __file__,
            "ranks" if rates else "ranks_memory",
            "Several ranks: tokens a second, and memory of all processes",
            f"python -m benchmarks.loaders.ranks --repeats {repeats} --seconds {seconds:g}{parts}",
            tables,
            READING.format(looks=_LOOKS).replace("\n", " "),
        )
        click.echo(f"wrote {path.name}")


if __name__ == "__main__":
    main()

"""Rates of one rank at small and large steps, from the data plane and from the usual loaders of today.

python -m benchmarks.loaders.step_sizes --help
"""

import tempfile
from collections.abc import Mapping
from pathlib import Path
from statistics import median

import click

from benchmarks.loaders.baseline_loaders import Rows
from benchmarks.loaders.mixed_sources import MixedSources, build_sources
from benchmarks.loaders.throughput import CONTENDERS, OURS, rounds_of
from benchmarks.report import Table, print_table, write_report

__all__ = ["main", "table_of"]

_ROW_TOKENS = 4_096
_STEPS = (8_192, 32_768, 131_072, 524_288)


def table_of(found: Mapping[int, Mapping[str, list[float]]]) -> Table:
    """Return million tokens per second by tokens of a step, and the ratio of ours to the best other loader."""
    others = [name for name in CONTENDERS if name != OURS]
    rows = []
    for tokens, rates in found.items():
        ours, best = median(rates[OURS]), max(median(rates[name]) for name in others)
        rows.append(
            (
                f"{tokens // 1024}k",
                f"{ours / 1e6:.1f} ({min(rates[OURS]) / 1e6:.1f} to {max(rates[OURS]) / 1e6:.1f})",
                *(f"{median(rates[name]) / 1e6:.1f}" for name in others),
                f"{ours / best:.2f}",
            )
        )
    repeats = len(next(iter(found.values()))[OURS])
    return Table(
        columns=("tokens a step", OURS, *others, "omniload over the best other"),
        rows=tuple(rows),
        caption=f"Million tokens a second, medians of {repeats} runs of each, in turns; least and most in brackets",
    )


READING = """\
One rank takes steps of 8 thousand to 512 thousand tokens of the same {sources} sources; a step of the other loaders
is a batch with the same number of rows of {row:,} tokens. The work is not the same, to our disadvantage, as in the
report of `benchmarks.loaders.throughput`: the others give tokens alone and keep no exact place to resume from. Every
run is a fresh process, warmed up for 1 s and measured for {seconds:g} s; files are in the page cache. The consumer
reads labels and positions of ours, which are made on access, and touches nothing else."""


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--repeats", default=3, show_default=True, type=click.IntRange(1), help="Runs of each loader."
)
@click.option("--seconds", default=3.0, show_default=True, help="Time of a measured run.")
@click.option(
    "--documents", default=3_000, show_default=True, help="Documents in each of 32 files."
)
@click.option("--report/--no-report", default=True, show_default=True, help="Write the report.")
def main(repeats: int, seconds: float, documents: int, report: bool) -> None:
    """Compare loaders over the usual step sizes.

    \b
    Example:
      python -m benchmarks.loaders.step_sizes --repeats 1 --seconds 2 --no-report
    """  # noqa: D301 -- click's own marker
    corpus = MixedSources(documents=documents)
    found = {}
    with tempfile.TemporaryDirectory() as made:
        build_sources(Path(made), corpus)
        for tokens in _STEPS:
            rows = tokens // _ROW_TOKENS
            work = Rows(folder=Path(made), corpus=corpus, length=_ROW_TOKENS, rows=rows)
            click.echo(f"{tokens} tokens a step")
            found[tokens] = rounds_of(work, repeats, seconds)
    table = table_of(found)
    print_table(table)
    if report:
        path = write_report(
            __file__,
            "step_sizes",
            "Tokens a second of one rank, by the size of a step",
            f"python -m benchmarks.loaders.step_sizes --repeats {repeats} --seconds {seconds:g} "
            f"--documents {documents}",
            [table],
            READING.format(sources=corpus.sources, row=_ROW_TOKENS, seconds=seconds).replace(
                "\n", " "
            ),
        )
        click.echo(f"wrote {path.name}")


if __name__ == "__main__":
    main()

"""Tokens a second of one rank in this tree and at an earlier commit, in turns: whether what came since costs anything.

python -m benchmarks.data.since --help
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import click

from benchmarks.loaders.mixed_sources import MixedSources, build_sources
from benchmarks.report import Table, print_table, write_report

__all__ = ["Rate", "main", "table_of"]

BEFORE_COLUMNS = "6116422^"
"""The last commit in which a sample was one list of token ids."""
_ROOT = Path(__file__).resolve().parents[2]
_STEPS = (32_768, 131_072, 524_288)
_LENGTH = 4_096
_LIMIT_S = 120.0
_RUN = """
import json, sys, time
from pathlib import Path
from benchmarks.loaders.baseline_loaders import Rows
from benchmarks.loaders.mixed_sources import MixedSources
from benchmarks.loaders.throughput import omniload
folder, documents, length, rows, seconds = sys.argv[1], *map(float, sys.argv[2:])
corpus = MixedSources(documents=int(documents))
stream = omniload(Rows(folder=Path(folder), corpus=corpus, length=int(length), rows=int(rows)))
until_s = time.perf_counter() + 1
while time.perf_counter() < until_s:
    next(stream)
began_s, spent_s, tokens = time.perf_counter(), time.process_time(), 0
while time.perf_counter() - began_s < seconds:
    tokens += next(stream)
found = [tokens / (time.perf_counter() - began_s), tokens / (time.process_time() - spent_s)]
stream.close()
print(json.dumps(found))
"""


@dataclass(frozen=True, slots=True)
class Rate:
    """What one process gave."""

    by_wall: float
    """Tokens a second."""
    by_cpu: float
    """Tokens a processor second of all threads."""


@contextmanager
def tree_of(commit: str) -> Iterator[Path]:
    """Give a folder with the files of a commit."""
    with tempfile.TemporaryDirectory() as made:
        packed = subprocess.run(
            ["git", "-C", str(_ROOT), "archive", commit], check=True, capture_output=True
        ).stdout
        subprocess.run(["tar", "x", "-C", made], input=packed, check=True)
        yield Path(made)


def rate_of(tree: Path, folder: Path, corpus: MixedSources, rows: int, seconds: float) -> Rate:
    """Measure a tree in a process of its own."""
    arguments = (str(folder), *map(str, (corpus.documents, _LENGTH, rows, seconds)))
    ended = subprocess.run(
        [sys.executable, "-c", _RUN, *arguments],
        cwd=tree,
        env=os.environ | {"PYTHONPATH": str(tree)},
        check=True,
        capture_output=True,
        text=True,
        timeout=_LIMIT_S,
    )
    return Rate(*json.loads(ended.stdout.splitlines()[-1]))


def table_of(found: Mapping[int, Mapping[str, Sequence[Rate]]]) -> Table:
    """Return medians of both trees by the size of a step, and the ratios of this one over the earlier."""
    rows = []
    for tokens, rates in found.items():
        walls, cpus = (
            {name: median(getattr(each, by) for each in runs) for name, runs in rates.items()}
            for by in ("by_wall", "by_cpu")
        )
        rows.append(
            (
                f"{tokens // 1024}k",
                *(f"{walls[name] / 1e6:.1f}" for name in ("before", "now")),
                f"{walls['now'] / walls['before']:.2f}",
                *(f"{cpus[name] / 1e6:.1f}" for name in ("before", "now")),
                f"{cpus['now'] / cpus['before']:.2f}",
            )
        )
    return Table(
        columns=(
            *("tokens a step", "before, million tokens/s", "now", "now over before"),
            *("before, million tokens a CPU second", "now, a CPU second", "now over before, CPU"),
        ),
        rows=tuple(rows),
        caption=f"Medians of {len(next(iter(found.values()))['now'])} processes of each, in turns",
    )


READING = """\
One rank of the local runtime reads sources of token ids alone, 16 of two files each, in rows of {length:,} tokens.
Before is commit {commit}; each tree runs the same loop with its own code in processes of its own, warmed up for 1 s and
measured for {seconds:g} s, files in the page cache."""


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--commit", default=BEFORE_COLUMNS, show_default=True, help="What to compare with.")
@click.option("--repeats", default=3, show_default=True, type=click.IntRange(1))
@click.option("--seconds", default=3.0, show_default=True, help="Measured time of a run.")
@click.option("--report/--no-report", default=True, show_default=True, help="Write the report.")
def main(commit: str, repeats: int, seconds: float, report: bool) -> None:
    """Compare this tree with an earlier one; by default with the last before samples had columns.

    \b
    Example:
      python -m benchmarks.data.since --repeats 1 --no-report
    """  # noqa: D301 -- click's own marker
    corpus = MixedSources()
    found: dict[int, dict[str, list[Rate]]] = {}
    with tempfile.TemporaryDirectory() as made, tree_of(commit) as earlier:
        build_sources(Path(made), corpus)
        for tokens in _STEPS:
            found[tokens] = {"before": [], "now": []}
            for turn in range(repeats):
                trees = {"before": earlier, "now": _ROOT}
                for name in sorted(trees, reverse=bool(turn % 2)):
                    rate = rate_of(trees[name], Path(made), corpus, tokens // _LENGTH, seconds)
                    found[tokens][name].append(rate)
                    click.echo(f"{tokens} {name}: {rate.by_wall / 1e6:.1f} million tokens/s")
    table = table_of(found)
    print_table(table)
    if report:
        path = write_report(
            __file__,
            "since",
            "Token ids alone, before samples had columns and now",
            f"python -m benchmarks.data.since --commit {commit} --repeats {repeats} --seconds {seconds:g}",
            [table],
            READING.format(length=_LENGTH, commit=commit, seconds=seconds).replace("\n", " "),
        )
        click.echo(f"wrote {path.name}")


if __name__ == "__main__":
    main()

"""Tokens per second of one rank in this tree and at an earlier commit, alternately: the cost of later changes.

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

from benchmarks.loaders.baseline_loaders import Rows
from benchmarks.loaders.mixed_sources import MixedSources, build_sources, mix_of
from benchmarks.report import Table, print_table, write_report
from omniload.actors.local.plane import LocalPlane
from omniload.actors.plane import PlaneSpec
from omniload.batch.microbatch import Microbatch
from omniload.client import Client
from omniload.mix.config import MixConfig
from omniload.plan.place_tree import ClientPlaceTree

__all__ = ["Rate", "main", "table_of"]

BEFORE_COLUMNS = "6116422^"
"""The last commit in which a sample was one list of token ids."""
_ROOT = Path(__file__).resolve().parents[2]
_STEPS = (32_768, 131_072, 524_288)
WITH_COLUMN = "with a column"
_LENGTH = 4_096
_LIMIT_S = 120.0
_RUN = """
import json, sys, time
from pathlib import Path
from benchmarks.loaders.baseline_loaders import Rows
from benchmarks.loaders.mixed_sources import MixedSources
from benchmarks.loaders.throughput import omniload
folder, documents, length, rows, seconds = sys.argv[1], *map(float, sys.argv[2:6])
corpus = MixedSources(documents=int(documents))
work = Rows(folder=Path(folder), corpus=corpus, length=int(length), rows=int(rows))
if sys.argv[6:]:
    from benchmarks.data.since import weighted
    stream = weighted(work)
else:
    stream = omniload(work)
# By processor time: beside other work a second of the clock may hold little of it, and little to measure.
while time.process_time() < 2 + seconds / 2:
    next(stream)
began_s, spent_s, tokens = time.perf_counter(), time.process_time(), 0
while time.process_time() - spent_s < seconds:
    tokens += next(stream)
found = [tokens / (time.perf_counter() - began_s), tokens / (time.process_time() - spent_s)]
stream.close()
print(json.dumps(found))
"""


@dataclass(frozen=True, slots=True)
class Rate:
    """Result of one process."""

    by_wall: float
    """Tokens per second."""
    by_cpu: float
    """Tokens per processor second of all threads."""


@contextmanager
def tree_of(commit: str) -> Iterator[Path]:
    """Yield a folder with the files of a commit."""
    with tempfile.TemporaryDirectory() as made:
        packed = subprocess.run(
            ["git", "-C", str(_ROOT), "archive", commit], check=True, capture_output=True
        ).stdout
        subprocess.run(["tar", "x", "-C", made], input=packed, check=True)
        yield Path(made)


def weighted(work: Rows) -> Iterator[int]:
    """Read as the benchmark of throughput does, with a column that has a weight for each label."""
    mix = mix_of(
        *(work.corpus.names, work.corpus.weights),
        rows=work.rows,
        micro_rows=work.rows,
        length=work.length,
    )
    content = mix.model_dump()
    column = {"column": "weight", "dtype": "float32", "of": "labels"}
    for source in content["sources"].values():
        source["columns"] = {"loss_weight": column}
    content["batch"]["columns"] = ["loss_weight"]
    mix = MixConfig.model_validate(content)
    spec = PlaneSpec(mix=mix, base_dir=work.folder, tree=ClientPlaceTree.of(dp=1))
    with LocalPlane(spec) as plane, Client(plane.handle(0)) as client:
        for batch in client:
            for rows in batch.microbatches:
                assert isinstance(rows, Microbatch), "no cp peers share them"
                _ = rows.labels_RT, rows.positions_RT, rows.aligned_RT["loss_weight"]
            yield sum(batch.tokens_by_source.values())


def rate_of(
    tree: Path, folder: Path, corpus: MixedSources, rows: int, seconds: float, *more: str
) -> Rate:
    """Measure a tree in a process of its own."""
    arguments = (str(folder), *map(str, (corpus.documents, _LENGTH, rows, seconds)), *more)
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
    """Return medians of both trees by step size, the ratio of this tree to the earlier one, and that of a column."""
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
                *(f"{by[WITH_COLUMN] / by['now']:.2f}" for by in (walls, cpus)),
            )
        )
    return Table(
        columns=(
            *("tokens a step", "before, million tokens/s", "now", "now over before"),
            *("before, million tokens a CPU second", "now, a CPU second", "now over before, CPU"),
            *("with a column over now", "with a column over now, CPU"),
        ),
        rows=tuple(rows),
        caption=f"Medians of {len(next(iter(found.values()))['now'])} processes of each, in turns",
    )


READING = """\
One rank of the local runtime reads sources of token ids alone, 16 of two files each, in rows of {length:,} tokens.
Before is commit {commit}. Each tree runs the same loop with its own code in processes of its own, warmed up and
measured for {seconds:g} s of processor time, with files in the page cache. Next to other work the wall time says
little, and tokens per processor second say more. With a column, this tree also reads a float32 weight for each label,
which the files have for every token and which is not read otherwise."""


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--commit", default=BEFORE_COLUMNS, show_default=True, help="Commit to compare with.")
@click.option(
    "--steps",
    "sizes",
    default=_STEPS,
    multiple=True,
    type=click.IntRange(_LENGTH),
    help="Tokens of a step.",
)
@click.option("--repeats", default=3, show_default=True, type=click.IntRange(1))
@click.option("--seconds", default=3.0, show_default=True, help="Processor time of a measured run.")
@click.option("--report/--no-report", default=True, show_default=True, help="Write the report.")
def main(commit: str, sizes: tuple[int, ...], repeats: int, seconds: float, report: bool) -> None:
    """Compare this tree with an earlier one; by default with the last one before samples had columns.

    \b
    Example:
      python -m benchmarks.data.since --repeats 1 --no-report
    """  # noqa: D301 -- click's own marker
    corpus = MixedSources(weighted=True)
    found: dict[int, dict[str, list[Rate]]] = {}
    with tempfile.TemporaryDirectory() as made, tree_of(commit) as earlier:
        build_sources(Path(made), corpus)
        for tokens in sizes:
            found[tokens] = {"before": [], "now": [], WITH_COLUMN: []}
            for turn in range(repeats):
                trees = {"before": earlier, "now": _ROOT, WITH_COLUMN: _ROOT}
                for name in sorted(trees, reverse=bool(turn % 2)):
                    more = ("weighted",) * (name == WITH_COLUMN)
                    rows = tokens // _LENGTH
                    rate = rate_of(trees[name], Path(made), corpus, rows, seconds, *more)
                    found[tokens][name].append(rate)
                    click.echo(f"{tokens} {name}: {rate.by_wall / 1e6:.1f} million tokens/s")
    table = table_of(found)
    print_table(table)
    if report:
        path = write_report(
            __file__,
            "since",
            "Token ids alone, at an earlier commit and now, and with a column",
            f"python -m benchmarks.data.since --commit {commit} --repeats {repeats} --seconds {seconds:g} "
            + " ".join(f"--steps {each}" for each in sizes),
            [table],
            READING.format(length=_LENGTH, commit=commit, seconds=seconds).replace("\n", " "),
        )
        click.echo(f"wrote {path.name}")


if __name__ == "__main__":
    main()

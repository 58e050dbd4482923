"""Time to the first batch after a resume, at several places of the run, and whether it is the same batch.

python -m benchmarks.faults.resume --help
"""

import itertools
import multiprocessing
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import click
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from torch.utils.data import DataLoader

from benchmarks.loaders.baseline_loaders import MixedRows, Rows
from benchmarks.loaders.mixed_sources import MixedSources, mix_of
from benchmarks.report import Table, print_table, write_report
from omniload.actors.opening import open_plane
from omniload.actors.plane import PlaneSpec
from omniload.base.state import JsonObject
from omniload.batch.digest import batch_digest
from omniload.batch.microbatch import Microbatch
from omniload.client import Client
from omniload.mix.config import MixConfig
from omniload.plan.place_tree import ClientPlaceTree

__all__ = ["main"]

_LENGTH = 8_192
_ROWS = 32
_SKIP_S = 20.0


@dataclass(frozen=True, slots=True)
class Layout:
    """Sources of many row groups that cost little to make: each file is written once and copied."""

    folder: Path
    corpus: MixedSources

    def write(self) -> None:
        """Write the sources; documents are runs of one token, so that they compress well."""
        for number, name in enumerate(self.corpus.names):
            (self.folder / name).mkdir(parents=True)
            first = self.folder / name / "00000.parquet"
            rng = np.random.default_rng((self.corpus.seed, number))
            lengths = np.clip(rng.lognormal(4, 1, self.corpus.documents), 1, _LENGTH).astype(
                np.int32
            )
            offsets = np.concatenate((np.zeros(1, np.int32), np.cumsum(lengths, dtype=np.int32)))
            ids = (np.arange(len(lengths), dtype=np.int32) * 31 + number) % 30_000
            column = pa.ListArray.from_arrays(pa.array(offsets), pa.array(np.repeat(ids, lengths)))
            pq.write_table(
                pa.table({"tokens": column}), first, row_group_size=self.corpus.group_rows
            )
            for shard in range(1, self.corpus.shards):
                shutil.copy(first, first.with_name(f"{shard:05}.parquet"))

    @property
    def documents(self) -> int:
        """Documents of all sources."""
        return self.corpus.sources * self.corpus.shards * self.corpus.documents

    def mix(self, kind: str) -> MixConfig:
        """Return the mix file; ``kind`` is the runtime."""
        return mix_of(
            self.corpus.names,
            self.corpus.weights,
            rows=_ROWS,
            micro_rows=8,
            length=_LENGTH,
            runtime={"kind": kind},
        )

    def spec(self, kind: str, state: JsonObject | None) -> PlaneSpec:
        """Return the run; no index is kept between starts."""
        tree = ClientPlaceTree.of(dp=1)
        return PlaneSpec(mix=self.mix(kind), base_dir=self.folder, tree=tree, state=state)


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """A place of the unbroken run."""

    samples: int
    """Samples handed out before it."""
    state: JsonObject
    """The client's state there."""
    digests: tuple[int, ...]
    """Digests of the following batches."""


def unbroken(layout: Layout, positions: Sequence[int], num_batches: int) -> list[Mark]:
    """Run from the start, and mark the first step boundary at or after each position, in rising order."""
    marks: list[tuple[int, JsonObject, list[int]]] = []
    due, samples = list(positions), 0
    with open_plane(layout.spec("local", None)) as plane, Client(plane.handle(0)) as client:
        while due or len(marks[-1][2]) < num_batches:
            if due and samples >= due[0]:
                marks.append((samples, client.state_dict(), []))
                due = [position for position in due if position > samples]
            batch = client.next_batch()
            assert batch is not None
            samples += sum(len(m.keys_K4) for m in batch.microbatches if isinstance(m, Microbatch))
            following = [digests for _, _, digests in marks if len(digests) < num_batches]
            if following:
                digest = batch_digest(batch)
                for digests in following:
                    digests.append(digest)
    return [Mark(samples=at, state=state, digests=tuple(d)) for at, state, d in marks]


def resumed(
    layout: Layout, kind: str, state: JsonObject, num_batches: int
) -> tuple[float, tuple[int, ...]]:
    """Return the seconds from opening the data plane to its first batch, and the digests from that batch on."""
    began_s = time.perf_counter()
    with open_plane(layout.spec(kind, state)) as plane, Client(plane.handle(0)) as client:
        first = client.next_batch()
        waited_s = time.perf_counter() - began_s
        assert first is not None
        rest = itertools.islice(client, num_batches - 1)
        return waited_s, tuple(batch_digest(batch) for batch in [first, *rest])


def in_new_process(
    layout: Layout, kind: str, mark: Mark, num_batches: int
) -> tuple[float, tuple[int, ...]]:
    """Resume in a process that knows nothing of the run."""
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=spawn) as pool:
        return pool.submit(resumed, layout, kind, mark.state, num_batches).result()


def skip_rate(layout: Layout, limit_s: float) -> float:
    """Return the samples per second at which a ``DataLoader`` is run forward to its earlier place."""
    work = Rows(folder=layout.folder, corpus=layout.corpus, length=_LENGTH, rows=8)
    loader = DataLoader(MixedRows(work, "arrays"), batch_size=work.rows, num_workers=0)
    mean = float(np.mean(lengths_in(layout)))
    began_s, tokens = time.perf_counter(), 0
    for rows in loader:
        tokens += rows.numel()
        if time.perf_counter() - began_s > limit_s:
            break
    return tokens / mean / (time.perf_counter() - began_s)


def lengths_in(layout: Layout) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """Return the mean length of a document of every source, weighted by the source's share."""
    means = []
    for name in layout.corpus.names:
        column = pq.read_table(layout.folder / name / "00000.parquet")["tokens"]
        means.append(len(column.combine_chunks().flatten()) / len(column))
    # Weighted by samples: the baseline chooses documents, not tokens.
    return np.average(np.array(means), weights=layout.corpus.weights, keepdims=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Resumed:
    """Findings at one place."""

    samples: int
    runtime: str
    waits_s: tuple[float, ...]
    same: bool
    skip_s: float

    def row(self) -> tuple[str, ...]:
        """Return the row of the table."""
        skip = f"{self.skip_s:.1f}" if self.skip_s <= _SKIP_S else f"about {self.skip_s:,.0f}"
        return (
            f"{self.samples:,}",
            self.runtime,
            f"{median(self.waits_s):.2f}",
            f"{max(self.waits_s):.2f}",
            "yes" if self.same else "NO",
            skip,
        )


def measured(
    layout: Layout, marks: Sequence[Mark], repeats: int, *, ray: bool
) -> Iterator[Resumed]:
    """Resume at every mark ``repeats`` times, and at the last mark once through Ray."""
    rate = skip_rate(layout, min(_SKIP_S, 5.0))
    cases = [(mark, "local", repeats) for mark in marks]
    for mark, kind, times in [*cases, *([(marks[-1], "ray", 1)] if ray else [])]:
        runs = [in_new_process(layout, kind, mark, len(mark.digests)) for _ in range(times)]
        yield Resumed(
            samples=mark.samples,
            runtime=kind,
            waits_s=tuple(wait for wait, _ in runs),
            same=all(digests == mark.digests for _, digests in runs),
            skip_s=mark.samples / rate,
        )


READING = """\
The first batch comes within {worst:.2f} s of opening the data plane, at every position from 0 to {last:,} samples
(local runtime, the slowest of all runs); the next {batches} batches are {same} those of the unbroken run. Through
Ray, including its start, it takes {ray}. A position is found by arithmetic. A resume opens {files} files of
{groups:,} row groups in all, whose footers are read anew each time (no index is kept), and decodes one block of each
source; neither cost depends on the progress of the run. The last column is the usual way if a loader keeps no
position: iterate and discard. Here it is a `DataLoader` in one process over the same files with views of the Arrow
column, at {rate:,.0f} samples/s, measured over a few seconds and extrapolated ("about" if the time is longer than
{skip:.0f} s). The corpus has {documents:,} documents in {sources} sources, of {mean} tokens in the mean; higher
positions are later epochs. Every resume is a process of its own; its imports, about a second, are not in
the figures."""


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--repeats", default=3, show_default=True, type=click.IntRange(1))
@click.option("--most", default=10_000_000, show_default=True, help="Last position, in samples.")
@click.option(
    "--batches", default=100, show_default=True, help="Number of batches compared after a resume."
)
@click.option("--shards", default=8, show_default=True, help="Files of each of 16 sources.")
@click.option("--ray/--no-ray", default=True, show_default=True, help="Resume once through Ray.")
@click.option("--report/--no-report", default=True, show_default=True, help="Write the report.")
def main(repeats: int, most: int, batches: int, shards: int, ray: bool, report: bool) -> None:
    """Resume at ever later positions.

    \b
    Example:
      python -m benchmarks.faults.resume --repeats 1 --most 1000 --batches 10 --no-ray --no-report
    """  # noqa: D301 -- click's own marker
    corpus = MixedSources(shards=shards, documents=8_000, group_rows=250)
    positions = [p for p in (0, 1_000, 100_000, 1_000_000, 10_000_000) if p <= most]
    with tempfile.TemporaryDirectory() as made:
        layout = Layout(Path(made), corpus)
        layout.write()
        marks = unbroken(layout, positions, batches)
        found = []
        for one in measured(layout, marks, repeats, ray=ray):
            found.append(one)
            click.echo(" ".join(one.row()))
        mean = round(float(lengths_in(layout)[0]))
    table = Table(
        columns=(
            "samples before",
            "runtime",
            "first batch, s",
            "slowest, s",
            f"next {batches} the same",
            "iterate and skip, s",
        ),
        rows=tuple(one.row() for one in found),
        caption=f"Resumes, medians of {repeats} (Ray: one)",
    )
    print_table(table)
    if report:
        options = f"--repeats {repeats} --most {most} --batches {batches} --shards {shards}"
        command = f"python -m benchmarks.faults.resume {options}"
        reading = reading_of(found, layout, {"batches": batches, "mean": mean})
        path = write_report(
            __file__, "resume", "First batch after a resume, by position", command, [table], reading
        )
        click.echo(f"wrote {path.name}")


def reading_of(found: Sequence[Resumed], layout: Layout, facts: Mapping[str, int]) -> str:
    """Return the reading of the figures."""
    local = [one for one in found if one.runtime == "local"]
    ray = [one for one in found if one.runtime == "ray"]
    files = layout.corpus.sources * layout.corpus.shards
    last = local[-1]
    return READING.format(
        worst=max(max(one.waits_s) for one in local),
        last=last.samples,
        same="bit for bit" if all(one.same for one in found) else "NOT",
        ray=f"{ray[0].waits_s[0]:.1f} s" if ray else "a time that was not measured",
        files=files,
        groups=files * -(-layout.corpus.documents // layout.corpus.group_rows),
        rate=last.samples / last.skip_s if last.skip_s else 0,
        skip=_SKIP_S,
        documents=layout.documents,
        sources=layout.corpus.sources,
        **facts,
    ).replace("\n", " ")


if __name__ == "__main__":
    main()

"""Distance of a source's order from that of its files, by way of shuffling, and the memory that the way needs.

python -m benchmarks.data.shuffle --help

Shape suffixes:
    N  records of an epoch, in the order in which they come
"""

import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import click
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from benchmarks.report import Table, print_table, write_report
from omniload.mix.config import ByteTokenizer, ShuffleConfig
from omniload.mix.order import Order
from omniload.mix.sources import ParquetSource
from omniload.source.record_source import open_source
from omniload.source.spec import SourceSpec

__all__ = ["Mixing", "cost_table", "main", "mixing_of", "table_of", "write_shards"]

_STEP = 1_024


@dataclass(frozen=True, slots=True, kw_only=True)
class _Shards:
    shards: int
    units: int
    rows: int


_READ = _Shards(shards=8, units=8, rows=1_000)
"""Shards that are read to measure the cost."""
WAYS = {
    "none": ShuffleConfig(method="none"),
    "shards": ShuffleConfig(method="shards"),
    **{f"block of {k}": ShuffleConfig(block_units=k) for k in (1, 4, 16, 64, 256)},
    **{f"units, block of {k}": ShuffleConfig(method="units", block_units=k) for k in (4, 16, 64)},
    "full": ShuffleConfig(method="full"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Mixing:
    """Quality of an order, in which each record is known by its place in the files."""

    correlation: float
    """Rank correlation between the place of a record and the place of the next one."""
    distance: float
    """Mean distance of the places of neighbours, over that of a full shuffle (a third of the records)."""
    shards: float
    """Mean number of shards that the records of a step of ``_STEP`` records come from."""


def places_of(shards: int, units: int, rows: int, shuffle: ShuffleConfig) -> NDArray[np.int64]:
    """Return the places in the files of the records of an epoch, ``[N]``."""
    shards_U = np.repeat(np.arange(shards), units)
    order = Order(np.full(len(shards_U), rows), shards_U, seed=1, source="web", shuffle=shuffle)
    located = order.locate(0, order.positions_per_epoch)
    return located.units_N * rows + located.rows_N


def mixing_of(places_N: NDArray[np.int64], shards: int) -> Mixing:
    """Measure an order; places are numbers from 0, and shards of one size."""
    here_N, behind_N = places_N[:-1].astype(float), places_N[1:].astype(float)
    whole = len(places_N) // _STEP * _STEP
    of_shards = (places_N[:whole] * shards // len(places_N)).reshape(-1, _STEP)
    return Mixing(
        correlation=float(np.corrcoef(here_N, behind_N)[0, 1]),
        distance=float(np.abs(behind_N - here_N).mean() / (len(places_N) / 3)),
        shards=float(np.mean([len(np.unique(step)) for step in of_shards])),
    )


def table_of(shards: int, units: int, rows: int) -> Table:
    """Compare all ways on shards of one size."""
    found = {
        name: mixing_of(places_of(shards, units, rows, way), shards) for name, way in WAYS.items()
    }
    held = {name: way.units_together(shards * units) for name, way in WAYS.items()}
    return Table(
        columns=(
            "shuffle",
            "rank correlation of neighbours",
            "distance of neighbours, over a full shuffle's",
            f"shards in {_STEP:,} records",
            "units decoded together",
        ),
        rows=tuple(
            (
                name,
                f"{mixing.correlation:.3f}",
                f"{mixing.distance:.4f}",
                f"{mixing.shards:.1f}",
                held[name],
            )
            for name, mixing in found.items()
        ),
        caption=f"{shards} shards of {units} units of {rows:,} records",
    )


def write_shards(folder: Path, *, shards: int, units: int, rows: int) -> int:
    """Write Parquet shards of documents of about 3,000 letters, and return their bytes of text."""
    generator, size = np.random.default_rng(0), 0
    words = np.array([f"{number:x}" for number in generator.integers(1 << 28, size=5_000)])
    for shard in range(shards):
        texts = [" ".join(generator.choice(words, 380)) for _ in range(units * rows)]
        size += sum(map(len, texts))
        path = folder / f"{shard:03}.parquet"
        pq.write_table(pa.table({"text": texts}), path, row_group_size=rows, compression="zstd")
    return size


def cost_table(folder: Path, repeats: int, caption: str) -> Table:
    """Read the shards of a folder by every way; return the least processor time of several epochs."""
    rows = []
    for name, way in WAYS.items():
        found = [_read(folder, way) for _ in range(repeats)]
        first_s, whole_s = (min(times) for times in zip(*found, strict=True))
        rows.append((name, f"{first_s:.2f}", f"{whole_s:.2f}"))
    return Table(
        columns=("shuffle", "CPU s until the first read", "CPU s of an epoch"),
        rows=tuple(rows),
        caption=caption,
    )


def _read(folder: Path, way: ShuffleConfig) -> tuple[float, float]:
    """Return the processor time of the first read of an epoch, and of the whole epoch."""
    config = ParquetSource(type="parquet", path="*.parquet", text="text", shuffle=way)
    source = open_source(
        SourceSpec("web", config, seed=1, tokenizer=ByteTokenizer(type="bytes"), base_dir=folder)
    )
    began_s, first_s, end = time.process_time(), 0.0, source.positions_per_epoch
    for start in range(0, end, _STEP):
        source.read(start, min(start + _STEP, end))
        first_s = first_s or time.process_time() - began_s
    return first_s, time.process_time() - began_s


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--shards", default=64, show_default=True, type=click.IntRange(1), help="Number of shards."
)
@click.option(
    "--units", default=16, show_default=True, type=click.IntRange(1), help="Units of each shard."
)
@click.option(
    "--rows", default=1_000, show_default=True, type=click.IntRange(1), help="Records of a unit."
)
@click.option(
    "--repeats",
    default=3,
    show_default=True,
    type=click.IntRange(1),
    help="Epochs that each way reads.",
)
@click.option("--report/--no-report", default=True, show_default=True, help="Write the report.")
def main(shards: int, units: int, rows: int, repeats: int, report: bool) -> None:
    """Compare ways of shuffling with a full shuffle, and their costs with one another.

    \b
    Example:
      python -m benchmarks.data.shuffle --shards 8 --no-report
    """  # noqa: D301 -- click's own marker
    tables = [table_of(shards, units, rows)]
    with tempfile.TemporaryDirectory() as folder:
        size = write_shards(Path(folder), shards=_READ.shards, units=_READ.units, rows=_READ.rows)
        caption = (
            f"Parquet, {_READ.shards} shards of {_READ.units} row groups of {_READ.rows:,} documents, "
            f"{size / 1e6:.0f} MB of text, {_STEP:,} documents a read, one thread; least of {repeats}"
        )
        tables.append(cost_table(Path(folder), repeats, caption))
    for table in tables:
        print_table(table)
    if report:
        path = write_report(
            __file__,
            "shuffle",
            "How well sources are shuffled, and what it costs",
            f"python -m benchmarks.data.shuffle --shards {shards} --units {units} --rows {rows} --repeats {repeats}",
            tables,
            "The first table is arithmetic of the order of one epoch, without any clock. A unit is 4 "
            "MiB of text by default, which is some thousand documents of web text. The second table "
            "reads files that are in the page cache; a block of more units than exist has all of "
            "them. Ways that decode everything at once do the same work; their figures differ only by "
            "whether memory was already allocated.",
        )
        click.echo(f"wrote {path.name}")


if __name__ == "__main__":
    main()

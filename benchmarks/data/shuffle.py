"""How far the order of a source is from that of its files, by way of shuffling, and what is held for it.

python -m benchmarks.data.shuffle --help

Shape suffixes:
    N  records of an epoch, in the order in which they come
"""

from dataclasses import dataclass

import click
import numpy as np
from numpy.typing import NDArray

from benchmarks.report import Table, print_table, write_report
from omniload.mix.config import ShuffleConfig
from omniload.mix.order import Order

__all__ = ["Mixing", "main", "mixing_of"]

_STEP = 1_024
WAYS = {
    "none": ShuffleConfig(method="none"),
    "shards": ShuffleConfig(method="shards"),
    **{f"block of {k}": ShuffleConfig(block_units=k) for k in (1, 4, 16, 64, 256)},
    **{f"units, block of {k}": ShuffleConfig(method="units", block_units=k) for k in (4, 16, 64)},
    "full": ShuffleConfig(method="full"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Mixing:
    """How an order mixes records, each known by its place in the files."""

    correlation: float
    """Rank correlation of neighbours: of the places of a record and of the one behind it."""
    distance: float
    """Mean distance of the places of neighbours, over that of a full shuffle (a third of the records)."""
    shards: float
    """Shards that a step of ``_STEP`` records comes from, in the mean."""


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


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--shards", default=64, show_default=True, type=click.IntRange(1), help="Shards.")
@click.option(
    "--units", default=16, show_default=True, type=click.IntRange(1), help="Units of each."
)
@click.option(
    "--rows", default=1_000, show_default=True, type=click.IntRange(1), help="Records of a unit."
)
@click.option("--report/--no-report", default=True, show_default=True, help="Write the report.")
def main(shards: int, units: int, rows: int, report: bool) -> None:
    """Compare ways of shuffling with a full shuffle.

    \b
    Example:
      python -m benchmarks.data.shuffle --shards 8 --no-report
    """  # noqa: D301 -- click's own marker
    table = table_of(shards, units, rows)
    print_table(table)
    if report:
        path = write_report(
            "shuffle",
            "How well sources are shuffled",
            f"python -m benchmarks.data.shuffle --shards {shards} --units {units} --rows {rows}",
            [table],
            "Arithmetic of the order, of one epoch; no clock. A unit is 4 MiB of text unless said otherwise, some "
            "thousand documents of web text.",
        )
        click.echo(f"wrote {path.name}")


if __name__ == "__main__":
    main()

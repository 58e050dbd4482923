"""Evenness of the load of encoder and backbone of a vision-language model, by strategy, over synthetic metadata.

python -m benchmarks.planner.image_balance --help
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import click
import numpy as np
from numpy.typing import NDArray

from benchmarks.report import Table, print_table, write_report
from omniload.mix.pieces import PieceTable
from omniload.plan.balance_methods import imbalance_of
from omniload.plan.cost import QuadraticCost
from omniload.plan.dgraph import DGraph
from omniload.plan.images.table import ImageTable
from omniload.plan.packing import CARRIED, best_fit
from omniload.plan.place_tree import ClientPlaceTree
from omniload.plan.placement import Placement
from omniload.plan.strategies import PlacementRequest, Strategy, balanced, hybrid, in_order

__all__ = ["Loads", "loads_of", "main", "step_of", "table_of"]

_LENGTH, _MERGED = 8_192, 4
_LEAST_PATCHES, _MOST_PATCHES = 64, 4_096
_BACKBONE = QuadraticCost(6.0 * 5_120, 1.0)
_ENCODER = QuadraticCost(6.0 * 1_792, 1.0)

READING = """\
Documents of text (log-normal, median 245 tokens) with one to three images each (Pareto, exponent 1.1, {least} to
{most} patches, four to a token) are packed best-fit into rows of {length:,} tokens. Costs are those of a backbone
of width 5,120 and an encoder of width 1,792. The loads of each of {steps} steps are arithmetic, not measured time.
"By step" is the heaviest rank over the mean of all ranks in a whole step. "As waited for" adds up the heaviest rank
of each microbatch, because ranks meet in the all-to-all of embeddings or in a pipeline. "At best" is the lower
limit of that figure for the encoder, because no image is cut. Under balanced the rank that fetches rows encodes
their images; under hybrid all ranks do, including those along cp and tp."""


@dataclass(frozen=True, slots=True)
class Loads:
    """Heaviest load over mean load, of each module."""

    backbone: float
    encoder: float
    backbone_waited: float
    encoder_waited: float
    encoder_least: float
    """Least possible ``encoder_waited`` with the rows' microbatches, because no image is cut."""


def step_of(seed: int, num_rows: int) -> tuple[PieceTable, NDArray[np.int64], ImageTable]:
    """Return the rows of a step and their images."""
    rng = np.random.default_rng(seed)
    count = num_rows * 24
    images_N = rng.integers(1, 4, count)
    patches_I = np.clip(_LEAST_PATCHES * (1 + rng.pareto(1.1, images_N.sum())), None, _MOST_PATCHES)
    tokens_I = np.maximum(1, patches_I // _MERGED).astype(np.int64)
    owner_I = np.repeat(np.arange(count), images_N)
    lengths_N = np.bincount(owner_I, tokens_I, count) + np.clip(
        rng.lognormal(5.5, 1.0, count), 8, 2_000
    )
    lengths_N = lengths_N.astype(np.int64)
    fits = np.flatnonzero(lengths_N <= _LENGTH)
    rows_F = best_fit(lengths_N[fits].tolist(), num_first=0, num_rows=num_rows, capacity=_LENGTH)
    kept = fits[rows_F != CARRIED]
    order = kept[np.argsort(rows_F[rows_F != CARRIED], kind="stable")]
    offsets = np.searchsorted(np.sort(rows_F[rows_F != CARRIED]), np.arange(num_rows + 1))
    pieces = PieceTable.from_rows(
        [(0, at, 0, 0, length, length) for at, length in enumerate(lengths_N[order].tolist())]
    )
    piece_of = np.full(count, -1)
    piece_of[order] = np.arange(len(order))
    held = np.flatnonzero(piece_of[owner_I] >= 0)
    held = held[np.argsort(piece_of[owner_I[held]], kind="stable")]
    pieces_I = piece_of[owner_I[held]]
    before = np.cumsum(tokens_I[held]) - tokens_I[held]
    first_of = np.searchsorted(pieces_I, pieces_I)
    table = ImageTable(
        pieces_I=pieces_I,
        numbers_I=(np.arange(len(held)) - first_of).astype(np.int32),
        firsts_I=(before - before[first_of]).astype(np.int32),
        tokens_I=tokens_I[held].astype(np.int32),
        patches_I=(tokens_I[held] * _MERGED).astype(np.int32),
    )
    return pieces, offsets.astype(np.int64), table


def loads_of(
    strategy: Strategy,
    pieces: PieceTable,
    row_offsets: NDArray[np.int64],
    images: ImageTable,
    tree: ClientPlaceTree,
    microbatches: int,
) -> Loads:
    """Return the evenness of a strategy."""
    ranks = tree.world_size
    request = PlacementRequest(
        tree=tree,
        step=0,
        microbatches=microbatches,
        rows_per_microbatch=-(-(len(row_offsets) - 1) // (tree.size_of("dp") * microbatches)),
        cost=_BACKBONE,
        images=images,
        encoder_cost=_ENCODER,
    )
    rows = DGraph.of_rows(pieces.lengths_P, row_offsets, {"sources": pieces.sources_P})
    placement: Placement = strategy(rows, request)
    rows_I = images.rows_I(row_offsets)
    encoders_I = placement.encoders_I
    if encoders_I is None:
        # If images have no ranks of their own, they go to the rank that fetches their row.
        encoders_I = tree.ranks_by_place()[placement.buckets_N[rows_I], 0, 0]
    cells_I = encoders_I.astype(np.int64) * microbatches + placement.microbatches_N[rows_I]
    costs_I = _ENCODER(images.patches_I)
    encoder_WM = np.bincount(cells_I, costs_I, ranks * microbatches).reshape(ranks, microbatches)
    heaviest_M = np.zeros(microbatches)
    np.maximum.at(heaviest_M, placement.microbatches_N[rows_I], costs_I)
    backbone_WM, mean_M = placement.loads_BM, encoder_WM.mean(0)
    return Loads(
        backbone=imbalance_of(backbone_WM.sum(1)),
        encoder=imbalance_of(encoder_WM.sum(1)),
        backbone_waited=float(backbone_WM.max(0).sum() / backbone_WM.mean(0).sum()),
        encoder_waited=float(encoder_WM.max(0).sum() / mean_M.sum()),
        encoder_least=float(np.maximum(mean_M, heaviest_M).sum() / mean_M.sum()),
    )


_STRATEGIES: Mapping[str, Callable[..., Placement]] = {
    "in_order": in_order,
    "balanced": balanced,
    "hybrid": hybrid,
}


def table_of(tree: ClientPlaceTree, rows: int, microbatches: int, steps: int) -> Table:
    """Return the evenness of every strategy on a mesh; ``rows`` and ``microbatches`` are those of a dp rank."""
    dp, cp, tp = (tree.size_of(axis) for axis in ("dp", "cp", "tp"))
    found: dict[str, list[Loads]] = {name: [] for name in _STRATEGIES}
    seconds = dict.fromkeys(_STRATEGIES, 0.0)
    for seed in range(steps):
        step = step_of(seed, dp * rows)
        for name, strategy in _STRATEGIES.items():
            began_s = time.perf_counter()
            found[name].append(loads_of(strategy, *step, tree, microbatches))
            seconds[name] += time.perf_counter() - began_s
    figures = ("backbone", "encoder", "backbone_waited", "encoder_waited", "encoder_least")
    return Table(
        columns=(
            *("strategy", "backbone, by step", "encoder, by step"),
            *("backbone, as waited for", "encoder, as waited for", "at best", "ms a step"),
        ),
        rows=tuple(
            (
                name,
                *(
                    f"{np.mean([getattr(each, figure) for each in loads]):.3f}"
                    for figure in figures
                ),
                f"{seconds[name] / steps * 1e3:.1f}",
            )
            for name, loads in found.items()
        ),
        caption=f"Heaviest rank over the mean, {tree.world_size} ranks (dp {dp}, cp {cp}, tp {tp}), {microbatches} "
        f"microbatches, {rows} rows of a dp rank, mean of {steps} steps",
    )


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--ranks", default=64, show_default=True, type=click.IntRange(2))
@click.option(
    "--cp", default=1, type=click.IntRange(1), help="Number of ranks that share a row; 1."
)
@click.option(
    "--tp", default=1, type=click.IntRange(1), help="Number of ranks that have the same rows; 1."
)
@click.option(
    *("--rows", "rows"), default=4, type=click.IntRange(1), help="Rows of a dp rank in a step; 4."
)
@click.option(
    *("--microbatches", "counts"),
    default=[4],
    multiple=True,
    type=click.IntRange(1),
    help="Microbatches of these rows, 4; give it again for another table.",
)
@click.option("--steps", default=8, show_default=True, type=click.IntRange(1))
@click.option("--report/--no-report", default=True, show_default=True, help="Write the report.")
def main(  # noqa: PLR0913, PLR0917 -- one for each option
    ranks: int, cp: int, tp: int, rows: int, counts: Sequence[int], steps: int, report: bool
) -> None:
    """Compare strategies on heavy-tailed images.

    \b
    Example:
      python -m benchmarks.planner.image_balance --steps 2 --no-report
      python -m benchmarks.planner.image_balance --cp 2 --tp 4 --rows 32 --microbatches 32 --microbatches 8
    """  # noqa: D301 -- click's own marker
    dp, left = divmod(ranks, cp * tp)
    if left:
        raise click.BadParameter(f"{ranks} ranks are no multiple of cp {cp} times tp {tp}")
    tree = ClientPlaceTree.of(dp=dp, cp=cp, tp=tp)
    tables = [table_of(tree, rows, count, steps) for count in counts]
    for table in tables:
        print_table(table)
    if report:
        reading = READING.format(
            least=_LEAST_PATCHES, most=_MOST_PATCHES, length=_LENGTH, steps=steps
        )
        cuts = " ".join(f"--microbatches {count}" for count in counts)
        path = write_report(
            __file__,
            "image_balance",
            "Encoder and backbone balanced together",
            f"python -m benchmarks.planner.image_balance --ranks {ranks} --cp {cp} --tp {tp} --rows {rows} {cuts} "
            f"--steps {steps}",
            tables,
            reading.replace("\n", " "),
        )
        click.echo(f"wrote {path.name}")


if __name__ == "__main__":
    main()

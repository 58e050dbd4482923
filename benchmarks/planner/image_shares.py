"""Cost for a data-parallel rank to send its peers their shares of the images, by ranks of the job.

python -m benchmarks.planner.image_shares --help
"""

import time
from collections.abc import Sequence

import click
import numpy as np

from benchmarks.report import Table, print_table, write_report
from omniload.base.ragged import Ragged, Ranges
from omniload.batch.encoding import EncoderShare
from omniload.batch.microbatch import Batch, Microbatch
from omniload.batch.stages import own_part
from omniload.batch.wire import from_bytes, to_bytes
from omniload.machine.images import ImageRequests
from omniload.mix.columns import GRIDS, IMAGES, ColumnRanges
from omniload.plan.images.dealt import ImagePlan
from omniload.plan.place_tree import ClientPlaceTree

__all__ = ["batch_of", "figures_of", "main", "plan_of"]

_LENGTH, _ROWS, _TOKENS = 4_096, 4, 256
_VALUES = 48
_TIMES = 5
_CASES = ({"dp": 64}, {"dp": 8, "pp": 8, "tp": 8}, {"dp": 64, "pp": 8, "tp": 8})

READING = """\
{rows} rows of {length:,} tokens in a microbatch, with an image of {tokens} embeddings each, are dealt to ranks at
random. An image is one patch, because the measured data are the messages about images, for all peers of one
data-parallel rank. Times are of a core, the least of {times}. When a batch had counts of all ranks for every peer
(commit 44829b70, same machine and case), one of dp 64, pp 8, tp 8 and 16 microbatches had 67.6 MB, and took 119 ms
to make, 58 ms to write and 58 ms to read; one of dp 64 alone had 0.166 MB and took 7, 1 and 2 ms."""


def plan_of(tree: ClientPlaceTree, microbatches: int) -> ImagePlan:
    """Return a step with an image in each row, as the constructor of the first data-parallel rank has it."""
    dp, cells = tree.size_of("dp"), microbatches * _ROWS
    count = dp * cells
    encoders_I = np.random.default_rng(0).integers(0, tree.world_size, count)
    return ImagePlan(
        keys_I4=np.zeros((count, 4), np.int64),
        tokens_I=np.full(count, _TOKENS, np.int64),
        dp_ranks_I=np.repeat(np.arange(dp, dtype=np.int32), cells),
        microbatches_I=np.tile(np.repeat(np.arange(microbatches, dtype=np.int32), _ROWS), dp),
        places_I=np.tile(np.arange(_ROWS, dtype=np.int64) * _LENGTH, dp * microbatches),
        encoders_I=encoders_I.astype(np.int32),
        tree=tree,
        row_length=_LENGTH,
    ).part_of([0])


def batch_of(shares: Sequence[EncoderShare]) -> Batch:
    """Return a batch of empty microbatches with these shares."""
    rows = [
        Microbatch(
            tokens_RT=np.zeros((0, 0), np.int32),
            cu_seqlens=np.zeros(1, np.int32),
            sources_D=np.empty(0, np.int16),
            next_D=np.empty(0, np.int32),
            keys_K4=np.empty((0, 4), np.int64),
            encoding=share,
        )
        for share in shares
    ]
    return Batch(step=0, microbatches=tuple(rows), loss_tokens=0, imbalance=1.0, bound=1.0)


def figures_of(tree: ClientPlaceTree, microbatches: int) -> tuple[int, float, float, float]:
    """Return the bytes of a batch, and the seconds of a core to make its shares, to write it and to read it."""
    plan = plan_of(tree, microbatches)
    requests = ImageRequests.of(plan, [0])
    # One image of one patch for all, because the content of images does not matter here.
    patch = Ragged.of([np.zeros(_VALUES, np.uint8)], np.uint8)
    grid = Ragged.of([np.ones(2, np.int32)])
    columns = {IMAGES: Ranges.of([patch], np.uint8), GRIDS: Ranges.of([grid])}
    fetched = ColumnRanges(tokens=Ranges.of([]), others=columns)
    made, written, read, size = [], [], [], 0
    for _ in range(_TIMES):
        begin = time.process_time()
        shares = requests.shares(fetched, 0, microbatches, _VALUES)
        made.append(time.process_time() - begin)
        batch = batch_of(shares)
        begin = time.process_time()
        data_B = to_bytes(batch)
        written.append(time.process_time() - begin)
        begin = time.process_time()
        own_part(from_bytes(data_B), 0, ())
        read.append(time.process_time() - begin)
        size = len(data_B)
    return size, min(made), min(written), min(read)


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--microbatches", default=16, show_default=True, type=click.IntRange(1))
@click.option("--report/--no-report", default=True, show_default=True, help="Write the report.")
def main(microbatches: int, report: bool) -> None:
    """Measure the messages about images that all ranks of a mesh encode.

    \b
    Example:
      python -m benchmarks.planner.image_shares --microbatches 4 --no-report
    """  # noqa: D301 -- click's own marker
    rows: list[tuple[str, ...]] = []
    for sizes in _CASES:
        tree = ClientPlaceTree.of(**sizes)
        size, *seconds = figures_of(tree, microbatches)
        mesh = ", ".join(f"{axis} {number}" for axis, number in sizes.items())
        times = (f"{each * 1e3:.1f}" for each in seconds)
        rows.append((mesh, f"{tree.world_size:,}", f"{size / 1e6:.3f}", *times))
    table = Table(
        columns=("mesh", "ranks", "MB a batch", "core ms to make shares", "to write", "to read"),
        rows=tuple(rows),
        caption=f"A batch of one data-parallel rank, {microbatches} microbatches",
    )
    print_table(table)
    if report:
        reading = READING.format(rows=_ROWS, length=_LENGTH, tokens=_TOKENS, times=_TIMES)
        path = write_report(
            __file__,
            "image_shares",
            "What ranks are told of images that they encode for one another",
            f"python -m benchmarks.planner.image_shares --microbatches {microbatches}",
            [table],
            reading.replace("\n", " "),
        )
        click.echo(f"wrote {path.name}")


if __name__ == "__main__":
    main()

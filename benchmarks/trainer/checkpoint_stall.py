"""Stall of training by a save, immediate or in the background; and a hundred processes killed in mid-save.

python -m benchmarks.trainer.checkpoint_stall --help
"""

import tempfile
import time
from pathlib import Path
from statistics import median

import click

from benchmarks.report import Table, print_table, write_report
from tests.support.trainer.killed_saves import killed_saves
from tests.support.trainer.moe_builders import a_batch, a_microbatch, an_optimizer, rows_of
from trainer_integration.checkpoint.checkpoints import Checkpoints
from trainer_integration.checkpoint.saving import BackgroundSaver
from trainer_integration.moe.config import MoEConfig
from trainer_integration.moe.model import MoETransformer
from trainer_integration.training.step import train_step

__all__ = ["main"]

_STEPS_BETWEEN = 4


def stalls(config: MoEConfig, saves: int, folder: Path) -> tuple[list[float], list[float], int]:
    """Alternate immediate and background saves; return the stalls of each in seconds, and the bytes of a save."""
    model = MoETransformer(config)
    optimizer = an_optimizer(model)
    checkpoints = Checkpoints(folder, config.identity(), keep=1)
    saver = BackgroundSaver(checkpoints)
    at_once, beside, step = [], [], 0
    for _ in range(saves + 1):
        for kind in (at_once, beside):
            for _ in range(_STEPS_BETWEEN):
                train_step(model, optimizer, a_batch(step, [a_microbatch(rows_of(step))]))
                step += 1
            began_s = time.perf_counter()
            tensors = checkpoints.tensors_at(step, model, optimizer)
            if kind is at_once:
                checkpoints.write(step, tensors, {"version": 1})
            else:
                saver.start(step, tensors, {"version": 1}, {})
            kind.append(time.perf_counter() - began_s)
            if kind is beside:
                # The background part is no stall, and must not slow the next immediate save.
                saver.finish()
    size = sum(tensor.nbytes for tensor in tensors.values())
    return at_once[1:], beside[1:], size  # the first save of each kind makes buffers and folders


@click.command()
@click.option(
    "--saves", default=9, show_default=True, help="Saves of each kind; the median counts."
)
@click.option("--kills", default=100, show_default=True)
@click.option("--report/--no-report", default=True, show_default=True)
@click.option("--loaded", is_flag=True, help="Mention in the report that the machine was busy.")
def main(saves: int, kills: int, report: bool, loaded: bool) -> None:
    """Measure the stall of a save on one rank, and kill processes that save."""
    config = MoEConfig(
        vocab_size=8192, dim=256, num_layers=4, num_heads=4, num_kv_heads=2, hidden=512
    )
    with tempfile.TemporaryDirectory() as folder:
        at_once, beside, size = stalls(config, saves, Path(folder) / "stall")
        loads = killed_saves(Path(folder) / "kills", kills)
    ratio = median(beside) / median(at_once)
    figures = Table(
        columns=("save", "stall, ms, median", "least", "most"),
        rows=tuple(
            (name, *(f"{1000 * f(found):.1f}" for f in (median, min, max)))
            for name, found in (("at once", at_once), ("beside training", beside))
        ),
        caption=f"{saves} saves of {size / 1e6:.0f} MB each",
    )
    killed = Table(
        columns=("processes killed in mid-save", "newest whole checkpoint loaded"),
        rows=((kills, len(loads)),),
    )
    print_table(figures)
    print_table(killed)
    reading = (
        f"A save in the background stops training for {100 * ratio:.0f} % of the time of an immediate save: for one "
        "copy in memory. On a machine with as many ranks as cores, the writing still takes processor time from "
        "the steps."
    )
    click.echo(reading)
    if report:
        said = " The machine was busy with other work: trust the ratio alone." if loaded else ""
        command = f"python -m benchmarks.trainer.checkpoint_stall --saves {saves} --kills {kills}"
        title = "Stall of a checkpoint, and kills in mid-save"
        click.echo(
            write_report(
                __file__, "checkpoint_stall", title, command, (figures, killed), reading + said
            )
        )


if __name__ == "__main__":
    main()

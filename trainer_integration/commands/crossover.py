"""``omniload train crossover``: which transport of experts is faster on this host."""

from pathlib import Path

import click
import orjson
from rich.console import Console
from rich.table import Table

from omniload.base.errors import ConfigError
from omniload.base.units import format_bytes
from omniload.base.writing import write_whole
from trainer_integration.config import load_train

__all__ = ["crossover"]

_FILE = click.Path(dir_okay=False, path_type=Path)


@click.command("crossover")
@click.argument("config", type=_FILE)
@click.argument("output", type=_FILE)
@click.option("--tokens", type=click.IntRange(1, 1 << 24), default=1024, show_default=True)
@click.option("--repetitions", type=click.IntRange(1, 1000), default=5, show_default=True)
def crossover(config: Path, output: Path, tokens: int, repetitions: int) -> None:
    """Measure on this host whether a2a or ag_rs is faster for the layers of CONFIG; write OUTPUT.

    The command runs one layer of experts of the model on its sp ranks, over gloo, with 1, 2, ... experts for each of
    TOKENS tokens per rank. With `parallel: {crossover: OUTPUT}` in the training file, `auto` uses the result.

    \b
    Example:
      omniload train crossover train.yaml crossover.json
    """  # noqa: D301 -- click's own marker
    from trainer_integration.run.crossover_ranks import measured_crossover  # noqa: PLC0415 -- torch takes seconds

    train, _ = load_train(config)
    sp, shape = train.parallel.sp, train.model
    if sp < 2:
        raise ConfigError(f"{config}: parallel.sp is {sp}; experts are shared out from 2 on")
    # By bytes the two are equal at sp experts; measuring up to twice that shows where they are equal by time.
    top_ks = range(1, min(shape.num_experts, 2 * sp + 2) + 1)
    found = measured_crossover(shape, sp=sp, tokens=tokens, top_ks=top_ks, repetitions=repetitions)
    # By one rename, because a launch may read the file while it is measured anew.
    write_whole(output, orjson.dumps(found.model_dump(mode="json"), option=orjson.OPT_INDENT_2))
    table = Table(header_style="dim")
    for heading in ("experts a token", "a2a, ms", "ag_rs, ms", "a2a, bytes", "ag_rs, bytes"):
        table.add_column(heading, justify="right")
    for row in found.rows:
        times = (f"{1000 * row.seconds[name]:.2f}" for name in ("a2a", "ag_rs"))
        sizes = (format_bytes(row.sent_bytes[name]) for name in ("a2a", "ag_rs"))
        table.add_row(str(row.top_k), *times, *sizes)
    Console().print(table)
    click.echo(
        f"a2a is the faster up to {found.by_time} experts a token, and sends less up to {found.by_bytes}"
    )

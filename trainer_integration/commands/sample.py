"""``omniload train sample``: text with which the model of a run continues a prompt."""

from pathlib import Path

import click

from omniload.base.cli import FiniteRange
from trainer_integration.commands.run_folder import checkpoints_of, folder_of, run_argument

__all__ = ["sample"]


@click.command("sample")
@run_argument
@click.option("--prompt", required=True, help="Text to continue.")
@click.option("--tokens", type=click.IntRange(1, 100_000), default=50, show_default=True)
@click.option("--temperature", type=FiniteRange(0, 100), default=1.0, show_default=True)
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True)
@click.option(
    "--step", type=click.IntRange(min=0), help="Step of the checkpoint; by default the newest."
)
def sample(
    run: Path, prompt: str, tokens: int, temperature: float, seed: int, step: int | None
) -> None:
    """Print the text with which the model of RUN continues a prompt.

    \b
    Example:
      omniload train sample demo/run --prompt "def main("
    """  # noqa: D301 -- click's own marker
    from trainer_integration.export.from_run import (  # noqa: PLC0415 -- torch takes seconds
        continued_text,
        model_of_run,
    )

    found = model_of_run(folder_of(run), checkpoints_of(run), step)
    click.echo(continued_text(found, prompt, tokens, temperature=temperature, seed=seed))

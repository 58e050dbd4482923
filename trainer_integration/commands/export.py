"""``omniload train export``: the model of a run as a folder that transformers reads."""

from pathlib import Path

import click

from trainer_integration.commands.run_folder import checkpoints_of, folder_of, run_argument

__all__ = ["export"]


@click.command("export")
@run_argument
@click.argument("folder", type=click.Path(file_okay=False, path_type=Path))
@click.option(
    "--step", type=click.IntRange(min=0), help="Step of the checkpoint; by default the newest."
)
def export(run: Path, folder: Path, step: int | None) -> None:
    """Write the model of RUN to FOLDER as a Hugging Face Mixtral, with the tokenizer of its mix.

    \b
    Example:
      omniload train export demo/run model
    """  # noqa: D301 -- click's own marker
    from trainer_integration.export.from_run import export_run  # noqa: PLC0415 -- torch takes seconds

    found = export_run(folder_of(run), checkpoints_of(run), folder, step)
    click.echo(f"step {found.step}: {folder.resolve()}")

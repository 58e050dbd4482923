"""``omniload train``: run the included trainer, check its file, prove a run, report on it."""

from pathlib import Path

import click
from rich.console import Console

from trainer_integration.display import RunDisplay
from trainer_integration.launch import Launcher

__all__ = ["command"]

_FILE = click.Path(dir_okay=False, path_type=Path)


@click.group("train")
def command() -> None:
    """Train the included MoE model through the data plane."""


@command.command("run")
@click.argument("config", type=_FILE)
@click.option(
    "--resume",
    type=click.Choice(["never", "latest"]),
    default="never",
    show_default=True,
    help="Continue from the newest checkpoint of the run; refuse to touch an old run otherwise.",
)
def run(config: Path, resume: str) -> int:
    r"""Train as CONFIG says: data plane, ranks, restarts.

    \b
    Example:
      omniload train run examples/train.yaml
      omniload train run examples/train.yaml --resume latest
    """
    console = Console()
    with RunDisplay(console) as display:
        launcher = Launcher(
            config, resume="latest" if resume == "latest" else "never", observer=display.observe
        )
        display.expect(launcher.train.steps)
        code = launcher.run()
    console.print(f"run folder: {launcher.run_dir}")
    return code

"""The run that a verb is of, by its folder or its training file, and the report that it leaves there."""

from pathlib import Path

import click

from omniload.base.errors import ConfigError, OmniloadError
from trainer_integration.config import TrainConfig, load_train
from trainer_integration.report.report import write_report

__all__ = ["checkpoints_of", "folder_of", "report_of", "run_argument"]

run_argument = click.argument("run", metavar="RUN", type=click.Path(path_type=Path))
"""A run's folder, or its training file."""


def checkpoints_of(run: Path) -> str:
    """Return where the checkpoints of a run are; its folder alone has them within."""
    if run.is_dir():
        return str(run / "checkpoints")
    train, folder = _train_of(run)
    return train.checkpoint_location(folder)


def folder_of(run: Path) -> Path:
    """Return the folder of a run that is named by it or by its training file."""
    # A folder is enough: its training file may be gone, or say something else by now.
    if run.is_dir():
        return run
    train, folder = _train_of(run)
    return train.run_folder(folder)


def _train_of(run: Path) -> tuple[TrainConfig, Path]:
    if not run.exists():
        raise ConfigError(
            f"{run}: no such file or folder; give the folder of a run, or its training file"
        )
    return load_train(run)


def report_of(folder: Path) -> None:
    """Write the report and say where it is; a run does not fail for want of one."""
    try:
        path = write_report(folder)
    except (OmniloadError, OSError) as error:
        click.echo(f"no report: {error}", err=True)
        return
    click.echo(f"report: {path.resolve()}")

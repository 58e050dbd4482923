"""Finds the run of a verb by its folder or its training file, and writes the run's report."""

from pathlib import Path

import click

from omniload.base.errors import ConfigError, OmniloadError
from trainer_integration.config import TrainConfig, load_train
from trainer_integration.report.report import write_report

__all__ = ["checkpoints_of", "folder_of", "report_of", "run_argument"]

run_argument = click.argument("run", metavar="RUN", type=click.Path(path_type=Path))
"""A run's folder, or its training file."""


def checkpoints_of(run: Path) -> str:
    """Return where the checkpoints of a run are; a run given by its folder has them inside."""
    if run.is_dir():
        return str(run / "checkpoints")
    train, folder = _train_of(run)
    return train.checkpoint_location(folder)


def folder_of(run: Path) -> Path:
    """Return the folder of a run, given by the folder itself or by its training file."""
    # A folder is enough, because its training file may be gone, or may have changed.
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
    """Write the report and print its path; a failure of the report is no failure of the run."""
    try:
        path = write_report(folder)
    except (OmniloadError, OSError) as error:
        click.echo(f"no report: {error}", err=True)
        return
    click.echo(f"report: {path.resolve()}")

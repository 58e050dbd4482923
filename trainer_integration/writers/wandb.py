"""Weights & Biases: offline unless configured otherwise; ``wandb sync RUN/wandb/offline-run-*`` sends a run."""

import os
from collections.abc import Mapping
from pathlib import Path

import wandb
from typing_extensions import override

from trainer_integration.writers.protocol import MetricWriter
from trainer_integration.writers.record import read_record
from trainer_integration.writers.settings import WandbConfig

__all__ = ["WandbWriter"]

_PROJECT = "omniload"
_STEP = "step"


class WandbWriter(MetricWriter):
    """Writes a separate run for each launch, all under one identifier."""

    def __init__(self, folder: Path, config: WandbConfig) -> None:
        # If left out, wandb finds them in its own variables.
        server = {} if config.base_url is None else {"base_url": config.base_url}
        self._run = wandb.init(
            project=config.project or os.environ.get("WANDB_PROJECT", _PROJECT),
            entity=config.entity,
            group=config.group,
            tags=config.tags or None,
            id=read_record(folder).wandb,
            name=config.name or os.environ.get("WANDB_NAME", folder.resolve().name),
            dir=str(folder),
            mode=config.mode or os.environ.get("WANDB_MODE", "offline"),
            # Later launches continue under the same identifier.
            resume="allow",
            settings=wandb.Settings(
                **server,
                # Command lines, packages and output stay on the machine, because they may contain secrets.
                silent=True,
                console="off",
                disable_code=True,
                disable_git=True,
                x_disable_meta=True,
                x_disable_stats=True,
                x_save_requirements=False,
            ),
        )
        # By a column, not by wandb's own count, which does not accept a step twice.
        self._run.define_metric("*", step_metric=_STEP)

    @override
    def write(self, step: int, figures: Mapping[str, float]) -> None:
        self._run.log({**figures, _STEP: step})

    @override
    def go_back(self, step: int) -> None:
        """Do nothing: a step that is trained again has two rows, and its column shows it."""

    @override
    def close(self) -> None:
        self._run.finish()
        # Without a run of the program's own, nothing else needs wandb's process.
        if wandb.run is None:
            wandb.teardown()

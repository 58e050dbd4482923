"""Specification that the launcher gives a rank's process, as JSON on its standard input.

A rank reads no configuration file, because a file that is edited while the job runs must not give a restarted rank
another mix than the launcher recorded.
"""

import json
from pathlib import Path
from typing import Any

from omniload.actors.address import PlaneAddress
from omniload.base.config import StrictModel
from omniload.mix.config import MixConfig
from trainer_integration.config import TrainConfig
from trainer_integration.moe.config import MoEConfig
from trainer_integration.vision.config import VisionConfig

__all__ = ["EvaluationSpec", "RankSpec"]


class EvaluationSpec(StrictModel):
    """An evaluation mix."""

    mix: MixConfig
    base_dir: Path
    """Folder that its relative paths start at."""
    cache_dir: Path | None
    """Folder for indexes of sources that have no folder of their own."""
    num_steps: int | None = None
    """Steps that are taken of it; ``None`` for all."""


class RankSpec(StrictModel):
    """One rank of one attempt."""

    launcher_pid: int | None
    """Process with which the rank ends; ``None`` under another launcher, which ends its ranks by itself."""
    train: TrainConfig
    folder: Path
    """Folder that the training file's relative paths start at."""
    model: MoEConfig
    vision: VisionConfig | None = None
    """Encoder in front of the model; ``None`` without images."""
    mix: MixConfig
    """The mix with its balance, even if its file leaves the balance out."""
    base_dir: Path
    """Folder that the mix's relative paths start at."""
    cache_dir: Path | None
    """Folder for indexes of sources that have no folder of their own."""
    rank: int
    attempt: int
    store_port: int | None
    """Port of this host for rank 0's store, through which the ranks of this attempt find each other; ``None`` for a
    single rank, and under another launcher, whose variables name it."""
    store_fd: int | None = None
    """Listening socket at that port, for rank 0 only; the launcher opened it."""
    resume_step: int | None
    """Checkpoint to load; ``None`` starts from nothing."""
    plane: PlaneAddress | None
    """Address of the data plane; ``None`` if the ranks open it themselves."""
    loader_state: dict[str, Any] | None
    """State to open that data plane with."""
    evaluation: EvaluationSpec | None = None
    """The evaluation mix; ``None`` without one."""
    profile: tuple[int, int] | None = None
    """First and last step of a trace; ``None`` for none."""

    def to_json(self) -> str:
        """Return text for ``model_validate_json``, because pydantic's own text turns an infinity into null."""
        return json.dumps(self.model_dump(mode="json"))

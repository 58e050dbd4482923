"""What the launcher tells a rank's process, as JSON on its standard input.

A rank reads no configuration file: one that is edited while the job runs must not give
a restarted rank another mix than the launcher recorded.
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
    """A mix that is evaluated on."""

    mix: MixConfig
    base_dir: Path
    """Folder that its relative paths start at."""
    cache_dir: Path | None
    """Folder for indexes of sources that have none of their own."""
    num_steps: int | None = None
    """Steps that are taken of it; ``None`` for all."""


class RankSpec(StrictModel):
    """One rank of one attempt."""

    launcher_pid: int | None
    """Process that the rank ends with; ``None`` under another launcher, which ends its ranks by itself."""
    train: TrainConfig
    folder: Path
    """Folder that the training file's relative paths start at."""
    model: MoEConfig
    vision: VisionConfig | None = None
    """Encoder before the model; ``None`` without images."""
    mix: MixConfig
    """As it is balanced, whatever its file leaves out."""
    base_dir: Path
    """Folder that the mix's relative paths start at."""
    cache_dir: Path | None
    """Folder for indexes of sources that have none of their own."""
    rank: int
    attempt: int
    store_port: int | None
    """Port of this host at which rank 0 keeps what the ranks of this attempt find each other by; ``None`` for
    a rank alone, and under another launcher, whose variables say it."""
    store_fd: int | None = None
    """Rank 0's: the listening socket there, which the launcher opened."""
    resume_step: int | None
    """Checkpoint to load; ``None`` starts from nothing."""
    plane: PlaneAddress | None
    """``None``: the ranks bring up the data plane themselves."""
    loader_state: dict[str, Any] | None
    """State to open that data plane with."""
    evaluation: EvaluationSpec | None = None
    """What to evaluate on; ``None`` for nothing."""
    profile: tuple[int, int] | None = None
    """First and last step of a trace; ``None`` for none."""

    def to_json(self) -> str:
        """Return what ``model_validate_json`` reads; pydantic's own text turns an infinity into null."""
        return json.dumps(self.model_dump(mode="json"))

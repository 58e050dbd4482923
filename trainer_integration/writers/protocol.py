"""What a tool that draws figures must do."""

from collections.abc import Mapping
from typing import Literal, Protocol

__all__ = ["Kind", "MetricWriter"]

Kind = Literal["tensorboard", "wandb", "mlflow"]
"""Tools by the name of their package, which is that of the extra, too."""


class MetricWriter(Protocol):
    """Writes the figures of one run. Called by one thread at a time."""

    def write(self, step: int, figures: Mapping[str, float]) -> None:
        """Write what was measured in a step; names such as ``loss`` or ``share/web``."""
        ...

    def go_back(self, step: int) -> None:
        """Take it that ``step`` and those after it are trained again: what was written of them is of lost work."""
        ...

    def close(self) -> None:
        """Write what is outstanding, and end."""
        ...

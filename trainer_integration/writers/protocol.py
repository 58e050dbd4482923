"""The protocol of a tool that draws figures."""

from collections.abc import Mapping
from typing import Literal, Protocol

__all__ = ["Kind", "MetricWriter"]

Kind = Literal["tensorboard", "wandb", "mlflow"]
"""Tools by the name of their package, which is also the name of the extra."""


class MetricWriter(Protocol):
    """Writes the figures of one run. Called by one thread at a time."""

    def write(self, step: int, figures: Mapping[str, float]) -> None:
        """Write the figures of a step, with names such as ``loss`` or ``share/web``."""
        ...

    def go_back(self, step: int) -> None:
        """Note that ``step`` and later steps are trained again, so that their written figures belong to lost work."""
        ...

    def close(self) -> None:
        """Write outstanding figures, and end."""
        ...

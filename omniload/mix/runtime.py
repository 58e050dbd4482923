"""The part of the data-mix file that changes nothing of what is trained on."""

from typing import Annotated, Literal

from pydantic import Field

from omniload.base.config import StrictModel
from omniload.base.units import Seconds

__all__ = ["RuntimeConfig"]


class RuntimeConfig(StrictModel):
    """How the data plane runs; none of this changes what is trained on."""

    kind: Literal["auto", "local", "ray"] = "auto"
    """``local``: threads in the trainer's process, one rank. ``ray``: actors. ``auto``: local for one rank."""
    prefetch_steps: int = Field(default=0, ge=0, le=1024)
    """Steps built ahead of the slowest rank; 0 builds 4, and of small steps up to 64, about a million tokens."""
    loaders: int = Field(default=0, ge=0, le=4096)
    """Source loader actors; 0 groups sources by their cost."""
    constructors: int = Field(default=0, ge=0, le=4096)
    """Data constructor actors; 0 starts one for every 8 data-parallel ranks."""
    metrics_port: int = Field(default=0, ge=0, le=65_535)
    """Port on loopback where the planner's process answers Prometheus at ``/metrics``; 0 for none."""
    batch_timeout: Annotated[Seconds, Field(gt=0)] = 1800.0
    """Longest that a rank waits for a batch before it is told who holds it up; it is logged from 10 s on."""

"""What the launcher tells a rank's process, as JSON on its standard input."""

from pathlib import Path
from typing import Any

from omniload.base.config import StrictModel

__all__ = ["PlaneRef", "RankSpec"]


class PlaneRef(StrictModel):
    """Where the job's data plane is, when it runs in other processes."""

    address: str
    namespace: str
    dp_ranks_of: dict[str, tuple[int, ...]]
    """Data-parallel ranks of each data constructor."""


class RankSpec(StrictModel):
    """One rank of one attempt."""

    config: Path
    """The training file."""
    rank: int
    attempt: int
    rendezvous: Path
    """File over which the ranks of this attempt find each other; new for each attempt."""
    resume_step: int | None
    """Checkpoint to load; ``None`` starts from nothing."""
    plane: PlaneRef | None
    """``None``: this process runs the data plane itself."""
    loader_state: dict[str, Any] | None
    """State to open that data plane with."""

from omniload.base.errors import (
    ConfigError,
    IntegrityError,
    OmniloadError,
    StateError,
    UnavailableError,
)
from omniload.front.loader import Loader
from omniload.front.opening import open_mix as open  # noqa: A004 -- read as omniload.open
from omniload.front.rows import PackedRows, TrainingBatch
from omniload.front.sampling.sampler import DynamicSampler, RoundLimitError
from omniload.front.sampling.values import Group, GroupBatch, Prompt, Rollouts
from omniload.front.served_plane import ServedPlane, join, serve

__all__ = [
    "ConfigError",
    "DynamicSampler",
    "Group",
    "GroupBatch",
    "IntegrityError",
    "Loader",
    "OmniloadError",
    "PackedRows",
    "Prompt",
    "Rollouts",
    "RoundLimitError",
    "ServedPlane",
    "StateError",
    "TrainingBatch",
    "UnavailableError",
    "join",
    "open",
    "serve",
]

__version__: str

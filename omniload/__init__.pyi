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
from omniload.front.serving import ServedPlane, join, serve

__all__ = [
    "ConfigError",
    "IntegrityError",
    "Loader",
    "OmniloadError",
    "PackedRows",
    "ServedPlane",
    "StateError",
    "TrainingBatch",
    "UnavailableError",
    "join",
    "open",
    "serve",
]

__version__: str

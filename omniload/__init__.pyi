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

__all__ = [
    "ConfigError",
    "IntegrityError",
    "Loader",
    "OmniloadError",
    "PackedRows",
    "StateError",
    "TrainingBatch",
    "UnavailableError",
    "open",
]

__version__: str

"""torch fed by omniload: a drop-in ``DataLoader``, and the included trainer of a small mixture-of-experts model.

The only package that imports torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trainer_integration.checkpoint.striped.place import open_striped
    from trainer_integration.checkpoint.striped.reader import StripedReader
    from trainer_integration.checkpoint.striped.writer import (
        StripedWriter,
        load_striped,
        save_striped,
    )
    from trainer_integration.loader.balancing import token_mean
    from trainer_integration.loader.data_loader import DataLoader
    from trainer_integration.loader.shared.dataset import SharedDataset
    from trainer_integration.replicas import ReplicaLoader
    from trainer_integration.writers.opening import open_writers

__all__ = [
    "DataLoader",
    "ReplicaLoader",
    "SharedDataset",
    "StripedReader",
    "StripedWriter",
    "load_striped",
    "open_striped",
    "open_writers",
    "save_striped",
    "token_mean",
]

_PLACES = {
    "DataLoader": "trainer_integration.loader.data_loader",
    "ReplicaLoader": "trainer_integration.replicas",
    "SharedDataset": "trainer_integration.loader.shared.dataset",
    "StripedReader": "trainer_integration.checkpoint.striped.reader",
    "StripedWriter": "trainer_integration.checkpoint.striped.writer",
    "load_striped": "trainer_integration.checkpoint.striped.writer",
    "open_striped": "trainer_integration.checkpoint.striped.place",
    "open_writers": "trainer_integration.writers.opening",
    "save_striped": "trainer_integration.checkpoint.striped.writer",
    "token_mean": "trainer_integration.loader.balancing",
}


def __getattr__(name: str) -> object:
    """Load what is offered when it is asked for: the command line imports this package without torch."""
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return getattr(import_module(_PLACES[name]), name)
    except ModuleNotFoundError as error:
        from omniload.base.extras import missing_extra  # noqa: PLC0415 -- only where it is needed

        # Still an error of an import, because scripts catch it to go on without.
        said = str(missing_extra(f"{__name__}.{name}", error))
        raise ModuleNotFoundError(said, name=error.name) from error


def __dir__() -> list[str]:
    return sorted(__all__)

"""torch fed by omniload: a drop-in ``DataLoader``, and the included trainer of a small mixture-of-experts model.

The only package that imports torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trainer_integration.loader.data_loader import DataLoader

__all__ = ["DataLoader"]

_PLACES = {"DataLoader": "trainer_integration.loader.data_loader"}


def __getattr__(name: str) -> object:
    """Load what is offered when it is asked for: the command line imports this package without torch."""
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_PLACES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)

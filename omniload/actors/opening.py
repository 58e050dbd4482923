"""Open the data plane that a mix file asks for."""

from contextlib import AbstractContextManager
from typing import Protocol

from omniload.actors.local import LocalPlane
from omniload.actors.plane import DataPlane, PlaneSpec
from omniload.base.errors import ConfigError

__all__ = ["open_plane", "runtime_of"]


class _OpenPlane(DataPlane, AbstractContextManager["_OpenPlane"], Protocol):
    """A data plane that closes itself at the end of a ``with``."""


def runtime_of(spec: PlaneSpec) -> str:
    """Return the runtime that ``auto`` stands for: threads for one rank, Ray for several."""
    kind = spec.mix.runtime.kind
    if kind != "auto":
        return kind
    return "local" if spec.tree.world_size == 1 else "ray"


def open_plane(spec: PlaneSpec) -> _OpenPlane:
    """Open the sources of a mix and start planning; use it in a ``with``.

    Raises:
        ConfigError: The mix, a source or the batch is refused, or Ray is asked for and not installed.
        StateError: ``spec.state`` does not fit the mix or the data.
    """
    if runtime_of(spec) == "local":
        return LocalPlane(spec)
    try:
        from omniload.actors.ray_plane import RayPlane  # noqa: PLC0415 -- an extra, absent for local users
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"runtime ray needs the package {error.name}; pip install 'omniload[ray]', or set runtime.kind to local"
        ) from error
    return RayPlane(spec)

"""Open the data plane that a mix file asks for."""

from importlib import import_module
from typing import TYPE_CHECKING

from omniload.actors.address import Gather
from omniload.actors.plane import PlaneSpec
from omniload.base.concurrency.held_signals import SignalsHeld
from omniload.base.extras import missing_extra

if TYPE_CHECKING:
    from omniload.actors.local.plane import LocalPlane
    from omniload.actors.ray.plane import RayPlane

__all__ = ["open_plane", "open_ray_plane", "require_ray", "runtime_of"]


def runtime_of(spec: PlaneSpec) -> str:
    """Return the runtime that ``auto`` stands for: threads for one rank, Ray for several."""
    kind = spec.mix.runtime.kind
    if kind != "auto":
        return kind
    # Threads are enough for one rank, and start at once; several ranks are several processes.
    return "local" if spec.tree.world_size == 1 else "ray"


def open_plane(spec: PlaneSpec) -> "LocalPlane | RayPlane":
    """Open the sources of a mix and start planning; use it in a ``with``.

    Raises:
        ConfigError: The mix, a source or the batch is refused, or Ray is asked for and not installed.
        StateError: ``spec.state`` does not fit the mix or the data.
    """
    if runtime_of(spec) == "local":
        # Imported here because it loads every role, which a launcher does not need if its rank opens the plane.
        from omniload.actors.local.plane import LocalPlane  # noqa: PLC0415

        return LocalPlane(spec)
    return open_ray_plane(spec)


def open_ray_plane(spec: PlaneSpec, gather: Gather | None = None) -> "RayPlane":
    """Open the data plane as Ray actors; use it in a ``with``.

    Args:
        spec: The run.
        gather: Makes the other hosts of the job join; ``None`` if all ranks are on this one.

    Raises:
        ConfigError: As for ``open_plane``.
        StateError: As for ``open_plane``, or this process uses Ray already.
    """
    require_ray()
    from omniload.actors.ray.plane import RayPlane  # noqa: PLC0415 -- an extra, absent for local users

    with SignalsHeld():
        return RayPlane(spec, gather)


def require_ray() -> None:
    """Refuse a plane of several ranks if Ray is not installed; call it before an import of our part for Ray.

    Raises:
        ConfigError: It is not, and the message has the line that installs it.
    """
    try:
        import_module("omniload.actors.ray.environment")
    except ModuleNotFoundError as error:
        raise missing_extra("runtime.kind ray, which several ranks take,", error) from error

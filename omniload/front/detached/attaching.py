"""How a driver's ranks attach to a detached plane: rank 0 asks its opener and passes its address to the others."""

from contextlib import ExitStack
from dataclasses import replace

from omniload.actors.address import PlaneAddress
from omniload.actors.plane import PlaneSpec, RankHandle, first_step_of
from omniload.base.errors import ConfigError
from omniload.base.extras import missing_extra
from omniload.front.launch import Place
from omniload.front.mix_values import MixValues
from omniload.mix.schema.splits import TRAIN

__all__ = ["as_detached", "attach_to", "detached_handle", "is_detached"]

_DIGEST = "the mix, by what is secret in it or the order of its keys,"


def is_detached(spec: PlaneSpec) -> bool:
    """Return whether a run's plane is to outlive the driver; the plane of a split ends with the driver."""
    return spec.mix.runtime.lifetime == "detached" and spec.mix.split == TRAIN


def as_detached(spec: PlaneSpec) -> PlaneSpec:
    """Return a run as it is opened; a run whose plane is detached is elastic.

    Raises:
        ConfigError: The run has no folder, by which its plane could be found again.
    """
    if not is_detached(spec):
        return spec
    if spec.run_dir is None:
        raise ConfigError(
            "runtime.lifetime is 'detached' and run_dir is None; a later driver finds the plane by the run's folder: "
            "give run_dir="
        )
    runtime = spec.mix.runtime.model_copy(update={"elastic": True})
    return replace(spec, mix=spec.mix.model_copy(update={"runtime": runtime}))


def attach_to(stack: ExitStack, spec: PlaneSpec, digest: str) -> PlaneAddress:
    """Return the address of a run's plane for this driver's ranks; start the plane if there is none.

    Args:
        stack: Receives what must be closed.
        spec: The run, with its state.
        digest: Digest of the mix.

    Raises:
        OmniloadError: See the opening of a plane; or the run's plane is of another mix, or serves another driver.
    """
    try:
        from omniload.actors.ray.given.detached import attach  # noqa: PLC0415 -- an extra
        from omniload.actors.ray.given.tenancy import Attaching  # noqa: PLC0415
        from omniload.actors.ray.release import Release  # noqa: PLC0415
    except ModuleNotFoundError as error:
        raise missing_extra("runtime.lifetime detached", error) from error
    identity = {
        "release": str(Release.own()),
        "folder of the mix": str(spec.base_dir.resolve()),
        **MixValues.of(spec.mix).values,
        _DIGEST: digest,
    }
    return attach(stack, Attaching(spec=spec, identity=identity))


def detached_handle(
    stack: ExitStack, spec: PlaneSpec, address: PlaneAddress, place: Place
) -> RankHandle:
    """Return this rank's handle of a plane that rank 0 has attached to."""
    from omniload.actors.ray.given.detached import join_detached  # noqa: PLC0415 -- an extra

    ranks = place.dp_rank, place.cp_rank, place.dp_size
    return join_detached(stack, address, ranks, first_step_of(spec))

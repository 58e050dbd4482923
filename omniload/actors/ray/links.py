"""Ways between the roles as Ray actors."""

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Any

from typing_extensions import override

from omniload.actors.ray.answers import answer_to, future_of, log_failure
from omniload.actors.roles.links import ConstructorLink, LoaderLink
from omniload.base.errors import OmniloadError
from omniload.base.ragged import Ragged, Ranges
from omniload.machine.messages import (
    ReadAhead,
    ReleaseSamples,
    ReleaseSteps,
    SamplesReported,
    SliceRequest,
)
from omniload.plan.records import StepPlan

__all__ = ["RayConstructorLink", "RayLoaderLink", "fetch_slices"]


class RayLoaderLink(LoaderLink):
    """A way to a source loader."""

    def __init__(self, actor: Any, name: str) -> None:  # noqa: ANN401 -- Ray's handle has no static type
        self._actor, self._name = actor, name

    @property
    @override
    def name(self) -> str:
        return self._name

    @override
    def read_ahead(self, command: ReadAhead) -> "Future[SamplesReported]":
        return future_of(self._actor.read_ahead.remote(command), self._name)

    @override
    def release(self, command: ReleaseSamples) -> None:
        log_failure(self._actor.release.remote(command), self._name, "release samples")


class RayConstructorLink(ConstructorLink):
    """A way to a data constructor."""

    def __init__(self, actor: Any, dp_ranks: Sequence[int]) -> None:  # noqa: ANN401 -- as above
        self._actor, self._dp_ranks = actor, dp_ranks

    @property
    @override
    def dp_ranks(self) -> Sequence[int]:
        return self._dp_ranks

    @override
    def build(self, plans: Sequence[StepPlan]) -> "Future[int]":
        return future_of(self._actor.build.remote(plans), "a data constructor")

    @override
    def release(self, command: ReleaseSteps) -> None:
        log_failure(self._actor.release.remote(command), "a data constructor", "release steps")

    @override
    def end(self, step: int) -> None:
        log_failure(self._actor.end.remote(step), "a data constructor", "end the data")

    @override
    def fail(self, error: OmniloadError) -> None:
        log_failure(self._actor.fail.remote(error), "a data constructor", "pass on the failure")


def fetch_slices(
    loaders: Mapping[int, Any], limit_s: float, requests: Sequence[SliceRequest]
) -> Ranges:
    """Get the slices of a step: one call per loader, however many samples or sources.

    Raises:
        UnavailableError: A loader has died, or gave no answer within the limit.
    """
    places: dict[Any, list[int]] = {}
    for place, request in enumerate(requests):
        places.setdefault(loaders[request.source], []).append(place)
    answers = [
        (at, actor.slices.remote([requests[place] for place in at])) for actor, at in places.items()
    ]
    slices: dict[int, Ragged] = {}
    for at, ref in answers:
        slices |= zip(at, answer_to(ref, "a source loader", limit_s=limit_s), strict=True)
    return Ranges.of([slices[place] for place in range(len(requests))])

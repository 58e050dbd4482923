"""Ways between the roles as Ray actors."""

import threading
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

from typing_extensions import override

from omniload.actors.ray.answers import future_of, is_lost, log_failure, plain_error
from omniload.actors.roles.links import ConstructorLink, LoaderLink
from omniload.base.errors import OmniloadError
from omniload.machine.messages import (
    ReadAhead,
    ReleaseSamples,
    ReleaseSteps,
    SamplesReported,
    TakeOver,
)
from omniload.plan.records import StepPlan
from omniload.plan.world import RanksServed

__all__ = ["RayConstructorLink", "RayLoaderLink"]

_ASK_AGAIN_S = 1.0
"""A lost call is asked again so much later: its actor may have been cut off for a moment only."""


class RayLoaderLink(LoaderLink):
    """A way to a source loader, and to the one that takes its place."""

    def __init__(self, actor: Any, name: str, life: int) -> None:  # noqa: ANN401 -- Ray's handle has no static type
        self._actor, self._name, self._life = actor, name, life

    @property
    @override
    def name(self) -> str:
        return self._name

    def lead_to(self, actor: Any, name: str, life: int) -> None:  # noqa: ANN401 -- as above
        """Lead to a later life of the loader; what the one before it was asked is asked again by the planner."""
        if life > self._life:  # calls may overtake each other
            self._actor, self._name, self._life = actor, name, life

    @override
    def read_ahead(self, command: ReadAhead) -> "Future[SamplesReported]":
        answer: Future[SamplesReported] = Future()
        self._ask(command, answer)
        return answer

    def _ask(self, command: ReadAhead, answer: "Future[SamplesReported]") -> None:
        """Ask the loader; where it is lost, ask again a little later, unless another has taken its place."""
        actor, name = self._actor, self._name

        def settle(done: "Future[Any]") -> None:
            error = done.exception()
            if error is None:
                answer.set_result(done.result())
            elif not is_lost(error):
                answer.set_exception(plain_error(error, name))
            elif self._actor == actor:
                again = threading.Timer(
                    _ASK_AGAIN_S, lambda: self._ask_same(actor, command, answer)
                )
                again.daemon = True
                again.start()
            else:
                answer.cancel()

        actor.read_ahead.remote(command).future().add_done_callback(settle)

    def _ask_same(self, actor: Any, command: ReadAhead, answer: "Future[SamplesReported]") -> None:  # noqa: ANN401 -- as above
        if self._actor == actor:
            self._ask(command, answer)
        else:
            answer.cancel()

    @override
    def take_over(self, command: TakeOver) -> "Future[None]":
        return future_of(self._actor.take_over.remote(command), self._name)

    @override
    def release(self, command: ReleaseSamples) -> None:
        log_failure(self._actor.release.remote(command), self._name, "release samples")


class RayConstructorLink(ConstructorLink):
    """A way to a data constructor."""

    def __init__(self, actor: Any, dp_ranks: Sequence[int], life: int) -> None:  # noqa: ANN401 -- as above
        self._actor, self._dp_ranks, self._life = actor, dp_ranks, life

    @property
    @override
    def dp_ranks(self) -> Sequence[int]:
        return self._dp_ranks

    def lead_to(self, actor: Any, life: int) -> None:  # noqa: ANN401 -- as above
        """Lead to a later life of the constructor; what it is to build is told it again by the planner."""
        if life > self._life:
            self._actor, self._life = actor, life

    @override
    def build(self, plans: Sequence[StepPlan], served: RanksServed) -> "Future[int]":
        built: Future[int] = Future()

        def settle(done: "Future[Any]") -> None:
            error = done.exception()
            if error is None:
                built.set_result(done.result())
            elif is_lost(error):
                built.cancel()
            else:
                built.set_exception(plain_error(error, "a data constructor"))

        self._actor.build.remote(plans, served).future().add_done_callback(settle)
        return built

    @override
    def release(self, command: ReleaseSteps) -> None:
        log_failure(self._actor.release.remote(command), "a data constructor", "release steps")

    @override
    def end(self, step: int) -> None:
        log_failure(self._actor.end.remote(step), "a data constructor", "end the data")

    @override
    def fail(self, error: OmniloadError) -> None:
        log_failure(self._actor.fail.remote(error), "a data constructor", "pass on the failure")

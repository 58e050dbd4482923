"""Ways between the roles as Ray actors."""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

from typing_extensions import override

from omniload.actors.ray.answers import future_of, is_lost, log_failure, plain_error
from omniload.actors.ray.holders import Loaders, Serving
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

__all__ = ["RayConstructorLink", "RayLoaderLink", "RayLoaderLinks"]

_ASK_AGAIN_S = 1.0
"""A lost call is asked again so much later: its actor may have been cut off for a moment only."""


class RayLoaderLink(LoaderLink):
    """A way to a source loader, and to the one that takes its place."""

    def __init__(
        self,
        actor: Any,  # noqa: ANN401 -- Ray's handle has no static type
        name: str,
        turn: int,
        serves: "Callable[[RayLoaderLink, int], bool]",
    ) -> None:
        """Lead to an actor; ``serves`` tells whether this way is still that of a source."""
        self._actor, self._name, self._turn, self._serves = actor, name, turn, serves

    @property
    @override
    def name(self) -> str:
        return self._name

    def lead_to(self, serving: Serving) -> None:
        """Lead to a later life of the loader; what the one before it was asked is asked again by the planner."""
        if serving.turn > self._turn:  # calls may overtake each other
            self._actor, self._name, self._turn = serving.actor, serving.name, serving.turn

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
            elif not self._serves(self, command.source):
                answer.cancel()  # the next loader was asked for it
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
        if self._actor == actor and self._serves(self, command.source):
            self._ask(command, answer)
        else:
            answer.cancel()

    @override
    def take_over(self, command: TakeOver) -> "Future[None]":
        return future_of(self._actor.take_over.remote(command), self._name)

    @override
    def release(self, command: ReleaseSamples) -> None:
        log_failure(self._actor.release.remote(command), self._name, "release samples")


class RayLoaderLinks:
    """The ways to all source loaders: one for each role, and which of them each source takes."""

    def __init__(self, loaders: Loaders) -> None:
        self._turns = dict.fromkeys(loaders.of, loaders.turn)
        self._roles: dict[str, RayLoaderLink] = {}
        for source, role in loaders.roles.items():
            actor = loaders.of[source]
            if role not in self._roles:
                self._roles[role] = self._link(actor, loaders.names[actor], loaders.turn)
        self._of = {source: self._roles[role] for source, role in loaders.roles.items()}

    def of(self, source: int) -> RayLoaderLink:
        """Return the way to the loader of a source."""
        return self._of[source]

    def follow(self, serving: Serving) -> None:
        """Have sources take the way to the loader that serves them from now on."""
        link = self._roles.get(serving.role)
        if link is None:
            link = self._link(serving.actor, serving.name, serving.turn)
            self._roles[serving.role] = link
        link.lead_to(serving)
        for source in serving.sources:
            if serving.turn > self._turns.get(source, -1):
                self._of[source], self._turns[source] = link, serving.turn

    def add(self, source: int, beside: int) -> None:
        """Have a source that is added take the way of another."""
        self._of[source] = self._of[beside]

    def _link(self, actor: Any, name: str, turn: int) -> RayLoaderLink:  # noqa: ANN401 -- as above
        return RayLoaderLink(actor, name, turn, lambda link, source: self._of.get(source) is link)


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

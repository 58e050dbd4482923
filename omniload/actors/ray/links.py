"""Ways between the roles as Ray actors: the planner's to loaders and constructors, and a constructor's to loaders.

Each leads to the member that holds the role, and is led to the one that takes its place. Of a source the hand-over with
the highest number counts: a role that is told of an earlier one later does not go back.
"""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any

from typing_extensions import override

from omniload.actors.ray.answers import future_of, is_lost, log_failure, plain_error
from omniload.actors.ray.environment import RayError, ray
from omniload.actors.roles.links import BuildOrder, ConstructorLink, LoaderLink
from omniload.base.errors import OmniloadError, UnavailableError
from omniload.machine.messages import (
    ReadAhead,
    ReleaseSamples,
    ReleaseSteps,
    SamplesReported,
    SliceRequest,
    StepsTaken,
    TakeOver,
)
from omniload.mix.columns import ColumnRanges, SampleColumns
from omniload.plan.records import StepPlan
from omniload.plan.world import RanksServed

__all__ = [
    "LoaderHolders",
    "Loaders",
    "RayConstructorLink",
    "RayLoaderLink",
    "RayLoaderLinks",
    "Serving",
]

_TURN_S = 0.02
"""Another holder is looked for so often while the one that was asked gives no answer: a lost one is replaced before
Ray says that it is lost."""
_ASK_AGAIN_S = 1.0
"""A lost call is asked again after so long, unless another holder has come: its actor may have been cut off for a
moment only."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaders:
    """The source loaders of a plane."""

    of: Mapping[int, Any]
    """Actor of each source."""
    names: Mapping[Any, str]
    """Name of each actor as a member of its role."""
    roles: Mapping[int, str]
    """Role that serves each source."""
    turn: int
    """Number of the last hand-over that this knows of."""
    limit_s: float
    """Longest wait for the slices of one of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Serving:
    """A loader that serves sources from now on."""

    sources: tuple[int, ...]
    actor: Any
    name: str
    role: str
    turn: int
    """Number of the hand-over: what is said of a source later is not followed by what was said earlier."""


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
        self._actor, self.name, self._turn, self._serves = actor, name, turn, serves

    def lead_to(self, serving: Serving) -> None:
        """Lead to a later life of the loader; what the one before it was asked is asked again by the planner."""
        if serving.turn > self._turn:  # calls may overtake each other
            self._actor, self.name, self._turn = serving.actor, serving.name, serving.turn

    @override
    def read_ahead(self, command: ReadAhead) -> "Future[SamplesReported]":
        answer: Future[SamplesReported] = Future()
        self._ask(command, answer)
        return answer

    def _ask(self, command: ReadAhead, answer: "Future[SamplesReported]") -> None:
        """Ask the loader; where it is lost, ask again a little later, unless another has taken its place."""
        actor, name = self._actor, self.name

        def settle(done: "Future[Any]") -> None:
            error = done.exception()
            if error is None:
                answer.set_result(done.result())
            elif not self._serves(self, command.source):
                answer.cancel()  # the next loader was asked for it
            elif not is_lost(error):
                answer.set_exception(plain_error(error, name))
            # The same loader still has the source: it was only cut off, or its end has not come through yet.
            elif self._actor == actor:
                _later(lambda: self._ask_same(actor, command, answer))
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
        return future_of(self._actor.take_over.remote(command), self.name)

    @override
    def release(self, command: ReleaseSamples) -> None:
        log_failure(self._actor.release.remote(command), self.name, "release samples")


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
        # A loader that was added after this planner had begun.
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
        self._actor, self.dp_ranks, self._life = actor, dp_ranks, life
        self._heard: tuple[Any, int] = (actor, 0)
        """An actor, and how many words of its ranks were heard from it."""
        self._asked: Any = None
        """The actor that is asked for more of them."""
        self._asking = threading.Lock()  # the planner asks, and a thread of Ray's hears the answer

    def lead_to(self, actor: Any, life: int) -> None:  # noqa: ANN401 -- as above
        """Lead to a later life of the constructor; what it is to build is told it again by the planner."""
        if life > self._life:
            self._actor, self._life = actor, life

    @override
    def build(
        self, plans: Sequence[StepPlan], served: RanksServed, released_to: int
    ) -> "Future[int] | Future[StepsTaken]":
        with self._asking:
            actor = self._actor
            asks, self._asked = self._asked != actor, actor
        order = BuildOrder(
            plans=plans,
            served=served,
            released_to=released_to,
            heard=self._heard_from(actor) if asks else None,
        )
        answer: Future[Any] = Future()

        def settle(done: "Future[Any]") -> None:
            error = done.exception()
            if asks:
                self._settle_told(actor, answer, done)
            elif error is None:
                answer.set_result(done.result())
            elif is_lost(error):
                # Nobody fails of it: the roster replaces it, and the planner tells the next one all of that again.
                answer.cancel()
            else:
                answer.set_exception(plain_error(error, "a data constructor"))

        actor.carry_out.remote(order.packed()).future().add_done_callback(settle)
        return answer

    @override
    def fence(self, edition: tuple[int, int]) -> "Future[int]":
        fenced: Future[int] = future_of(self._actor.fence.remote(edition), "a data constructor")
        return fenced

    @override
    def told(self) -> "Future[StepsTaken] | None":
        with self._asking:
            actor = self._actor
            if self._asked == actor:
                return None
            self._asked = actor
        answer = Future[StepsTaken]()
        self._ask_told(actor, answer)
        return answer

    def _ask_told(self, actor: Any, answer: "Future[StepsTaken]") -> None:  # noqa: ANN401 -- as above
        """Ask a constructor, unless another has taken its place."""
        if self._actor != actor:
            answer.cancel()
            return
        asked = actor.told.remote(self._heard_from(actor))
        asked.future().add_done_callback(partial(self._settle_told, actor, answer))

    def _heard_from(self, actor: Any) -> int:  # noqa: ANN401 -- as above
        of, number = self._heard
        return number if of == actor else 0

    def _settle_told(
        self,
        actor: Any,  # noqa: ANN401 -- as above
        answer: "Future[StepsTaken]",
        done: "Future[Any]",
    ) -> None:
        """Pass on what a constructor that was asked has answered; where it is lost, ask again a little later."""
        error = done.exception()
        if error is not None and is_lost(error):
            _later(lambda: self._ask_told(actor, answer))
            return
        # Another one may have its place by now, which counts anew and is asked itself.
        if error is None and self._actor == actor:
            self._heard = actor, done.result()[0]
        with self._asking:
            if self._asked == actor:
                self._asked = None
        if error is None:
            answer.set_result(done.result()[1])
        else:
            answer.set_exception(plain_error(error, "a data constructor"))

    @override
    def release(self, command: ReleaseSteps) -> None:
        log_failure(self._actor.release.remote(command), "a data constructor", "release steps")

    @override
    def end(self, step: int) -> None:
        log_failure(self._actor.end.remote(step), "a data constructor", "end the data")

    @override
    def fail(self, error: OmniloadError) -> None:
        log_failure(self._actor.fail.remote(error), "a data constructor", "pass on the failure")


def _later(ask: Callable[[], None]) -> None:
    again = threading.Timer(_ASK_AGAIN_S, ask)
    # A process that ends waits for no timer.
    again.daemon = True
    again.start()


class LoaderHolders:
    """The source loaders as one constructor knows them. Safe to call from several threads."""

    def __init__(self, loaders: Loaders) -> None:
        self._changed = threading.Condition()
        self._actors = dict(loaders.of)
        self._names = dict(loaders.names)
        self._turns = dict.fromkeys(loaders.of, loaders.turn)
        self._limit_s = loaders.limit_s

    def names(self) -> tuple[str, ...]:
        """Return the names of the loaders that serve at present."""
        with self._changed:
            return tuple(sorted({self._names[actor] for actor in self._actors.values()}))

    def turns(self, sources: Sequence[int]) -> tuple[int, ...]:
        """Return the number of the last hand-over known of each source: loaders from before it are not asked."""
        with self._changed:
            return tuple(self._turns.get(source, -1) for source in sources)

    def replace(self, serving: Serving) -> None:
        """Ask another loader for its sources, also for what was asked of the one before it."""
        with self._changed:
            # Names stay: an error of a loader that was asked before it was replaced still names it.
            self._names[serving.actor] = serving.name
            for source in serving.sources:
                if serving.turn > self._turns.get(source, -1):  # calls may overtake each other
                    self._actors[source], self._turns[source] = serving.actor, serving.turn
            self._changed.notify_all()

    def fetch(self, requests: Sequence[SliceRequest]) -> ColumnRanges:
        """Get the slices of steps: one call per loader, however many samples or sources.

        A loader that is lost, or replaced while it does not answer, is followed: the next one is asked
        for the same, and what the first may still say is not heard.

        Raises:
            UnavailableError: No answer came within the limit.
            OmniloadError: What a loader raised.
        """
        until_s = time.monotonic() + self._limit_s
        slices: dict[int, SampleColumns] = {}
        missing = list(range(len(requests)))
        while missing:
            for asked in self._ask(requests, missing):
                slices |= zip(asked.places, self._answer_to(asked, until_s) or (), strict=False)
            # What was answered stays: of a window that many loaders share, one that is lost costs its part.
            missing = [place for place in missing if place not in slices]
        return ColumnRanges.of([slices[place] for place in range(len(requests))])

    def _ask(self, requests: Sequence[SliceRequest], places: Sequence[int]) -> "list[_Asked]":
        """Ask each loader for its part."""
        of: dict[Any, list[int]] = {}
        with self._changed:
            for place in places:
                of.setdefault(self._actors[requests[place].source], []).append(place)
        return [
            _Asked(
                actor=actor,
                sources={requests[place].source for place in at},
                places=at,
                answer=actor.slices.remote([requests[place] for place in at]),
            )
            for actor, at in of.items()
        ]

    def _answer_to(self, asked: "_Asked", until_s: float) -> list[SampleColumns] | None:
        """Return an answer; ``None`` when another loader is to be asked instead."""
        while not ray.wait([asked.answer], timeout=_TURN_S)[0]:
            if self._is_replaced(asked):
                return None
            if time.monotonic() > until_s:
                raise UnavailableError(
                    f"{self._names[asked.actor]} gave no answer within {self._limit_s:.0f} s, and no other loader took "
                    "its place; end the job and start again from the last checkpoint"
                )
        try:
            answer: list[SampleColumns] = ray.get(asked.answer)
        except RayError as error:
            if self._is_replaced(asked):
                return None  # whatever ails it: another loader serves what it was asked for
            name = self._names[asked.actor]
            if not is_lost(error) or time.monotonic() > until_s:
                raise plain_error(error, name) from None
            with self._changed:
                self._changed.wait_for(lambda: self._is_replaced(asked), _ASK_AGAIN_S)
            return None
        return answer

    def _is_replaced(self, asked: "_Asked") -> bool:
        # One source that is served elsewhere is enough: for that one no answer may ever come.
        return any(self._actors[source] != asked.actor for source in asked.sources)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Asked:
    """A call under way."""

    actor: Any
    sources: set[int]
    """What it was asked for."""
    places: list[int]
    """Places of the requests among all."""
    answer: Any

"""Ways between the roles as Ray actors: the planner's to loaders and constructors, and a rank's to the planner.

Each leads to the member that holds the role, and is led to the one that takes its place.
"""

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from typing import Any

from typing_extensions import override

from omniload.actors.gate import Gate
from omniload.actors.ray.answers import (
    future_of,
    is_lost,
    log_failure,
    plain_error,
    value_of,
    wait_for_ref,
)
from omniload.actors.ray.environment import RayError
from omniload.actors.ray.finding import Search
from omniload.actors.ray.holders import Loaders, Serving
from omniload.actors.ray.layout import PLANNER
from omniload.actors.roles.links import ConstructorLink, LoaderLink
from omniload.base.errors import OmniloadError, UnavailableError
from omniload.base.log import get_logger
from omniload.base.state import JsonObject
from omniload.machine.messages import (
    ReadAhead,
    ReleaseSamples,
    ReleaseSteps,
    ResizeAsked,
    SamplesReported,
    TakeOver,
)
from omniload.machine.progress import Progress
from omniload.plan.records import StepPlan
from omniload.plan.world import RanksServed, World

__all__ = ["PlannerLink", "RayConstructorLink", "RayLoaderLink", "RayLoaderLinks"]

_ASK_AGAIN_S = 1.0
"""A lost call is asked again so much later: its actor may have been cut off for a moment only."""
_CHECK_S = 0.5
"""A rank that waits looks so often whether the planner lives."""
_WATCH_S = 1.0
_MOST_WATCHES = 500
"""A second, by all ranks together."""
_LOOK_S = 0.1
_ANSWER_S = 60.0
_LOG = get_logger(__name__)


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
            # The same loader still has the source: it was only cut off, or its end has not come through yet.
            elif self._actor == actor:
                again = threading.Timer(
                    _ASK_AGAIN_S, lambda: self._ask_same(actor, command, answer)
                )
                # A process that ends waits for no timer.
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
                # Nobody fails of it: the roster replaces it, and the planner tells the next one all of that again.
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


class PlannerLink:
    """Tells the planner, from any thread, what a rank has taken, and the next one again: the lost one noted none."""

    def __init__(self, dp_rank: int, cp_rank: int, check: Callable[[], None]) -> None:
        """Reach the planner, or the next one where it is lost; ``check`` raises once the plane is left or gone.

        Raises:
            UnavailableError: There is none for a minute, or it does not answer.
        """
        self._rank, self._node, self._check_plane = (dp_rank, cp_rank, 0), "", check
        self._actor: Any = None
        self._taken: tuple[int, tuple[int, int, int]] | None = None  # the last one, and as whom
        self._to_tell = threading.Event()
        self._lost = True  # until it is found: a rank may come while one takes the place of another
        self._checked: Any = None
        self._search = Search(PLANNER)
        self._next_look_s = 0.0
        self._looking = threading.Lock()
        self.first_step: int = self._answer(
            lambda planner: planner.first_step.remote(), "the first step of the data"
        )

    def taken(self, step: int) -> None:
        """Have the thread that watches tell that the trainer has the batch of ``step``."""
        # A call to Ray takes a rank that has trained half a millisecond. ``_follow`` tells a planner that comes anew.
        self._taken = step, self._rank
        self._to_tell.set()

    def tell(self) -> None:
        """Tell at once what the thread that watches is still to tell."""
        if self._to_tell.is_set():
            self._to_tell.clear()
            if (taken := self._taken) is not None:
                self._tell(*taken)

    def _tell(self, step: int, rank: tuple[int, int, int]) -> None:
        actor = self._actor

        def heard(done: "Future[Any]") -> None:
            if not done.cancelled() and (error := done.exception()) is not None:
                _LOG.info("the planner did not hear that step %d was taken: %s", step, error)
                self._lost |= actor is self._actor

        future_of(actor.taken.remote(step, *rank), PLANNER).add_done_callback(heard)

    def look(self) -> None:
        """See whether the planner lives, and follow to the next one; called often by whoever waits.

        A planner that is stopped gives no answer, so none is waited for.

        Raises:
            OmniloadError: The plane is closed, or the planner has failed: it would never let the step be built.
        """
        self._check_plane()
        with self._looking:
            self._look(time.monotonic())
            if not self._lost:
                self.tell()  # whoever waits relies on no other thread

    def watch(
        self,
        gate: Gate,
        left: threading.Event,
        ranks: int,
        beat: Callable[[], Progress] | None = None,
    ) -> None:
        """Look now and then, in a thread of its own: others may wait for a rank that trains and asks for nothing.

        Args:
            gate: Is closed before Ray is left.
            left: Set once the rank is given back, before ``end_watch``.
            ranks: Ranks of the plane.
            beat: Returns the heartbeat of a rank that the host of the plane does not see by itself.
        """
        every_s = max(_WATCH_S, ranks / _MOST_WATCHES)

        def look() -> None:
            next_s = time.monotonic() + every_s
            while not left.is_set():
                self._to_tell.wait(max(0.0, next_s - time.monotonic()))
                # Whoever waits is told what ails the planner, or the plane.
                with suppress(OmniloadError, RayError), gate.inside():
                    self.tell()
                    if (now_s := time.monotonic()) >= next_s:
                        next_s = now_s + every_s
                        self.look()
                        if beat is not None:
                            self._actor.beat.remote(now_s, beat().to_json())

        threading.Thread(target=look, name="omniload-planner-watch", daemon=True).start()

    def end_watch(self) -> None:
        """Wake the thread that watches: the rank is given back."""
        self._to_tell.set()

    def _look(self, now_s: float) -> None:
        if self._lost:
            if now_s >= self._next_look_s:
                self._next_look_s = now_s + _LOOK_S
                self._follow()
        elif self._checked is None:
            if now_s >= self._next_look_s:
                # Twice a second and not always: hundreds of ranks ask one process.
                self._next_look_s = now_s + _CHECK_S
                self._checked = self._actor.check.remote()
        elif wait_for_ref(self._checked, 0.0, lambda: None):
            asked, self._checked = self._checked, None
            try:
                value_of(asked)
            except RayError as error:
                if not is_lost(error):
                    raise plain_error(error, PLANNER) from None
                self._lost = True

    def state_at(self, step: int) -> JsonObject:
        """Return the state before ``step``.

        Raises:
            OmniloadError: The planner does not have it, or none answered within a minute.
        """
        what = f"the state before step {step}"
        state: JsonObject = self._answer(lambda planner: planner.state_at.remote(step), what)
        return state

    def resize(self, asked: ResizeAsked) -> World:
        """Have other ranks, of which this is one only from ``become`` on.

        A planner that is lost meanwhile has noted them, or the one after it is asked again.

        Raises:
            OmniloadError: They are refused, or no planner answered within a minute.
        """
        what = f"dp {asked.dp} from step {asked.step} on"
        world: World = self._answer(lambda planner: planner.resize.remote(asked), what)
        return world

    def claim(self, name: str, guest: str) -> None:
        """Take a rank for ``guest``, this process, on the host of the plane; again does nothing.

        Raises:
            OmniloadError: Another process has it, or no planner answered within a minute.
        """
        self._answer(lambda planner: planner.claim.remote(name, guest), f"the place of {name}")

    def forget(self, name: str) -> None:
        """Have a heartbeat off the board that this rank has told under another name."""
        self._actor.forget.remote(name)

    def become(self, dp_rank: int, generation: int, node: str) -> None:
        """Speak as a rank of a world that there is, which has taken nothing yet; ``node`` may have its constructor."""
        self._rank, self._taken, self._node = (dp_rank, self._rank[1], generation), None, node
        self._tell_node()

    def _tell_node(self) -> None:
        if self._node:
            self._actor.stands_on.remote(self._rank[0], self._rank[2], self._node)

    def _answer(self, ask: Callable[[Any], Any], what: str) -> Any:  # noqa: ANN401 -- as the planner's method
        """Ask the planner, and the one after it where it is lost."""
        until_s = time.monotonic() + _ANSWER_S
        while (left_s := until_s - time.monotonic()) > 0:
            if self._lost:
                self.look()
            if self._lost:
                time.sleep(_LOOK_S)
                continue
            answer = ask(self._actor)
            if not wait_for_ref(answer, left_s, self._check_plane):
                break
            try:
                return value_of(answer)
            except RayError as error:
                if not is_lost(error):
                    raise plain_error(error, PLANNER) from None
                self._lost = True
        raise UnavailableError(
            f"no planner gave {what} within {_ANSWER_S:.0f} s; "
            "end the job and start again from the last checkpoint"
        )

    def _follow(self) -> None:
        """Lead to the planner that was started last, once Ray's head has told which; tell it what the rank has."""
        # It answers in milliseconds, or is out of reach: whoever waits has to look whether the opener is there still.
        # An answer that is taken up by the next look would tell of a planner that was lost before it.
        wait((self._search.ask(),), _LOOK_S)
        if (found := self._search.found()) is None:
            return
        _, self._actor = found
        self._lost, self._checked = False, None
        self._tell_node()
        self._to_tell.set()
        self.tell()

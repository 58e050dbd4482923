"""A rank's link to the planner, and to the one that takes its place."""

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from typing import Any

from omniload.actors.gate import Gate
from omniload.actors.ray.answers import (
    actor_named,
    answer_to,
    future_of,
    is_lost,
    newest_of,
    plain_error,
    there,
)
from omniload.actors.ray.crew import PLANNER
from omniload.actors.ray.environment import RayError, ray
from omniload.base.errors import OmniloadError, UnavailableError
from omniload.base.log import get_logger
from omniload.base.state import JsonObject
from omniload.machine.messages import ResizeAsked
from omniload.plan.world import World

__all__ = ["PlannerLink"]

_LOG = get_logger(__name__)
_CHECK_S = 0.5
"""A rank that waits looks so often whether the planner lives."""
_WATCH_S = 1.0
_MOST_WATCHES = 500
"""A second, by all ranks together."""
_LOOK_S = 0.1
_ANSWER_S = 60.0


class PlannerLink:
    """Tells the planner what one rank has taken, and tells the next one again: the lost one wrote it nowhere.

    Safe to call from several threads.
    """

    def __init__(self, dp_rank: int, cp_rank: int, check: Callable[[], None]) -> None:
        """Reach the planner that there is; ``check`` raises once the plane is left or gone.

        Raises:
            UnavailableError: There is none, or it does not answer.
        """
        self._rank, self._check_plane = (dp_rank, cp_rank, 0), check
        self._actor: Any = actor_named(newest_of(PLANNER) or PLANNER)
        self._taken: int | None = None
        self._lost = False
        self._asked: Any = None
        self._look_at_s = 0.0
        self._looking = threading.Lock()
        self.first_step: int = answer_to(self._actor.first_step.remote(), PLANNER)

    def taken(self, step: int) -> None:
        """Tell that the trainer has the batch of ``step``."""
        self._taken = step
        self._tell(step)

    def _tell(self, step: int) -> None:
        actor = self._actor

        def heard(done: "Future[Any]") -> None:
            if not done.cancelled() and (error := done.exception()) is not None:
                _LOG.info("the planner did not hear that step %d was taken: %s", step, error)
                self._lost |= actor is self._actor

        future_of(actor.taken.remote(step, *self._rank), PLANNER).add_done_callback(heard)

    def look(self) -> None:
        """See whether the planner lives, and follow to the next one; called often by whoever waits.

        A planner that is stopped gives no answer, so none is waited for.

        Raises:
            OmniloadError: The plane is closed, or the planner has failed: it would never let the step be built.
        """
        self._check_plane()
        with self._looking:
            self._look(time.monotonic())

    def watch(self, gate: Gate, left: threading.Event, ranks: int) -> None:
        """Look now and then, in a thread of its own: others may wait for a rank that trains and asks for nothing.

        Args:
            gate: Is closed before Ray is left.
            left: Set once the rank is given back.
            ranks: Ranks of the plane.
        """
        every_s = max(_WATCH_S, ranks / _MOST_WATCHES)

        def look() -> None:
            while not left.wait(every_s):
                # Whoever waits is told what ails the planner, or the plane.
                with suppress(OmniloadError, RayError), gate.inside():
                    self.look()

        threading.Thread(target=look, name="omniload-planner-watch", daemon=True).start()

    def _look(self, now_s: float) -> None:
        if self._lost:
            if now_s >= self._look_at_s:
                self._look_at_s = now_s + _LOOK_S
                self._follow()
        elif self._asked is None:
            if now_s >= self._look_at_s:
                self._look_at_s = now_s + _CHECK_S
                self._asked = self._actor.check.remote()
        elif ray.wait([self._asked], timeout=0)[0]:
            asked, self._asked = self._asked, None
            try:
                ray.get(asked)
            except RayError as error:
                if not is_lost(error):
                    raise plain_error(error, PLANNER) from None
                self._lost = True

    def state_at(self, step: int) -> JsonObject:
        """Return the state before ``step``.

        Raises:
            OmniloadError: The planner does not have it, or none answered within a minute.
        """
        state: JsonObject = self._answer(
            lambda planner: planner.state_at.remote(step), f"the state before step {step}"
        )
        return state

    def resize(self, asked: ResizeAsked) -> World:
        """Have other ranks, of which this is one only from ``be`` on.

        A planner that is lost meanwhile has noted them, or the one after it is asked again.

        Raises:
            OmniloadError: They are refused, or no planner answered within a minute.
        """
        what = f"dp {asked.dp} from step {asked.step} on"
        world: World = self._answer(lambda planner: planner.resize.remote(asked), what)
        return world

    def be(self, dp_rank: int, generation: int) -> None:
        """Be a rank of a world that there is, which has taken nothing yet."""
        self._rank, self._taken = (dp_rank, self._rank[1], generation), None

    def _answer(self, ask: Callable[[Any], Any], what: str) -> Any:  # noqa: ANN401 -- as the planner's method
        """Ask the planner, and the one after it where it is lost."""
        until_s = time.monotonic() + _ANSWER_S
        while (left_s := until_s - time.monotonic()) > 0:
            answer = ask(self._actor)
            if not there(answer, left_s, self._check_plane):
                break
            try:
                found = ray.get(answer)
            except RayError as error:
                if not is_lost(error):
                    raise plain_error(error, PLANNER) from None
                self._lost = True
                while self._lost and time.monotonic() < until_s:
                    self.look()
                    time.sleep(_LOOK_S)
            else:
                return found
        raise UnavailableError(
            f"no planner gave {what} within {_ANSWER_S:.0f} s; "
            "end the job and start again from the last checkpoint"
        )

    def _follow(self) -> None:
        """Lead to the planner that was started last; tell it what the rank has."""
        name = newest_of(PLANNER)
        if name is None:
            return
        try:
            self._actor = actor_named(name)
        except UnavailableError:
            return  # it has just ended
        self._lost, self._asked = False, None
        if (taken := self._taken) is not None:
            self._tell(taken)  # not noted again: the trainer may have taken a later step by now

"""A rank's link to the planner: reports its steps through the rank's constructor, and finds the next planner."""

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from contextlib import suppress
from typing import Any

from omniload.actors.gate import Gate
from omniload.actors.ray.answers import future_of, plain_error, value_of, wait_for_ref
from omniload.actors.ray.environment import RayError
from omniload.actors.ray.errors.verdict import is_lost
from omniload.actors.ray.finding import Search
from omniload.actors.ray.layout import PLANNER
from omniload.base.errors import OmniloadError, UnavailableError
from omniload.base.log import get_logger
from omniload.base.state import JsonObject
from omniload.machine.messages import ResizeAsked
from omniload.machine.progress import Progress
from omniload.plan.world import World, WorldRank

__all__ = ["PlannerLink"]

_CHECK_S = 0.5
"""Interval at which a waiting rank checks that the planner lives."""
_WATCH_S = 1.0
"""The same interval for a rank that trains; longer if there are hundreds of ranks."""
_MOST_WATCHES = 500
"""Checks per second of all ranks together."""
_LOOK_S = 0.1
"""Interval of looking for the successor of a lost planner."""
_ANSWER_S = 60.0
"""Longest wait for an answer of the planner, or of its successor."""
_LOG = get_logger(__name__)


class PlannerLink:
    """One rank's view of the planner: it reports the rank's steps, from any thread, and follows a lost planner.

    The rank's constructor passes on the reports of all its ranks in one message, so that thousands of ranks cause only
    hundreds of messages. If a constructor is lost, the rank repeats its last report to the planner directly, because
    the constructor may not have passed it on. A planner that takes over hears it too, as it knows no rank's progress.
    """

    def __init__(
        self, namespace: str, dp_rank: int, cp_rank: int, check: Callable[[], None]
    ) -> None:
        """Reach the planner, or the successor of a lost one; ``check`` raises once the plane is left or gone.

        Raises:
            UnavailableError: There is no planner for a minute, or it does not answer.
        """
        self._rank, self._node, self._check_plane = WorldRank(dp_rank, cp_rank, 0), "", check
        self._actor: Any = None
        self._taken: tuple[int, WorldRank] | None = None  # the last one, and as whom
        self._to_tell = threading.Event()
        self._constructor: Any = None
        """The constructor that passes reports on; without one, the planner is told directly."""
        self._refused: tuple[int, WorldRank] | None = None
        """A report that the constructor refused: a replacement hears of its ranks only with its first build."""
        self._lost = True  # until it is found: a rank may come while one takes the place of another
        self._checked: Any = None
        self._search = Search(PLANNER, namespace)
        self._next_look_s = 0.0
        self._looking = threading.Lock()
        self.first_step: int = self._answer(
            lambda planner: planner.first_step.remote(), "the first step of the data"
        )

    def taken(self, step: int) -> None:
        """Let the watching thread report that the trainer has the batch of ``step``."""
        # A call to Ray would take half a millisecond here. ``_follow`` repeats the report to a new planner.
        self._taken = step, self._rank
        self._to_tell.set()

    def tell_by(self, constructor: Any) -> None:  # noqa: ANN401 -- Ray's handle has no static type
        """Report by way of a constructor from now on, beginning with the rank's present step."""
        self._constructor, self._refused = constructor, None
        self._to_tell.set()

    def tell_past(self, constructor: Any) -> None:  # noqa: ANN401 -- as above
        """Report to the planner directly from now on, because the constructor is lost; repeat the last report."""
        if self._constructor is constructor:
            self._constructor = None
        self._to_tell.set()

    def tell(self) -> None:
        """Send the report that the watching thread has not sent yet."""
        if self._to_tell.is_set():
            self._to_tell.clear()
            if (taken := self._taken) is not None:
                if taken == self._refused:
                    self._tell_planner(*taken)
                else:
                    self._tell(*taken)

    def look(self) -> None:
        """Check that the planner lives, and follow to its successor; a waiting rank calls this often.

        It does not wait for an answer, because a stopped planner gives none.

        Raises:
            OmniloadError: The plane is closed, or the planner has failed, so that the step will never be built.
        """
        self._check_plane()
        with self._looking:
            self._look(time.monotonic())
            if not self._lost:
                self.tell()  # a waiting rank does not rely on other threads

    def watch(
        self,
        gate: Gate,
        left: threading.Event,
        ranks: int,
        beat: Callable[[], Progress] | None = None,
    ) -> None:
        """Check regularly in a thread of its own, because others may wait for a rank that trains and calls nothing.

        Args:
            gate: Closed before Ray is left.
            left: Set once the rank is given back, before ``end_watch``.
            ranks: Ranks of the plane.
            beat: Returns the heartbeat of a rank that the plane's host cannot see by itself.
        """
        every_s = max(_WATCH_S, ranks / _MOST_WATCHES)

        def look() -> None:
            next_s = time.monotonic() + every_s
            while not left.is_set():
                self._to_tell.wait(max(0.0, next_s - time.monotonic()))
                # A waiting rank reports what is wrong with the planner or the plane.
                with suppress(OmniloadError, RayError), gate.inside():
                    self.tell()
                    if (now_s := time.monotonic()) >= next_s:
                        next_s = now_s + every_s
                        self.look()
                        if beat is not None:
                            self._actor.beat.remote(now_s, beat().to_json())

        threading.Thread(target=look, name="omniload-planner-watch", daemon=True).start()

    def end_watch(self) -> None:
        """Wake the watching thread, because the rank is given back."""
        self._to_tell.set()

    def state_at(self, step: int) -> JsonObject:
        """Return the state before ``step``.

        Raises:
            OmniloadError: The planner does not have it, or none answered within a minute.
        """
        what = f"the state before step {step}"
        state: JsonObject = self._answer(lambda planner: planner.state_at.remote(step), what)
        return state

    def resize(self, asked: ResizeAsked) -> World:
        """Request other ranks; this rank is one of them only after ``become``.

        A planner that is lost meanwhile has recorded them, or its successor is asked again.

        Raises:
            OmniloadError: They are refused, or no planner answered within a minute.
        """
        what = f"dp {asked.dp} from step {asked.step} on"
        world: World = self._answer(lambda planner: planner.resize.remote(asked), what)
        return world

    def claim(self, name: str, guest: str) -> None:
        """Claim a rank for ``guest``, this process, on the plane's host; a repeated claim does nothing.

        Raises:
            OmniloadError: Another process has it, or no planner answered within a minute.
        """
        self._answer(lambda planner: planner.claim.remote(name, guest), f"the place of {name}")

    def forget(self, name: str) -> None:
        """Remove the heartbeat that this rank posted under another name."""
        self._actor.forget.remote(name)

    def become(self, dp_rank: int, generation: int, node: str) -> None:
        """Report as a rank of an existing world, which has taken nothing yet; its constructor may move to ``node``."""
        self._rank = self._rank._replace(dp=dp_rank, generation=generation)
        self._taken, self._node = None, node
        self._tell_node()

    def _tell(self, step: int, rank: WorldRank) -> None:
        if (constructor := self._constructor) is None:
            self._tell_planner(step, rank)
            return

        def passed_on(done: "Future[Any]") -> None:
            if done.cancelled():
                return
            if (error := done.exception()) is not None:
                _LOG.info("step %d is told past a data constructor: %s", step, error)
                self.tell_past(constructor)  # by the watching thread
            elif not done.result() and self._constructor is constructor:
                self._refused = step, rank  # only this report: the constructor accepts later ones
                self._to_tell.set()

        told = constructor.taken.remote(step, rank)
        future_of(told, "a data constructor").add_done_callback(passed_on)

    def _tell_planner(self, step: int, rank: WorldRank) -> None:
        actor = self._actor

        def heard(done: "Future[Any]") -> None:
            if not done.cancelled() and (error := done.exception()) is not None:
                _LOG.info("the planner was not notified that step %d was taken: %s", step, error)
                self._lost |= actor is self._actor

        future_of(actor.taken.remote(step, rank), PLANNER).add_done_callback(heard)

    def _tell_node(self) -> None:
        if self._node:
            self._actor.stands_on.remote(self._rank.dp, self._rank.generation, self._node)

    def _look(self, now_s: float) -> None:
        if self._lost:
            if now_s >= self._next_look_s:
                self._next_look_s = now_s + _LOOK_S
                self._follow()
        elif self._checked is None:
            if now_s >= self._next_look_s:
                # Only twice a second, because hundreds of ranks ask one process.
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

    def _follow(self) -> None:
        """Use the newest planner once Ray's head has named it; report the rank's step to it."""
        # The head answers in milliseconds or is unreachable, and a waiting rank also has to check the opener.
        # An answer that the next call used could name a planner that was lost meanwhile.
        wait((self._search.ask(),), _LOOK_S)
        if (found := self._search.found()) is None:
            return
        _, self._actor = found
        self._lost, self._checked = False, None
        self._tell_node()
        if self._constructor is None:
            self._to_tell.set()
            self.tell()
        elif (taken := self._taken) is not None:
            # Not only through the constructor, which may be lost as well.
            self._tell_planner(*taken)

    def _answer(self, ask: Callable[[Any], Any], what: str) -> Any:  # noqa: ANN401 -- as the planner's method
        """Ask the planner, or its successor if it is lost."""
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

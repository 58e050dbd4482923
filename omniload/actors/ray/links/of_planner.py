"""The planner's links to source loaders and data constructors, as Ray actors.

Each link points to the member that holds the role, and is pointed to its replacement.
"""

import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from itertools import islice, takewhile
from typing import Any, TypeAlias

from typing_extensions import override

from omniload.actors.ray.answers import future_of, log_failure, plain_error
from omniload.actors.ray.errors.verdict import is_lost, may_live
from omniload.actors.ray.links.of_constructor import Loaders, Serving
from omniload.actors.roles.build_order import BuildOrder
from omniload.actors.roles.links import ConstructorLink, LoaderLink
from omniload.base.errors import OmniloadError
from omniload.machine.loader_groups import MOST_READS
from omniload.machine.messages import (
    ReadAhead,
    ReleaseSamples,
    ReleaseSteps,
    SamplesReported,
    StepsTaken,
    TakeOver,
)
from omniload.plan.records import StepPlan
from omniload.plan.world import RanksServed

__all__ = ["READS", "RayConstructorLink", "RayLoaderLink", "RayLoaderLinks"]

READS = "reads"
"""Concurrency group of a loader's reading threads, so that reads which wait do not delay other answers."""
_READS_OF_CALL = 16
"""Most reads in one call, used if more reads wait than a loader carries out at once. A Ray call takes a millisecond or
more of a core on both sides; for 1,000 sources, single calls would take as long as the reading."""
_ASK_AGAIN_S = 1.0
"""Time after which a lost call is repeated, unless the holder was replaced; an actor may be cut off for a moment."""


_Read: TypeAlias = "tuple[ReadAhead, Future[SamplesReported]]"
"""A read command, and its future answer."""


@dataclass(slots=True)
class _Reads:
    """Reads that one life of a loader is asked for."""

    actor: Any
    waiting: "deque[_Read]" = field(default_factory=deque)
    under_way: int = 0
    """Unanswered calls."""

    def next_call(self) -> "list[_Read]":
        """Take the reads of the next call: several if more wait than are carried out at once.

        Several reads are put together only if the planner cannot plan without any of them, because it waits for the
        slowest of these in any case.
        """
        if self.under_way >= MOST_READS or not self.waiting:
            return []
        count = min(-(-len(self.waiting) // MOST_READS), _READS_OF_CALL)
        lacked = sum(1 for _ in takewhile(_is_lacked, islice(self.waiting, count)))
        self.under_way += 1
        return [self.waiting.popleft() for _ in range(max(1, lacked))]


def _is_lacked(read: _Read) -> bool:
    return read[0].is_lacked


class RayLoaderLink(LoaderLink):
    """A link to a source loader, and to its replacement."""

    def __init__(
        self,
        actor: Any,  # noqa: ANN401 -- Ray's handle has no static type
        name: str,
        turn: int,
        serves: "Callable[[RayLoaderLink, int], bool]",
    ) -> None:
        """Link to an actor; ``serves`` returns whether this link is still the one of a source."""
        self.name, self._turn, self._serves = name, turn, serves
        self._asking = threading.Lock()  # the planner asks, and Ray's threads receive the answers
        self._reads = _Reads(actor)

    def lead_to(self, serving: Serving) -> None:
        """Link to a later life of the loader; the planner repeats the requests to the previous one."""
        if serving.turn > self._turn:  # calls may overtake each other
            self.name, self._turn = serving.name, serving.turn
            before = self._reads
            # If sources are only moved to the same loader, its requests stay.
            if serving.actor != before.actor:
                self._reads = _Reads(serving.actor)
                self._go_on(before)

    @override
    def read_ahead(self, command: ReadAhead) -> "Future[SamplesReported]":
        self._ask(self._reads, [(command, answer := Future[SamplesReported]())])
        return answer

    def _ask(self, asked: _Reads, reads: "Sequence[_Read]") -> None:
        """Let a loader read, as soon as few enough other calls are under way."""
        with self._asking:
            asked.waiting.extend(reads)
        self._go_on(asked)

    def _go_on(self, asked: _Reads) -> None:
        """Send waiting reads; cancel those that another loader serves by now."""
        if self._reads is not asked:
            with self._asking:
                gone = [*asked.waiting]
                asked.waiting.clear()
            for _, answer in gone:
                answer.cancel()
        while reads := self._next_call(asked):
            commands = [command for command, _ in reads]
            shell, (first, *others) = asked.actor, commands
            # A single read has its own call, so that a loader with few sources answers each as soon as it is read.
            call, told = (shell.read_several, commands) if others else (shell.read_ahead, first)
            answer = call.options(concurrency_group=READS).remote(told).future()
            answer.add_done_callback(partial(self._settle, asked, reads, is_one=not others))

    def _next_call(self, asked: _Reads) -> "list[_Read]":
        """Return the reads of the next call, and cancel those that another loader serves by now."""
        while True:
            with self._asking:
                reads = asked.next_call()
            left = [read for read in reads if self._serves(self, read[0].source)]
            for _, answer in (read for read in reads if read not in left):
                answer.cancel()
            if left or not reads:
                return left
            with self._asking:
                asked.under_way -= 1

    def _settle(
        self, asked: _Reads, reads: "list[_Read]", done: "Future[Any]", *, is_one: bool
    ) -> None:
        """Pass on the answer of a loader; if the call is lost, repeat it a little later."""
        error, left = done.exception(), list[_Read]()
        if error is None:
            found = [done.result()] if is_one else done.result()
            for read, outcome in zip(reads, found, strict=False):
                self._pass_on(read, outcome)
            left = reads[len(found) :]
        elif is_lost(error) and self._reads is asked:
            # The same loader still has the source: it was only cut off, or its end was not noticed yet.
            _later(lambda: self._ask(asked, reads))
        else:
            # The loss is not reported, because the replacement was asked already.
            for _, answer in reads if is_lost(error) else ():
                answer.cancel()
            for read in () if is_lost(error) else reads:
                self._pass_on(read, plain_error(error, self.name))
        with self._asking:
            asked.under_way -= 1
            asked.waiting.extendleft(reversed(left))
        self._go_on(asked)

    def _pass_on(self, read: _Read, outcome: SamplesReported | OmniloadError) -> None:
        command, answer = read
        if not isinstance(outcome, OmniloadError):
            answer.set_result(outcome)
        elif self._serves(self, command.source):
            answer.set_exception(outcome)
        else:
            answer.cancel()  # the next loader was asked for it

    @override
    def take_over(self, command: TakeOver) -> "Future[None]":
        return future_of(self._reads.actor.take_over.remote(command), self.name)

    @override
    def release(self, command: ReleaseSamples) -> None:
        log_failure(self._reads.actor.release.remote(command), self.name, "release samples")


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
        """An actor, and the number of reports of its ranks that were heard from it."""
        self._asked: Any = None
        """The actor that has an open question for more reports."""
        self._asking = threading.Lock()  # the planner asks, and a thread of Ray's gets the answer

    def lead_to(self, actor: Any, life: int) -> None:  # noqa: ANN401 -- as above
        """Link to a later life of the constructor; the planner tells it again what to build."""
        if life > self._life:
            self._actor, self._life = actor, life

    @override
    def build(
        self, plans: Sequence[StepPlan], served: RanksServed, released_to: int
    ) -> "Future[int] | Future[StepsTaken]":
        with self._asking:
            actor = self._actor
            asks, self._asked = self._asked != actor, actor
        heard = self._heard_from(actor) if asks else None
        order = BuildOrder(plans=plans, served=served, released_to=released_to, heard=heard)
        self._carry_out(actor, order, answer := Future[Any]())
        return answer

    def _carry_out(self, actor: Any, order: BuildOrder, answer: "Future[Any]") -> None:  # noqa: ANN401 -- as above
        """Let a constructor build, unless it was replaced: then the planner tells the replacement everything again."""
        if self._actor != actor:
            answer.cancel()
            return

        def settle(done: "Future[Any]") -> None:
            error = done.exception()
            if error is not None and may_live(error):
                # It may not have received the call, and is not replaced; it does not build twice.
                _later(lambda: self._carry_out(actor, order, answer))
            elif order.heard is not None:
                self._settle_told(actor, order.served, answer, done)
            elif error is None:
                answer.set_result(done.result())
            elif is_lost(error):
                # Not an error: the roster replaces it, and the planner tells the replacement everything again.
                answer.cancel()
            else:
                answer.set_exception(plain_error(error, "a data constructor"))

        actor.carry_out.remote(order.packed()).future().add_done_callback(settle)

    @override
    def fence(self, edition: tuple[int, int]) -> "Future[int]":
        fenced: Future[int] = future_of(self._actor.fence.remote(edition), "a data constructor")
        return fenced

    @override
    def told(self, served: RanksServed) -> "Future[StepsTaken] | None":
        with self._asking:
            actor = self._actor
            if self._asked == actor:
                return None
            self._asked = actor
        answer = Future[StepsTaken]()
        self._ask_told(actor, served, answer)
        return answer

    def _ask_told(self, actor: Any, served: RanksServed, answer: "Future[StepsTaken]") -> None:  # noqa: ANN401 -- as above
        """Ask a constructor for reports, unless it was replaced."""
        if self._actor != actor:
            answer.cancel()
            return
        asked = actor.told.remote(self._heard_from(actor), served.number)
        asked.future().add_done_callback(partial(self._settle_told, actor, served, answer))

    def _heard_from(self, actor: Any) -> int:  # noqa: ANN401 -- as above
        of, number = self._heard
        return number if of == actor else 0

    def _settle_told(
        self,
        actor: Any,  # noqa: ANN401 -- as above
        served: RanksServed,
        answer: "Future[StepsTaken]",
        done: "Future[Any]",
    ) -> None:
        """Pass on the reports of a constructor; if the call is lost, repeat it a little later."""
        error = done.exception()
        if error is not None and is_lost(error):
            _later(lambda: self._ask_told(actor, served, answer))
            return
        # It may have been replaced by now; the replacement counts anew and is asked itself.
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
        self._tell(lambda actor: actor.end.remote(step), "end the data")

    @override
    def fail(self, error: OmniloadError) -> None:
        self._tell(lambda actor: actor.fail.remote(error), "pass on the failure")

    def _tell(self, call: Callable[[Any], Any], task: str) -> None:
        """Tell a constructor what is not told again with the next steps; once more where it may live and not know."""
        actor, told = self._actor, call(self._actor)
        log_failure(told, "a data constructor", task)

        def heard(done: "Future[Any]") -> None:
            error = None if done.cancelled() else done.exception()
            if error is not None and may_live(error):
                _later(lambda: self._tell(call, task) if self._actor == actor else None)

        told.future().add_done_callback(heard)


def _later(ask: Callable[[], None]) -> None:
    again = threading.Timer(_ASK_AGAIN_S, ask)
    # A process that ends waits for no timer.
    again.daemon = True
    again.start()

"""Ways from the planner's shell to the other roles; each runtime has its own."""

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol, TypeAlias, TypeVar, assert_never

from omniload.base.clock import Clock, SystemClock
from omniload.base.concurrency.threads import was_given_up
from omniload.base.errors import OmniloadError, project_error
from omniload.base.log import get_logger
from omniload.machine.messages import (
    EndOfData,
    PublishPlans,
    ReadAhead,
    ReleaseSamples,
    ReleaseSteps,
    Republish,
    SamplesReported,
    ServeWorld,
    StepsTaken,
    TakeOver,
)
from omniload.machine.plans.fences import AskFences, NewEdition
from omniload.machine.plans.unread import ReadFailed
from omniload.machine.scaling.leads import ReadTimes
from omniload.plan.records import StepPlan
from omniload.plan.world import RanksServed

__all__ = [
    "ConstructorLink",
    "ConstructorLinks",
    "Failed",
    "LoaderLink",
    "LoaderLinks",
    "outcome_of",
]

_LOG = get_logger(__name__)
ConstructorCommand: TypeAlias = (
    PublishPlans | ServeWorld | ReleaseSteps | EndOfData | NewEdition | AskFences
)
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Failed:
    """What ends the planning."""

    error: OmniloadError


def outcome_of(done: "Future[T]", role: str) -> "T | Failed | None":
    """Return what a role answered, or why it failed; ``None`` where another one is asked, or the plane is closing."""
    if done.cancelled() or was_given_up(done):
        return None
    if (error := done.exception()) is None:
        return done.result()
    failure = project_error(error, role)
    if failure is not error:
        _LOG.error("%s failed", role, exc_info=error)
    return Failed(failure)


class LoaderLink(Protocol):
    """A way to a source loader."""

    name: str
    """Its name as a role."""

    def read_ahead(self, command: ReadAhead) -> "Future[SamplesReported]":
        """Start reading; the future holds the report, and is cancelled where another loader is asked instead."""
        ...

    def take_over(self, command: TakeOver) -> "Future[None]":
        """Start to hold what a lost loader held; the future says when its samples may be asked for."""
        ...

    def release(self, command: ReleaseSamples) -> None:
        """Let go; no answer."""
        ...


class ConstructorLink(Protocol):
    """A way to a data constructor."""

    dp_ranks: Sequence[int]
    """Data-parallel ranks that it serves when the plane is opened."""

    def build(
        self, plans: Sequence[StepPlan], served: RanksServed, released_to: int
    ) -> "Future[int] | Future[StepsTaken]":
        """Start building consecutive steps for some ranks, and let go of those before ``released_to``.

        Without steps, let it know the ranks. A constructor that is not asked yet what its ranks tell it is asked in the
        same call.

        Returns:
            The answer to be: to that question, as of ``told``; where none was put, how many steps are built. It is
            cancelled where another constructor is told instead.
        """
        ...

    def told(self, served: RanksServed) -> "Future[StepsTaken] | None":
        """Ask what its ranks have told it, and have the answer once that is more than was answered before.

        Args:
            served: The ranks, and the edition of the plans, that whoever asks has come to: a failure to build for those
                before is not heard again.

        Returns:
            The answer to be, which is cancelled where another constructor is asked instead; ``None`` where it is asked
            already, or ranks tell the planner themselves.
        """
        ...

    def fence(self, edition: tuple[int, int]) -> "Future[int]":
        """Have it give out no step more until an edition of the plans has come.

        The future has the first step that it gave to no rank, and may never end where the constructor is lost.
        """
        ...

    def release(self, command: ReleaseSteps) -> None:
        """Let go; no answer."""
        ...

    def end(self, step: int) -> None:
        """There is no such step."""
        ...

    def fail(self, error: OmniloadError) -> None:
        """The data plane has failed."""
        ...


class LoaderLinks:
    """The ways to all source loaders: each command goes to the loaders of its sources."""

    def __init__(
        self,
        link_of: Callable[[int], LoaderLink],
        on_report: Callable[[SamplesReported | ReadFailed], None],
        clock: Clock | None = None,
    ) -> None:
        """Reach the loader of a source by ``link_of``; what comes of each read goes to ``on_report``."""
        self.of, self._on_report = link_of, on_report
        self._clock = clock or SystemClock()
        self._times = ReadTimes()
        self.taken_over: Future[None] = Future()
        """Ends as the take-over does that is told next."""

    def tell(self, command: ReadAhead | ReleaseSamples | TakeOver) -> None:
        """Pass a command on."""
        match command:
            case ReadAhead(source=source):
                report = self.of(source).read_ahead(command)
                report.add_done_callback(partial(self._hear, command, self._clock.now_s()))
            case TakeOver(ranges=ranges) if not ranges:
                self.taken_over.set_result(None)
            case TakeOver(ranges=ranges):
                told = self.of(next(iter(ranges))).take_over(command)
                told.add_done_callback(partial(_pass_on, self.taken_over))
            case ReleaseSamples(floors=floors, ahead=ahead):
                if ahead is not None:
                    self._times.reach(ahead.step, self._clock.now_s())
                # One message for each loader, not for each source: of those there are hundreds.
                for link in {id(link): link for link in map(self.of, floors)}.values():
                    link.release(command)

    def _hear(self, asked: ReadAhead, asked_s: float, report: "Future[SamplesReported]") -> None:
        took_steps = self._times.steps_of(asked.source, asked_s, self._clock.now_s())
        match outcome_of(report, "a source loader"):
            case SamplesReported() as found:
                self._on_report(replace(found, took_steps=took_steps))
            case Failed(error=error):
                source, start, without = asked.source, asked.start, asked.without
                self._on_report(
                    ReadFailed(source=source, start=start, without=without, error=error)
                )


class ConstructorLinks:
    """The ways to all data constructors: each is told of its ranks' part."""

    def __init__(
        self,
        links: Sequence[ConstructorLink],
        on_answer: "Callable[[int, Future[Any]], None]",
        on_fenced: "Callable[[int, int, Future[int]], None]",
    ) -> None:
        """Tell ``links``; what becomes of their building, and what ranks tell them, goes to ``on_answer``.

        Where they have their fences goes to ``on_fenced``, with the number of the constructor and of the question.
        """
        self._links, self._on_answer, self._on_fenced = links, on_answer, on_fenced
        self._served = [RanksServed(dp_ranks=tuple(link.dp_ranks)) for link in links]
        self._heard = set(range(len(links)))
        """Constructors whose ranks were heard since they were asked last."""

    def __len__(self) -> int:
        return len(self._links)

    def tell(self, command: ConstructorCommand) -> None:
        """Pass a command on."""
        match command:
            case PublishPlans(plans=plans, released_to=step):
                self._build_all((plans,), step)
            case ServeWorld(world=world, windows=windows):
                count = len(self._links)
                edition = self._served[0].edition
                self._served = [
                    replace(world.served_by(number, count), edition=edition)
                    for number in range(count)
                ]
                self._build_all(((), *windows))
            case NewEdition(edition=edition, windows=windows):
                self._served = [replace(served, edition=edition) for served in self._served]
                self._build_all(((), *windows))
            case AskFences(edition=edition):
                for number, link in enumerate(self._links):
                    fenced = link.fence(edition)
                    fenced.add_done_callback(partial(self._on_fenced, number, edition[1]))
            case ReleaseSteps():
                for link in self._links:
                    link.release(command)
            case EndOfData(step=step):
                for link in self._links:
                    link.end(step)
            case _:
                assert_never(command)

    def heard(self, number: int) -> None:
        """Note that the planner has heard a constructor's answer: it is asked again by ``listen``, or with plans."""
        self._heard.add(number)

    def listen(self, numbers: Iterable[int] | None = None) -> None:
        """Ask those of some constructors, or of all, what their ranks tell that were heard since they were asked."""
        # Not those that have answered what came with plans: the planner hears that next.
        for number in sorted(self._heard if numbers is None else self._heard.intersection(numbers)):
            self._ask(number)

    def _ask(self, number: int) -> None:
        self._heard.discard(number)
        served = self._served[number]
        if (told := self._links[number].told(served)) is not None:
            told.add_done_callback(partial(self._hear, number, served))

    def tell_again(self, command: Republish) -> None:
        """Have one constructor build what the one before it held, or was to build."""
        # Without steps too, for with them it hears whom it serves. What all ranks have it does not build again.
        dp_ranks = self._served[command.number].dp_ranks
        for window in ((), *command.windows):
            parts = [plan.part_of(dp_ranks) for plan in window]
            self._build(command.number, parts, command.released_to)
        if command.end is not None:
            self._links[command.number].end(command.end)

    def fail(self, error: OmniloadError) -> None:
        """Tell every constructor, also after one that cannot be told."""
        for link in self._links:
            try:
                link.fail(error)
            except Exception:  # noqa: BLE001 -- whatever ails one, the others wait
                _LOG.exception("the data constructor of ranks %s cannot be told", link.dp_ranks)

    def _build_all(self, windows: Sequence[Sequence[StepPlan]], released_to: int = 0) -> None:
        """Have every constructor build windows, its rows alone: whole plans would be most of what the planner sends."""
        ranks_of = [served.dp_ranks for served in self._served]
        parts = [[plan.parts_of(ranks_of) for plan in plans] for plans in windows]
        for number in range(len(self._links)):
            for window in parts:
                self._build(number, [of_plan[number] for of_plan in window], released_to)

    def _build(self, number: int, parts: Sequence[StepPlan], released_to: int) -> None:
        served = self._served[number]
        self._heard.discard(number)
        answer = self._links[number].build(parts, served, released_to)
        answer.add_done_callback(partial(self._hear, number, served))

    def _hear(self, number: int, served: RanksServed, done: "Future[Any]") -> None:
        """Pass an answer on, but for a failure to build for ranks, or plans, that are gone: samples may be as well."""
        is_of_before = served != self._served[number]
        if is_of_before and not done.cancelled() and done.exception() is not None:
            self._ask(number)  # it may have been the answer to what was asked
        else:
            self._on_answer(number, done)


def _pass_on(to: "Future[None]", done: "Future[None]") -> None:
    """Let one future end as another did."""
    if done.cancelled():
        to.cancel()
    elif (error := done.exception()) is not None:
        to.set_exception(error)
    else:
        to.set_result(None)

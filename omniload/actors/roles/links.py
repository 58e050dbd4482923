"""Links from the planner's shell to the other roles; each runtime implements them."""

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
from omniload.machine.scaling.leads import ReadPace
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
    """A failure that ends the planning."""

    error: OmniloadError


def outcome_of(done: "Future[T]", role: str) -> "T | Failed | None":
    """Return a role's answer or its failure; ``None`` if another member is asked instead, or the plane is closing."""
    if done.cancelled() or was_given_up(done):
        return None
    if (error := done.exception()) is None:
        return done.result()
    failure = project_error(error, role)
    if failure is not error:
        _LOG.error("%s failed", role, exc_info=error)
    return Failed(failure)


class LoaderLink(Protocol):
    """A link to a source loader."""

    name: str
    """Its name as a role."""

    def read_ahead(self, command: ReadAhead) -> "Future[SamplesReported]":
        """Start reading; the future gets the report, and is cancelled if another loader is asked instead."""
        ...

    def take_over(self, command: TakeOver) -> "Future[None]":
        """Start to take over from a lost loader; the future ends when its samples may be requested."""
        ...

    def release(self, command: ReleaseSamples) -> None:
        """Release samples; there is no answer."""
        ...


class ConstructorLink(Protocol):
    """A link to a data constructor."""

    dp_ranks: Sequence[int]
    """Data-parallel ranks that it serves when the plane is opened."""

    def build(
        self, plans: Sequence[StepPlan], served: RanksServed, released_to: int
    ) -> "Future[int] | Future[StepsTaken]":
        """Start building consecutive steps for some ranks, and release those before ``released_to``.

        Without steps, this only announces the ranks. If the constructor has no open question for reports of its ranks,
        the same call asks it.

        Returns:
            The future answer to that question, as of ``told``; without a question, the number of built steps. It is
            cancelled if another constructor is told instead.
        """
        ...

    def told(self, served: RanksServed) -> "Future[StepsTaken] | None":
        """Ask for the reports of its ranks; the answer comes once there are new ones.

        Args:
            served: The planner's present ranks and edition of plans; failures to build for earlier ones are ignored.

        Returns:
            The future answer, which is cancelled if another constructor is asked instead; ``None`` if a question is
            open already, or if ranks report to the planner directly.
        """
        ...

    def fence(self, edition: tuple[int, int]) -> "Future[int]":
        """Tell it to withhold steps until an edition of the plans has come.

        The future gets the first step that the constructor gave to no rank; it may never end if the constructor is
        lost.
        """
        ...

    def release(self, command: ReleaseSteps) -> None:
        """Release steps; there is no answer."""
        ...

    def end(self, step: int) -> None:
        """Tell it that the data ends before ``step``."""
        ...

    def fail(self, error: OmniloadError) -> None:
        """Tell it that the data plane has failed."""
        ...


class LoaderLinks:
    """The links to all source loaders; each command goes to the loaders of its sources."""

    def __init__(
        self,
        link_of: Callable[[int], LoaderLink],
        on_report: Callable[[SamplesReported | ReadFailed], None],
        clock: Clock | None = None,
    ) -> None:
        """Reach the loader of a source by ``link_of``; the outcome of each read goes to ``on_report``."""
        self.of, self._on_report = link_of, on_report
        self._clock = clock or SystemClock()
        self._times = ReadPace()
        self.taken_over: Future[None] = Future()
        """Future that ends with the next take-over that is told."""

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
                # One message per loader, not per source, because there may be hundreds of sources.
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
    """The links to all data constructors; each one gets the part for its ranks."""

    def __init__(
        self,
        links: Sequence[ConstructorLink],
        on_answer: "Callable[[int, Future[Any]], None]",
        on_fenced: "Callable[[int, int, Future[int]], None]",
    ) -> None:
        """Send commands to ``links``; build results and reports of ranks go to ``on_answer``.

        The fences of constructors go to ``on_fenced``, with the numbers of the constructor and of the question.
        """
        self._links, self._on_answer, self._on_fenced = links, on_answer, on_fenced
        self._served = [RanksServed(dp_ranks=tuple(link.dp_ranks)) for link in links]
        self._heard = set(range(len(links)))
        """Constructors whose last question was answered."""

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
        """Note that the planner has heard a constructor's answer; ``listen``, or the next plans, will ask it again."""
        self._heard.add(number)

    def listen(self, numbers: Iterable[int] | None = None) -> None:
        """Ask the given constructors, or all, for reports of their ranks, if their last question was answered."""
        # Not those that have just answered a question sent with plans, because the planner hears that answer next.
        for number in sorted(self._heard if numbers is None else self._heard.intersection(numbers)):
            self._ask(number)

    def _ask(self, number: int) -> None:
        self._heard.discard(number)
        served = self._served[number]
        if (told := self._links[number].told(served)) is not None:
            told.add_done_callback(partial(self._hear, number, served))

    def tell_again(self, command: Republish) -> None:
        """Tell a replacement constructor to build the steps that the lost one held or was told to build."""
        # Sent even without steps, because it names the ranks. Steps that all ranks have are not built again.
        dp_ranks = self._served[command.number].dp_ranks
        for window in ((), *command.windows):
            parts = [plan.part_of(dp_ranks) for plan in window]
            self._build(command.number, parts, command.released_to)
        if command.end is not None:
            self._links[command.number].end(command.end)

    def fail(self, error: OmniloadError) -> None:
        """Tell every constructor, even if one of them cannot be told."""
        for link in self._links:
            try:
                link.fail(error)
            except Exception:  # noqa: BLE001 -- whatever the error of one, the others are waiting
                _LOG.exception("the data constructor of ranks %s cannot be notified", link.dp_ranks)

    def _build_all(self, windows: Sequence[Sequence[StepPlan]], released_to: int = 0) -> None:
        """Tell every constructor to build windows; each gets only its own rows, because whole plans are large."""
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
        """Pass an answer on, except a failure to build for old ranks or plans, whose samples may be gone as well."""
        is_of_before = served != self._served[number]
        if is_of_before and not done.cancelled() and done.exception() is not None:
            self._ask(number)  # it may have been the answer to the question for reports
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

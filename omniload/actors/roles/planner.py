"""Shell of the Planner: one thread that carries events in and commands out."""

import queue
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from itertools import groupby
from pathlib import Path
from typing import Any, TypeVar

from omniload.actors.gate import CLOSED
from omniload.actors.heartbeat_board import Activity
from omniload.actors.planner_journal import Kept, keep, keep_edits, report_times, warn_of_edits
from omniload.actors.roles.links import (
    ConstructorLink,
    ConstructorLinks,
    Failed,
    LoaderLink,
    LoaderLinks,
    outcome_of,
)
from omniload.actors.roles.planned_counts import PlannedCounts
from omniload.actors.roles.planner_events import (
    Change,
    ChangesInTurn,
    Replaced,
    Resize,
    Stop,
    Told,
)
from omniload.base.concurrency.threads import start_thread
from omniload.base.errors import (
    ConfigError,
    IntegrityError,
    OmniloadError,
    UnavailableError,
    project_error,
)
from omniload.base.log import get_logger
from omniload.base.metrics import PLAN_SECONDS
from omniload.base.state import JsonObject
from omniload.machine.messages import (
    ChangeAsked,
    ConstructorReplaced,
    EndOfData,
    KeepEdits,
    LoaderReplaced,
    PlannerCommand,
    PlannerEvent,
    RanksLost,
    ReadAhead,
    ReadTimes,
    ReleaseSamples,
    Republish,
    ResizeAsked,
    Started,
    StepsTaken,
    StepTaken,
    TakeOver,
)
from omniload.machine.planner import Planner
from omniload.machine.plans.unread import ReadFailed
from omniload.machine.progress import Task
from omniload.machine.status import UNREAD
from omniload.machine.steps import Rank
from omniload.mix.edits.answers import EditTaken
from omniload.mix.edits.history import History
from omniload.mix.journal.journal import Journal
from omniload.mix.journal.room import Room
from omniload.plan.world import World, WorldRank

__all__ = ["PlannerShell"]

_LOG = get_logger(__name__)
_CLOSE_S = 8.0
"""Shorter than the time that a caller in another process waits for the close."""

Question = TypeVar("Question", Change, Resize)


class PlannerShell:
    """Runs a planner. Any failure of a loader or a constructor reaches every waiting rank."""

    def __init__(
        self,
        planner: Planner,
        loader_of: Callable[[int], LoaderLink],
        constructors: Sequence[ConstructorLink],
        journal: Journal | None,
        activity: Activity,
        run_dir: Path | None = None,
    ) -> None:
        self._planner, self._run_dir = planner, run_dir
        self._activity, self._counts = activity, PlannedCounts(activity.figures)
        self._quiet_from_s = time.monotonic()
        # Computed when a heartbeat is due, not at each change, because every report of hundreds of sources is a change.
        activity.idle = self._waits
        self._unread = planner.unread
        self._listened_at = planner.ranks.slowest
        """Step of the slowest rank when all constructors were last asked for reports."""
        self._journal, self._room = journal, Room()
        if journal is not None:
            journal.wait_in(self._room)
        self._lock = threading.Lock()
        self._failure: OmniloadError | None = None
        self._ended: OmniloadError | None = None
        """Why changes are refused from now on: a failure, or the closing of the plane."""
        self._events: queue.SimpleQueue[
            PlannerEvent | Failed | Replaced | Change | Resize | Told | Stop
        ] = queue.SimpleQueue()
        self._loaders = LoaderLinks(loader_of, self._events.put)
        self._changes = ChangesInTurn(planner, self._plan_on, self._answer_change, self._events.put)
        self._constructors = ConstructorLinks(constructors, self._on_answer, self._changes.hear)
        self._thread = threading.Thread(target=self._run, name="omniload-planner", daemon=True)

    def start(self) -> None:
        """Begin to plan."""
        # Before the thread: no report is applied to a planner that has not begun.
        self._events.put(Started())
        self._constructors.listen()
        start_thread(self._thread)

    def taken(self, step: int, rank: WorldRank) -> None:
        """Report that a rank's trainer has the batch of ``step``."""
        self._events.put(StepTaken.by(rank, step))

    def unheard(self) -> tuple[World, list[Rank]]:
        """Return the present ranks, and those that have not reported to a planner that took over."""
        with self._lock:
            return self._planner.world, sorted(self._planner.ranks.unheard)

    def lose(self, ranks: Sequence[Rank], generation: int) -> None:
        """Report that unheard ranks are lost."""
        self._events.put(RanksLost(ranks=tuple(ranks), generation=generation))

    def resize(self, asked: ResizeAsked) -> "Future[World]":
        """Request other ranks; the future gets the resulting world, or the error of a refusal."""
        return self._ask(Resize(asked, Future())).answer

    def world(self) -> World:
        """Return the present ranks."""
        with self._lock:
            return self._planner.world

    def state_at(self, step: int) -> JsonObject:
        """Return the state before ``step``; see ``Planner.state_at``."""
        self._activity.figures.note(state_asked_timestamp_seconds=time.time())
        with self._lock:
            return self._planner.state_at(step)

    def replace_loader(self, sources: Sequence[int], change: Callable[[], None]) -> "Future[None]":
        """Let another loader serve ``sources``; ``change`` points their link to it.

        Returns:
            A future that ends when the loader may be asked for samples that the previous one held.
        """
        replaced = Replaced(LoaderReplaced(sources=tuple(sources)), change, Future())
        self._events.put(replaced)
        return replaced.taken_over

    def replace_constructor(self, number: int, change: Callable[[], None]) -> None:
        """Let another constructor build the steps under way; ``change`` points the link to it."""
        self._events.put(Replaced(ConstructorReplaced(number=number), change, Future()))

    def change(self, asked: ChangeAsked) -> "Future[EditTaken]":
        """Request a change of the mix; the future gets its outcome, or the error of a refusal."""
        return self._ask(Change(asked, Future())).answer

    def _ask(self, question: Question) -> Question:
        """Send a question to the planner's thread; after the planner's end it is refused at once."""
        self.check()
        self._events.put(question)
        if self._ended is not None:  # the thread may have ended before it saw the question
            self._refuse(self._ended)
        return question

    def history(self) -> History:
        """Return the mix and its edits."""
        with self._lock:
            return self._planner.history

    def fail(self, error: OmniloadError) -> None:
        """End the planning with an error for every rank."""
        self._events.put(Failed(error))

    def released_to(self) -> int:
        """Return the first step that not every rank has taken."""
        # Without the lock: one number, and a plan may hold the lock for a second.
        return self._planner.released_to

    def filled(self) -> dict[int, float]:
        """Return the known fraction of each source's read-ahead target; see ``Planner.filled``."""
        with self._lock:
            return self._planner.filled()

    def outstanding(self, sources: Sequence[int]) -> TakeOver:
        """Return the command for a loader that would take sources over now."""
        with self._lock:
            take_over = self._planner.outstanding(sources)[0]
        assert isinstance(take_over, TakeOver), "it stands first"
        return take_over

    def check(self) -> None:
        """Return if planning goes on; a waiting rank may not have heard of its end.

        Raises:
            OmniloadError: The error that ended the planning.
        """
        if self._failure is not None:
            raise self._failure

    def close(self) -> None:
        """Stop planning and close the journal."""
        self._events.put(Stop())
        self._room.wait_no_more()
        if self._thread.is_alive():
            self._thread.join(_CLOSE_S)
        if self._thread.is_alive():
            _LOG.warning("the planner did not stop within %.0f s; its journal stays open", _CLOSE_S)
        elif self._journal is not None:
            self._journal.close()

    def _run(self) -> None:
        try:
            with self._activity.speaking():
                while not isinstance(event := self._events.get(), Stop):
                    self._apply(event)
                    self._quiet_from_s = time.monotonic()
            self._refuse(UnavailableError(CLOSED))
        except Exception as error:  # noqa: BLE001 -- the outermost loop: every waiting rank must hear of it
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        """Tell every constructor, even if one of them cannot be told."""
        failure = project_error(error, "the planner")
        with self._activity.speaking():
            _LOG.error("the data plane stops: %s", failure, exc_info=failure is not error and error)
        # Before changes are refused, so that callers hear of the failure and not that the plane was closed.
        self._failure = failure
        self._refuse(failure)
        # Constructors are told last, because a woken rank asks what ended the planning, and must find it.
        self._constructors.fail(failure)

    def _refuse(self, cause: OmniloadError) -> None:
        """Refuse every change and resize that still waits, because no event is applied any more."""
        self._ended = cause
        self._changes.refuse(cause)
        with suppress(queue.Empty):
            while True:
                event = self._events.get_nowait()
                if (
                    isinstance(event, Change | Resize)
                    and event.answer.set_running_or_notify_cancel()
                ):
                    event.answer.set_exception(cause)

    def _apply(self, event: PlannerEvent | Failed | Replaced | Change | Resize | Told) -> None:
        match event:
            case Failed(error=error):
                raise error
            case Change():
                self._changes.ask(event)
            case Resize():
                self._answer_resize(event)
            case ReadFailed(error=error):
                if not self._planner.has_ended and self._planner.state.step > self.released_to():
                    _LOG.warning("%s; the run ends before the first step that needs it", error)
                self._plan_on(event)
            case Replaced():
                # The link is changed first, so that commands which follow from the event go to the new holder.
                event.change()
                self._loaders.taken_over = event.taken_over
                self._plan_on(event.event)
            case Told(number=number, event=told):
                self._constructors.heard(number)
                self._plan_on(told)
                # A constructor whose ranks are all ahead is asked when others catch up, together with the plans that
                # follow.
                is_of_now = told.generation == self._planner.world.generation
                if not (is_of_now and self._planner.ranks.are_ahead(told)):
                    self._constructors.listen((number,))
            case _:
                self._plan_on(event)
        self._changes.go_on(len(self._constructors))

    def _plan_on(self, event: PlannerEvent) -> None:
        doing = self._activity.doing(f"plans step {self._planner.state.step}")
        # Commands are carried out without the lock, because a journal on a store may hang while ranks ask for states.
        try:
            with doing, self._lock, PLAN_SECONDS.time():
                commands = self._planner.handle(event)
        except IntegrityError:
            self._counts.note((), self._planner.ranks.slowest)  # ranks have all steps before it
            # If this planner is wrongly believed dead, its successor may have planned the steps that ranks took.
            # If the store does not answer who has the journal, the original error is kept.
            with suppress(ConfigError, UnavailableError, OSError):
                if self._journal is not None:
                    self._journal.require_claim()
            raise
        self._activity.figures.note(planned_step=self._planner.state.step)
        self._carry_out(commands)
        if (slowest := self._planner.ranks.slowest) != self._listened_at:
            self._listened_at = slowest
            # If there were plans, every constructor has been asked together with them.
            self._constructors.listen()

    def _answer_change(self, asked: Change) -> None:
        before, planned = self._planner.history, self._planner.open_from(asked.event.at)
        if not self._take_up(asked, lambda: self._planner.history):
            return
        history = self._planner.history
        taken = EditTaken.of(before, history, planned, self._planner.ranks.slowest)
        _LOG.warning("the mix is edited: %s", taken.said)
        asked.answer.set_result(taken)

    def _answer_resize(self, asked: Resize) -> None:
        if not asked.answer.set_running_or_notify_cancel():
            return  # withdrawn
        before = self._planner.world
        if not self._take_up(asked, lambda: self._planner.world):
            return
        world = self._planner.world
        # Each rank of a new world requests it; the first request has made it already.
        if world is not before:
            _LOG.warning("dp is %d from step %d on (was %d)", world.dp, world.step, before.dp)
        asked.answer.set_result(world)

    def _take_up(self, asked: Change | Resize, held: Callable[[], object]) -> bool:
        """Let the machine handle a question, and carry out its commands; return whether it was accepted.

        A refused question leaves the value of ``held`` unchanged.
        """
        before = held()
        try:
            with self._lock:
                commands = self._planner.handle(asked.event)
            self._carry_out(commands)
        except Exception as error:
            asked.answer.set_exception(project_error(error, "the planner"))
            if isinstance(error, OmniloadError) and held() is before:
                return False
            raise  # it was accepted, and a command that followed failed
        return True

    def _carry_out(self, commands: Sequence[PlannerCommand]) -> None:
        if (unread := self._planner.unread) != self._unread:
            self._activity.figures.forget(UNREAD + name for name in self._unread)
            self._activity.figures.note(**{UNREAD + name: 1.0 for name in unread})
            self._unread = unread
        # In order, but consecutive records together, so that a window of steps costs one sync.
        self._counts.note(commands, self._planner.ranks.slowest)
        for kept, group in groupby(commands, lambda each: isinstance(each, Kept)):
            if not kept:
                self._tell(group)
            # Before the later commands, so that a step is durable before any rank may train on it.
            elif self._journal is not None:
                with self._activity.doing("writes the journal") as self._room.says:
                    keep(self._journal, group)

    def _tell(self, commands: Iterable[PlannerCommand]) -> None:
        for command in commands:
            assert not isinstance(command, Kept), "the journal keeps it"
            match command:
                case ReadAhead() | ReleaseSamples() | TakeOver():
                    self._loaders.tell(command)
                case KeepEdits(history=history):
                    doing = self._activity.doing("writes edits of the run")
                    keep_edits(self._run_dir, history, self._journal, self._room, doing)
                case ReadTimes(first=first):
                    report_times(self._run_dir, first, self._events.put, self.fail)
                case Republish():
                    self._constructors.tell_again(command)
                case EndOfData(step=step):
                    self._constructors.tell(command)
                    warn_of_edits(self._planner.history, step)
                case _:
                    self._constructors.tell(command)

    def _on_answer(self, number: int, future: "Future[Any]") -> None:
        match outcome_of(future, "a data constructor"):
            case StepsTaken() as told:
                self._events.put(Told(number, told))
            case Failed() as failure:
                self._events.put(failure)

    def _waits(self) -> Task:
        """Return what holds up the next plan."""
        with self._lock:
            waits = self._planner.waits()
        loaders = {self._loaders.of(source).name for source in waits.sources}
        return Task(
            doing=waits.text, since_s=self._quiet_from_s, waits_for=(*waits.ranks, *sorted(loaders))
        )

"""Shell of the Planner: one thread that carries events in and commands out."""

import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import assert_never

from omniload.actors.links import ConstructorLink, LoaderLink
from omniload.base.errors import OmniloadError, project_error
from omniload.base.log import get_logger
from omniload.base.metrics import IMBALANCE_RATIO, PLAN_SECONDS, SAMPLES_SKIPPED, TOKENS_PLANNED
from omniload.base.state import JsonObject
from omniload.machine.messages import (
    AppendJournal,
    EndOfData,
    PlannerEvent,
    PublishPlan,
    ReadAhead,
    ReleaseSamples,
    ReleaseSteps,
    SamplesReported,
    Started,
    StepTaken,
)
from omniload.machine.planner import Planner
from omniload.mix.journal import Journal
from omniload.plan.records import StepPlan

__all__ = ["PlannerShell"]

_LOG = get_logger(__name__)
_CLOSE_S = 8.0
"""Shorter than the time that a caller in another process waits for the close."""


@dataclass(frozen=True, slots=True)
class _Failed:
    error: OmniloadError


class _Stop:
    pass


class PlannerShell:
    """Runs a planner. Any failure of a loader or a constructor reaches every waiting rank."""

    def __init__(
        self,
        planner: Planner,
        loader_of: Callable[[int], LoaderLink],
        constructors: Sequence[ConstructorLink],
        journal: Journal | None,
    ) -> None:
        self._planner = planner
        self._loader_of = loader_of
        self._constructors = constructors
        self._journal = journal
        self._lock = threading.Lock()
        self._failure: OmniloadError | None = None
        self._events: queue.SimpleQueue[PlannerEvent | _Failed | _Stop] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="omniload-planner", daemon=True)

    def start(self) -> None:
        """Begin to plan."""
        self._events.put(Started())
        self._thread.start()

    def taken(self, step: int, dp_rank: int, cp_rank: int = 0) -> None:
        """Tell that a rank's trainer has the batch of ``step``."""
        self._events.put(StepTaken(step=step, dp_rank=dp_rank, cp_rank=cp_rank))

    def state_at(self, step: int) -> JsonObject:
        """Return the state before ``step``; see ``Planner.state_at``."""
        with self._lock:
            return self._planner.state_at(step)

    def check(self) -> None:
        """Return while planning goes on: a rank that waits need not have heard of its end.

        Raises:
            OmniloadError: What ended it.
        """
        if self._failure is not None:
            raise self._failure

    def close(self) -> None:
        """Stop planning and close the journal."""
        self._events.put(_Stop())
        if self._thread.is_alive():
            self._thread.join(_CLOSE_S)
        if self._thread.is_alive():
            _LOG.warning("the planner did not stop within %.0f s; its journal stays open", _CLOSE_S)
        elif self._journal is not None:
            self._journal.close()

    def _run(self) -> None:
        try:
            while not isinstance(event := self._events.get(), _Stop):
                self._apply(event)
        except Exception as error:  # noqa: BLE001 -- the outermost loop: everyone who waits must hear of it
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        """Tell every constructor, also after one that cannot be told."""
        failure = project_error(error, "the planner")
        _LOG.error("the data plane stops: %s", failure, exc_info=failure is not error and error)
        self._failure = failure
        for constructor in self._constructors:
            try:
                constructor.fail(failure)
            except Exception:  # noqa: BLE001 -- whatever ails one, the others wait
                _LOG.exception(
                    "the data constructor of ranks %s cannot be told", constructor.dp_ranks
                )

    def _apply(self, event: PlannerEvent | _Failed) -> None:
        if isinstance(event, _Failed):
            raise event.error
        with self._lock, PLAN_SECONDS.time():
            commands = self._planner.handle(event)
        self._count_skipped(event)
        for command in commands:
            if isinstance(command, AppendJournal):
                if self._journal is not None:
                    self._journal.append(command.record)
            elif isinstance(command, ReadAhead | ReleaseSamples):
                self._tell_loaders(command)
            else:
                self._tell_constructors(command)

    def _tell_loaders(self, command: ReadAhead | ReleaseSamples) -> None:
        if isinstance(command, ReadAhead):
            self._loader_of(command.source).read_ahead(command).add_done_callback(self._on_report)
            return
        links = {id(link): link for link in map(self._loader_of, command.floors)}
        for link in links.values():
            link.release(command)

    def _tell_constructors(self, command: PublishPlan | ReleaseSteps | EndOfData) -> None:
        for constructor in self._constructors:
            match command:
                case PublishPlan(plan=plan):
                    constructor.build(plan.part_of(constructor.dp_ranks)).add_done_callback(
                        self._on_built
                    )
                case ReleaseSteps():
                    constructor.release(command)
                case EndOfData(step=step):
                    constructor.end(step)
                case _:
                    assert_never(command)
        if isinstance(command, PublishPlan):
            self._measure(command.plan)

    def _on_report(self, future: "Future[SamplesReported]") -> None:
        if future.cancelled():  # the data plane is closing
            return
        error = future.exception()
        self._events.put(future.result() if error is None else _failed(error, "a source loader"))

    def _on_built(self, future: "Future[int]") -> None:
        if not future.cancelled() and (error := future.exception()) is not None:
            self._events.put(_failed(error, "a data constructor"))

    def _count_skipped(self, event: PlannerEvent) -> None:
        if isinstance(event, SamplesReported) and event.skipped:
            name = self._planner.mix.names[event.source]
            SAMPLES_SKIPPED.labels(name).inc(event.skipped)
            _LOG.warning(
                "source %s: skipped %d records that cannot be decoded", name, event.skipped
            )

    def _measure(self, plan: StepPlan) -> None:
        IMBALANCE_RATIO.set(plan.imbalance)
        for name, tokens in zip(self._planner.mix.names, plan.tokens_S, strict=True):
            TOKENS_PLANNED.labels(name).inc(tokens)


def _failed(error: BaseException, role: str) -> _Failed:
    failure = project_error(error, role)
    if failure is not error:
        _LOG.error("%s failed", role, exc_info=error)
    return _Failed(failure)

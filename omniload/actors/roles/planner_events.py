"""Messages to the planner's thread other than the events of its machine: questions, and news of other roles."""

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass

from omniload.base.errors import OmniloadError
from omniload.machine.messages import (
    ChangeAsked,
    ConstructorReplaced,
    LoaderReplaced,
    PlannerEvent,
    ResizeAsked,
    StepsTaken,
)
from omniload.machine.planner import Planner
from omniload.machine.plans.fences import (
    FencesLate,
    FenceTold,
    WithdrawalAsked,
    WithdrawalEnded,
)
from omniload.mix.edits.answers import EditTaken
from omniload.plan.world import World

__all__ = ["Change", "ChangesInTurn", "Replaced", "Resize", "Stop", "Told"]

_FENCED_WITHIN_S = 2.0
"""Longest wait for data constructors to report what they have given out; ranks may have to wait as long."""


@dataclass(frozen=True, slots=True)
class Change:
    """A request for a change of the mix."""

    event: ChangeAsked
    answer: "Future[EditTaken]"


@dataclass(frozen=True, slots=True)
class Resize:
    """A rank's request for other ranks."""

    event: ResizeAsked
    answer: "Future[World]"


@dataclass(frozen=True, slots=True)
class Replaced:
    """A role has another holder; its link is changed before the planner hears of it."""

    event: LoaderReplaced | ConstructorReplaced
    change: Callable[[], None]
    taken_over: "Future[None]"
    """For a loader: ends once it knows what it takes over."""


@dataclass(frozen=True, slots=True)
class Told:
    """A constructor has reported steps of its ranks; it will be asked for the next ones."""

    number: int
    """Number of the constructor."""
    event: StepsTaken


class Stop:
    """The plane closes; messages after this one are not applied."""


class ChangesInTurn:
    """Applies changes of the mix one after another, each once it is known which steps no rank was given."""

    def __init__(
        self,
        planner: Planner,
        handle: Callable[[PlannerEvent], None],
        answer: Callable[[Change], None],
        tell: Callable[[FenceTold | FencesLate], None],
    ) -> None:
        """Begin without changes.

        Args:
            planner: The machine; only its progress of questions is read.
            handle: Lets the machine handle an event, and carries out its commands.
            answer: Applies a change that had to wait, and answers it; an error that it raises ends the planning.
            tell: Appends a message to those of the planner's thread; from any thread.
        """
        self._planner, self._handle, self._answer, self._tell = planner, handle, answer, tell
        self._waiting = deque[Change]()
        self._asked: Change | None = None
        """The change that waits for the constructors' answers."""

    def ask(self, change: Change) -> None:
        """Queue a change after those that wait."""
        self._waiting.append(change)

    def go_on(self, constructors: int) -> None:
        """Apply changes until one has to wait for answers of the ``constructors`` constructors."""
        while True:
            if self._asked is None:
                if not self._waiting:
                    return
                self._begin(self._waiting.popleft(), constructors)
            elif not self._planner.is_settled:
                return
            else:
                asked, self._asked = self._asked, None
                self._answer(asked)
                # Also after a refusal, because ranks may be waiting for steps that were withheld for the change.
                self._handle(WithdrawalEnded())

    def hear(self, number: int, turn: int, future: "Future[int]") -> None:
        """Pass on the answer of a constructor to a question; from any thread."""
        if future.cancelled() or future.exception() is not None:
            self._tell(FencesLate(turn=turn))  # it is lost, and will not answer
        else:
            self._tell(FenceTold(number=number, turn=turn, step=future.result()))

    def _give_up_after(self, turn: int) -> None:
        """Set the time limit for the constructors' answers to a question."""
        late = threading.Timer(_FENCED_WITHIN_S, lambda: self._tell(FencesLate(turn=turn)))
        # A process that ends waits for no timer.
        late.daemon = True
        late.start()

    def refuse(self, cause: OmniloadError) -> None:
        """Refuse every waiting change, because none is applied any more."""
        asked, self._asked = self._asked, None
        if asked is not None:
            asked.answer.set_exception(cause)
        while self._waiting:
            change = self._waiting.popleft()
            if change.answer.set_running_or_notify_cancel():
                change.answer.set_exception(cause)

    def _begin(self, change: Change, constructors: int) -> None:
        if change.answer.set_running_or_notify_cancel():  # otherwise it was withdrawn
            self._asked = change
            self._handle(WithdrawalAsked(at=change.event.at, constructors=constructors))
            if not self._planner.is_settled:
                self._give_up_after(self._planner.question)

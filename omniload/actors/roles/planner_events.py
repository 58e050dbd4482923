"""What reaches the planner's thread beside the events of its machine: questions to answer, and word of other roles."""

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
"""Longest wait for data constructors to say what they have given out: ranks wait as long."""


@dataclass(frozen=True, slots=True)
class Change:
    """Somebody asks for a change of the mix."""

    event: ChangeAsked
    answer: "Future[EditTaken]"


@dataclass(frozen=True, slots=True)
class Resize:
    """A rank asks for other ranks."""

    event: ResizeAsked
    answer: "Future[World]"


@dataclass(frozen=True, slots=True)
class Replaced:
    """A role has another holder: how it is reached is changed before the planner hears of it."""

    event: LoaderReplaced | ConstructorReplaced
    change: Callable[[], None]
    taken_over: "Future[None]"
    """Of a loader: ends once it knows what it takes over."""


@dataclass(frozen=True, slots=True)
class Told:
    """Ranks have told their constructor something: it is asked for what follows."""

    number: int
    """Of the constructor."""
    event: StepsTaken


class Stop:
    """The plane closes: what came before is the last that is applied."""


class ChangesInTurn:
    """Has changes of the mix taken up one after another, each once it is known which steps no rank was given."""

    def __init__(
        self,
        planner: Planner,
        handle: Callable[[PlannerEvent], None],
        answer: Callable[[Change], None],
        tell: Callable[[FenceTold | FencesLate], None],
    ) -> None:
        """Take up changes.

        Args:
            planner: The machine; it is asked nothing but what it waits for.
            handle: Has the machine handle an event, and carries out what follows.
            answer: Has a change taken up that was waited with, and answers it; what it raises ends the planning.
            tell: Puts an event behind those that came before; from any thread.
        """
        self._planner, self._handle, self._answer, self._tell = planner, handle, answer, tell
        self._waiting = deque[Change]()
        self._asked: Change | None = None
        """The change that is waited with."""

    def ask(self, change: Change) -> None:
        """Take up a change behind those that wait."""
        self._waiting.append(change)

    def go_on(self, constructors: int) -> None:
        """Take changes up until the planner waits for answers of its constructors, of which there are so many."""
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
                # Also where it was refused: ranks may wait for what was withheld for it.
                self._handle(WithdrawalEnded())

    def hear(self, number: int, turn: int, future: "Future[int]") -> None:
        """Pass on the answer of a constructor to a question; from any thread."""
        if future.cancelled() or future.exception() is not None:
            self._tell(FencesLate(turn=turn))  # it is lost: it says nothing any more
        else:
            self._tell(FenceTold(number=number, turn=turn, step=future.result()))

    def _give_up_after(self, turn: int) -> None:
        """Have constructors be too late with their answers to a question, a while from now."""
        late = threading.Timer(_FENCED_WITHIN_S, lambda: self._tell(FencesLate(turn=turn)))
        # A process that ends waits for no timer.
        late.daemon = True
        late.start()

    def refuse(self, cause: OmniloadError) -> None:
        """Refuse every change that waits: none is taken up any more."""
        asked, self._asked = self._asked, None
        if asked is not None:
            asked.answer.set_exception(cause)
        while self._waiting:
            change = self._waiting.popleft()
            if change.answer.set_running_or_notify_cancel():
                change.answer.set_exception(cause)

    def _begin(self, change: Change, constructors: int) -> None:
        if change.answer.set_running_or_notify_cancel():  # else it is withdrawn
            self._asked = change
            self._handle(WithdrawalAsked(at=change.event.at, constructors=constructors))
            if not self._planner.is_settled:
                self._give_up_after(self._planner.question)

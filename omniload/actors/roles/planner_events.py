"""What reaches the planner's thread beside the events of its machine: questions to answer, and word of other roles."""

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass

from omniload.machine.messages import (
    ChangeAsked,
    ConstructorReplaced,
    LoaderReplaced,
    ResizeAsked,
    StepsTaken,
)
from omniload.mix.edits.answers import EditTaken
from omniload.plan.world import World

__all__ = ["Change", "Replaced", "Resize", "Stop", "Told"]


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

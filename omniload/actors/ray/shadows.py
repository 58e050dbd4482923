"""Keeps shadows where the plane is: each has decoded what it would read from if it took over now.

::

    planner ──what a loader would be told that takes over──▶ keeper ──of its sources──▶ each shadow ──▶ decodes

Nobody is waited for. A shadow that was told nothing takes over as well, and decodes while ranks wait.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial

from omniload.actors.ray.answers import future_of
from omniload.actors.ray.crew import Crew
from omniload.actors.ray.layout import PLANNER
from omniload.base.errors import UnavailableError
from omniload.base.log import get_logger
from omniload.machine.messages import TakeOver
from omniload.machine.roster.members import Member

__all__ = ["Shadows"]

Later = Callable[[Callable[[], None]], None]
_EVERY_S = 1.0
_LOG = get_logger(__name__)


class Shadows:
    """The members that stand by, and which of them have decoded where they would begin. For one thread.

    Answers are brought to that thread by ``later``.
    """

    def __init__(self, crew: Crew) -> None:
        """Lead those of ``crew``."""
        self._crew = crew
        self._standing_by: frozenset[Member] = frozenset()
        self._decoding: set[Member] = set()
        """Those that were told to and have not answered, so that none is told twice at once."""
        self._decoded: frozenset[Member] = frozenset()
        """Those that have, some moment since they stand by."""
        self._asks_planner, self._asked_s = False, -_EVERY_S
        self._said = ""

    def lead(self, shadows: Sequence[Member], now_s: float, later: Later) -> None:
        """Tell shadows where they would begin: once a second, and at once where one is new.

        Args:
            shadows: Those that stand by.
            now_s: By a clock that never goes back.
            later: Has a call made in the one thread.
        """
        new = set(shadows) - self._standing_by
        self._standing_by = frozenset(shadows)
        self._decoding &= self._standing_by
        self._decoded &= self._standing_by
        if self._asks_planner or not shadows or (not new and now_s - self._asked_s < _EVERY_S):
            return
        self._asks_planner, self._asked_s = True, now_s
        sources = [s for m in shadows for s in self._crew.sources_of.get(m.role, ())]
        asked = future_of(self._crew.holding(PLANNER).outstanding.remote(sources), PLANNER)
        asked.add_done_callback(lambda done: later(partial(self._tell, done, later)))

    def have_decoded(self, shadows: Sequence[Member]) -> bool:
        """Tell whether shadows have decoded what they would begin with, some moment since they stand by."""
        return self._decoded.issuperset(shadows)

    def _tell(self, done: "Future[TakeOver]", later: Later) -> None:
        self._asks_planner = False
        if (error := done.exception()) is not None:
            self._say(f"shadows stay where they are: {error}", error)
            return
        outstanding = done.result()
        for member in self._standing_by - self._decoding:
            # Its role may have been retired since shadows were looked at last.
            if (actor := self._crew.actors.get(member)) is None:
                continue
            sources = self._crew.sources_of.get(member.role, ())
            command = TakeOver(
                ranges={s: outstanding.ranges[s] for s in sources if s in outstanding.ranges},
                without={s: outstanding.without[s] for s in sources if s in outstanding.without},
            )
            self._decoding.add(member)
            told = future_of(actor.stand_at.remote(command), member.name)
            told.add_done_callback(partial(self._hear_later, member, later))

    def _hear_later(self, member: Member, later: Later, done: "Future[None]") -> None:
        later(partial(self._hear, member, done))

    def _hear(self, member: Member, done: "Future[None]") -> None:
        if (error := done.exception()) is not None:
            # Whatever else than its end it is, it would come again at every turn: that one decodes as it takes over.
            if isinstance(error, UnavailableError):
                self._decoding.discard(member)
            self._say(f"{member.name} has not decoded ahead: {error}", error)
            return
        self._decoding.discard(member)
        if member in self._standing_by:
            self._decoded |= {member}

    def _say(self, text: str, error: BaseException) -> None:
        """Say what is amiss once; that somebody was lost is told by whoever replaces it."""
        if text != self._said and not isinstance(error, UnavailableError):
            _LOG.warning("%s", text)
            self._said = text

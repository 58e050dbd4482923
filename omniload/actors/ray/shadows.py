"""Keeps shadows up to date: each has decoded the blocks that it would read from if it took over now.

::

    planner ──what a loader would be told that takes over──▶ keeper ──of its sources──▶ each shadow ──▶ decodes

Nothing waits for this. A shadow that was told nothing can take over as well, but decodes while ranks wait.
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
    """The shadows, and which of them have decoded the blocks where they would begin. For one thread.

    ``later`` brings answers to that thread.
    """

    def __init__(self, crew: Crew) -> None:
        """Begin with the shadows of ``crew``."""
        self._crew = crew
        self._standing_by: frozenset[Member] = frozenset()
        self._decoding: set[Member] = set()
        """Shadows with an unanswered request, so that none gets two at once."""
        self._decoded: frozenset[Member] = frozenset()
        """Shadows that have decoded at least once since they began to stand by."""
        self._asks_planner, self._asked_s = False, -_EVERY_S
        self._said = ""

    def lead(self, shadows: Sequence[Member], now_s: float, later: Later) -> None:
        """Tell shadows where they would begin, once a second, and a new one at once.

        Args:
            shadows: All shadows.
            now_s: Time of a monotonic clock.
            later: Schedules a call in the one thread.
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
        """Return whether these shadows have decoded at least once since they began to stand by."""
        return self._decoded.issuperset(shadows)

    def _tell(self, done: "Future[TakeOver]", later: Later) -> None:
        self._asks_planner = False
        if (error := done.exception()) is not None:
            self._say(f"shadows stay where they are: {error}", error)
            return
        outstanding = done.result()
        for member in self._standing_by - self._decoding:
            # Its role may have been retired since the last look.
            if (actor := self._crew.actors.get(member)) is None:
                continue
            sources = self._crew.sources_of.get(member.role, ())
            command = TakeOver(
                ranges={s: outstanding.ranges[s] for s in sources if s in outstanding.ranges},
                without={s: outstanding.without[s] for s in sources if s in outstanding.without},
            )
            self._decoding.add(member)
            told = future_of(actor.decode_ahead.remote(command), member.name)
            told.add_done_callback(partial(self._hear_later, member, later))

    def _hear_later(self, member: Member, later: Later, done: "Future[None]") -> None:
        later(partial(self._hear, member, done))

    def _hear(self, member: Member, done: "Future[None]") -> None:
        if (error := done.exception()) is not None:
            # Any other error than its end would recur each time, so this shadow decodes only when it takes over.
            if isinstance(error, UnavailableError):
                self._decoding.discard(member)
            self._say(f"{member.name} has not decoded ahead: {error}", error)
            return
        self._decoding.discard(member)
        if member in self._standing_by:
            self._decoded |= {member}

    def _say(self, text: str, error: BaseException) -> None:
        """Log an error once; the loss of a member is logged by its replacement."""
        if text != self._said and not isinstance(error, UnavailableError):
            _LOG.warning("%s", text)
            self._said = text

"""Sources that were moved and that the loaders before still answer for: until everyone has heard of the move."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from omniload.actors.gate import Gate
from omniload.actors.ray.answers import answer_to
from omniload.actors.ray.crew import PLANNER, Crew
from omniload.base.errors import UnavailableError
from omniload.base.log import get_logger
from omniload.machine.lost_roles import Member

__all__ = ["Leaving"]

_ASKS_S = 2.0
"""Longest wait for a constructor to say whom it asks; it is asked again."""
_LOG = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class _Left:
    """Sources that loaders still answer for after they were moved."""

    sources: tuple[int, ...]
    roles: tuple[str, ...]
    """The loaders that served them."""


class Leaving:
    """What loaders of a crew are to drop. For whoever holds ``crew.changing``."""

    def __init__(self, crew: Crew, gate: Gate) -> None:
        self._crew, self._gate = crew, gate
        self._left: list[_Left] = []

    def leave(self, sources: Sequence[int], roles: Sequence[str]) -> None:
        """Note that loaders are to drop sources, those among them that are not theirs."""
        self._left.append(_Left(tuple(sources), tuple(roles)))

    def is_due(self) -> bool:
        """Tell whether anything is to be dropped."""
        return bool(self._left)

    def answers(self, role: str) -> bool:
        """Tell whether a loader has to answer yet for sources that are not its own."""
        return any(role in each.roles for each in self._left)

    def unaware(self, sources: Sequence[int]) -> list[str]:
        """Return who has not heard of the last move of sources, and may ask a loader that served them before."""
        crew = self._crew
        noted = [crew.noted_at.get(s, 0) for s in sources]
        if any(at < crew.moved_at.get(s, 0) for s, at in zip(sources, noted, strict=True)):
            return [PLANNER]  # others hear of it once the planner has
        unaware = []
        for name in sorted(crew.dp_ranks_of):
            try:
                answer = crew.holding(name).turns.remote(tuple(sources))
                known = answer_to(answer, name, limit_s=_ASKS_S, check=self._gate.check)
            except UnavailableError as error:  # one that is lost is followed to the next
                self._gate.check()
                _LOG.debug("%s does not say what it knows: %s", name, error)
                unaware.append(name)
                continue
            # Whether it asks the right one by name says too little: a source may have come back.
            if any(turn < at for turn, at in zip(known, noted, strict=True)):
                unaware.append(name)
        return unaware

    def drop(self) -> None:
        """Have loaders drop what was moved from them and nobody asks them for; of the rest, later."""
        left, self._left = self._left, []
        for each in left:
            if self.unaware(each.sources):
                self._left.append(each)
                continue
            for role in each.roles:
                # What has come back meanwhile it keeps.
                theirs = self._crew.sources_of.get(role, ())
                gone = [s for s in each.sources if s not in theirs]
                if gone:
                    self._drop_from(role, gone)
                    _LOG.info("%s has dropped %d sources that were moved", role, len(gone))

    def _drop_from(self, role: str, sources: Sequence[int]) -> None:
        for member in list(self._crew.actors):
            if member.role == role:
                self.tell(member, lambda actor: actor.drop.remote(tuple(sources)))

    def tell(self, member: Member, call: Callable[[Any], Any]) -> None:
        """Call a method of a member and wait for its end; the successor of one that is lost begins anew."""
        actor = self._crew.actors.get(member)
        if actor is None:
            return
        try:
            answer_to(call(actor), member.name, check=self._gate.check)
        except UnavailableError as error:
            self._gate.check()
            _LOG.debug("%s was lost while sources were moved: %s", member.name, error)

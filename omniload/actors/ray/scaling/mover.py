"""Moves sources between the loaders of a running plane. Nothing of what ranks get changes by it.

A move is the hand-over of a lost loader (design page 0009) with the old one alive::

    new one opens ──▶ old one answers for what the new one reads ──▶ planner: TakeOver, ReadAhead to the new one
                  ──▶ constructors ask the new one ──▶ old one drops the sources

Before the planner hears of it, a move that fails has changed nothing. From then on the sources
are the new one's: whoever is lost, the roster hands over what is its role's.
"""

from collections.abc import Callable, Sequence
from typing import Any

from omniload.actors.gate import Gate
from omniload.actors.ray.answers import answer_to, has_ended
from omniload.actors.ray.crew import Crew
from omniload.actors.ray.keeper import Keeper
from omniload.base.errors import StateError, UnavailableError
from omniload.base.log import get_logger
from omniload.machine.messages import HandedOver
from omniload.machine.roster import Member

__all__ = ["Mover"]

_OPENING_S = 600.0
"""Longest wait for a loader to start and open sources; the plane goes on meanwhile."""
_TURN_S = 0.2
_LOG = get_logger(__name__)


class Mover:
    """Adds loaders to a crew, moves sources between them and retires those that have none. For one thread."""

    def __init__(self, crew: Crew, keeper: Keeper, gate: Gate) -> None:
        self._crew, self._keeper, self._gate = crew, keeper, gate

    def split(self, sources: Sequence[int], threads: int) -> str:
        """Move sources to a loader that is added for them; return its role.

        Raises:
            OmniloadError: It could not be started or could not open them; nothing has changed.
        """
        with self._gate.inside(), self._crew.changing:
            role = self._crew.add_loader(threads)
            self._crew.coming = dict.fromkeys(sources, role)
            try:
                self._keeper.add(role)
                self._wait_for_first(role)
                self._hand_over(sources, role)
            except BaseException:
                if not self._crew.sources_of.get(role, ()):
                    self._keeper.retire(role)
                raise
            finally:
                self._crew.coming = {}
            return role

    def move(self, sources: Sequence[int], role: str) -> None:
        """Move sources to another loader that is there.

        Raises:
            OmniloadError: It could not open them as they were found first; nothing has changed.
        """
        with self._gate.inside(), self._crew.changing:
            self._crew.coming = dict.fromkeys(sources, role)
            try:
                self._open(sources, role)
                self._hand_over(sources, role)
            except BaseException:
                if not set(sources) & set(self._crew.sources_of[role]):
                    self._drop(sources, [role])
                raise
            finally:
                self._crew.coming = {}

    def retire(self, role: str) -> None:
        """End a loader that has no source any more.

        Raises:
            StateError: It has some.
        """
        with self._gate.inside(), self._crew.changing:
            if left := self._crew.sources_of[role]:
                raise StateError(f"{role} serves {len(left)} sources; move them first")
            self._keeper.retire(role)

    def _wait_for_first(self, role: str) -> None:
        """Wait for a role that was added to be held."""
        crew = self._crew
        self._wait(lambda: role in crew.holders or role not in crew.sources_of, f"{role} to open")
        if role not in crew.sources_of:
            raise UnavailableError(f"{role} could not be started; the lines of the keeper say why")

    def _open(self, sources: Sequence[int], role: str) -> None:
        """Have every member of a role open sources; those that are started from now on do so by themselves."""
        mix, known = self._crew.spec.history.latest, self._crew.facts
        told = {
            member: actor.open_more.remote(tuple(sources), mix)
            for member, actor in self._crew.actors.items()
            if member.role == role
        }
        for member, answer in told.items():
            try:
                found = answer_to(answer, member.name, limit_s=_OPENING_S, check=self._gate.check)
            except UnavailableError:
                if member == self._crew.holders[role] or not has_ended(answer):
                    raise  # one that is slow may take over yet, without the sources
                continue  # a member that has ended: the one that replaces it opens all
            if found != {s: known[s] for s in sources}:
                raise StateError(
                    f"{member.name} found other data than the plane was opened with: {found} now, "
                    f"{ {s: known[s] for s in sources} } then; keep the files of a run as they are"
                )

    def _hand_over(self, sources: Sequence[int], role: str) -> None:
        crew, before = self._crew, self._roles_of(sources)
        command = HandedOver(sources=tuple(sources))
        for old in before:
            self._ask(crew.holders[old], lambda actor: actor.hand_over.remote(command))
        self._keeper.move(sources, role)
        self._wait(
            lambda: all(s in crew.serving and crew.serving[s].role == role for s in sources),
            f"{role} to take over {len(sources)} sources",
        )
        self._wait_for_constructors(sources, role)
        self._drop(sources, before)
        _LOG.info(
            "%s has dropped %d sources, which %s serves", ", ".join(before), len(sources), role
        )

    def _roles_of(self, sources: Sequence[int]) -> list[str]:
        wanted = set(sources)
        return [role for role, each in self._crew.sources_of.items() if wanted.intersection(each)]

    def _wait_for_constructors(self, sources: Sequence[int], role: str) -> None:
        """Wait until no constructor asks another loader for the sources; one that is lost is followed to the next."""
        waiting = set(self._crew.dp_ranks_of)
        for _ in range(int(_OPENING_S / _TURN_S)):
            for name in sorted(waiting):
                actor = self._crew.holding(name)
                try:
                    asked = answer_to(
                        actor.asks.remote(tuple(sources)), name, check=self._gate.check
                    )
                except UnavailableError as error:
                    self._gate.check()
                    _LOG.debug("%s does not say whom it asks: %s", name, error)
                    continue
                if all(loader.partition("+")[0] == role for loader in asked):
                    waiting.remove(name)
            if not waiting:
                return
            with self._crew.changed:
                self._crew.changed.wait(_TURN_S)
        raise UnavailableError(
            f"{', '.join(sorted(waiting))} did not hear of {role} within {_OPENING_S:.0f} s"
        )

    def _drop(self, sources: Sequence[int], roles: Sequence[str]) -> None:
        for member in list(self._crew.actors):
            if member.role in roles:
                self._ask(member, lambda actor: actor.drop.remote(tuple(sources)))

    def _ask(self, member: Member, call: Callable[[Any], Any]) -> None:
        """Call a method of a member and wait for its end; the successor of one that is lost begins anew."""
        actor = self._crew.actors.get(member)
        if actor is None:
            return
        try:
            answer_to(call(actor), member.name, check=self._gate.check)
        except UnavailableError as error:
            self._gate.check()
            _LOG.debug("%s was lost while sources were moved: %s", member.name, error)

    def _wait(self, done: Callable[[], bool], what: str) -> None:
        """Wait until something holds that the keeper brings about."""
        for _ in range(int(_OPENING_S / _TURN_S)):
            self._gate.check()
            with self._crew.changed:
                if self._crew.changed.wait_for(done, _TURN_S):
                    return
        raise UnavailableError(f"waited {_OPENING_S:.0f} s for {what}; it goes on as it was")

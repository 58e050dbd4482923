"""Moves sources between the loaders of a running plane. A move changes nothing in the batches of ranks.

A move is the hand-over of a lost loader (design page 0009), but with the old loader alive::

    new one opens ──▶ reads what the old one holds ──▶ old one answers for what the new one reads
      ──▶ planner: TakeOver, ReadAhead to the new one ──▶ constructors ask it ──▶ old one drops the sources

A move that fails before the keeper begins it has changed nothing. After that, the sources belong to the new loader, and
if a member is lost, the roster hands its role's sources over. A move that then takes too long is not undone: it
continues, and the old loader drops the sources when the move is complete.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from omniload.actors.gate import Gate
from omniload.actors.ray.answers import answer_to
from omniload.actors.ray.crew import Crew
from omniload.actors.ray.keeper import Keeper
from omniload.actors.ray.layout import PLANNER
from omniload.actors.ray.scaling.opening import OPENING_S, open_in_all
from omniload.base.errors import StateError, UnavailableError
from omniload.base.log import get_logger
from omniload.base.units import counted
from omniload.machine.messages import HandedOver
from omniload.machine.roster.members import Member

__all__ = ["MoveUnderWayError", "Mover"]

_NAMES_SHOWN = 3
_TURN_S = 0.2
_ASKS_S = 2.0
"""Longest wait for a constructor to report which loader it asks; the question is repeated later."""
_READS_FIRST_S = 10.0
"""Longest time in which the new loader reads, before a move, samples that the old one holds. It is shorter than an edit
of the mix waits for its turn: if a store is unavailable, such reads time out without a move."""
_ROUNDS, _SHORT_S = 6, 0.3
"""Most rounds of that reading, each for what has become necessary since; a round of so few seconds is the last."""
_LOG = get_logger(__name__)


class MoveUnderWayError(UnavailableError):
    """Sources belong to another loader from now on, but not every role that asks for them knows it yet."""


class Mover:
    """Adds loaders to a crew, moves sources between loaders, and retires loaders without sources. For one thread."""

    def __init__(self, crew: Crew, keeper: Keeper, gate: Gate) -> None:
        self._crew, self._keeper, self._gate = crew, keeper, gate
        self._leaving = _Leaving(crew, gate)

    def split(self, sources: Sequence[int], reads: int) -> str:
        """Move sources to a new loader that reads ``reads`` at once; return the role of the loader.

        Raises:
            MoveUnderWayError: The sources belong to the new loader from now on, but not every role knows it yet.
            OmniloadError: The loader could not be started or could not open the sources; nothing has changed.
        """
        with self._turn(f"{self._named(sources)} move to a loader that is added"):
            role = self._crew.add_loader(reads)
            # Set before any member starts, so that members that start meanwhile open these sources too.
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
        """Move sources to another existing loader.

        Raises:
            MoveUnderWayError: The sources belong to the other loader from now on, but not every role knows it yet.
            OmniloadError: The loader could not open the sources as they were first found; nothing has changed.
        """
        with self._turn(f"{self._named(sources)} move to {role}"):
            self._crew.coming = dict.fromkeys(sources, role)
            try:
                open_in_all(self._crew, sources, role, self._gate.check)
                self._hand_over(sources, role)
            except BaseException:
                if not set(sources) & set(self._crew.sources_of[role]):
                    # The role may have served some of them before an earlier move, and may still be asked for them.
                    self._leaving.leave(sources, [role])
                    self._leaving.drop()
                raise
            finally:
                self._crew.coming = {}

    def retire(self, role: str) -> None:
        """End a loader that has no source any more.

        Raises:
            StateError: The loader has sources, or a role may still ask it for a source.
            UnavailableError: Another change of the plane takes longer than the limit of a wait.
        """
        self.clean_up()
        with self._turn(f"{role} ends"):
            if left := self._crew.sources_of[role]:
                raise StateError(f"{role} serves {len(left)} sources; move them first")
            # Constructors that do not know of a move still ask this loader, and would notice its end only late.
            if self._leaving.answers(role):
                raise StateError(
                    f"{role} still answers for sources that were moved; end it once no constructor asks it"
                )
            self._keeper.retire(role)

    def clean_up(self) -> None:
        """Have loaders drop moved sources that no role asks them for any more, without waiting."""
        if not self._leaving.is_due():
            return
        try:
            with self._turn("loaders drop sources that were moved", limit_s=0.0):
                self._leaving.drop()
        except UnavailableError as error:
            self._gate.check()
            _LOG.debug("%s", error)  # the next look tries again

    @contextmanager
    def _turn(self, does: str, **limit: float) -> Iterator[None]:
        """Enter the plane, as the only thread that changes it; raises the same errors as ``Turn.taken``."""
        refused = "source loaders stay as they are"
        turn = self._crew.changing.taken(does, refused, check=self._gate.check, **limit)
        with self._gate.inside(), turn:
            yield

    def _named(self, sources: Sequence[int]) -> str:
        """Return the names of some sources for messages."""
        names = dict(enumerate(self._crew.spec.history.latest.names))
        # A source that was being added may be gone again.
        shown = ", ".join(repr(names.get(s, s)) for s in sources[:_NAMES_SHOWN])
        more = ", ..." * (len(sources) > _NAMES_SHOWN)
        return f"{counted(len(sources), 'source')} ({shown}{more})"

    def _wait_for_first(self, role: str) -> None:
        """Wait until an added role has a holder."""
        crew = self._crew
        self._wait(
            lambda: role in crew.holders or role not in crew.sources_of, f"the opening of {role}"
        )
        if role not in crew.sources_of:
            raise UnavailableError(f"{role} could not be started; the log of the keeper says why")

    def _hand_over(self, sources: Sequence[int], role: str) -> None:
        crew, before = self._crew, self._roles_of(sources)
        self._read_first(tuple(sources), role)
        command = HandedOver(sources=tuple(sources))
        # Before the new loader is asked: constructors may ask the old one for samples that only the new one has read.
        for old in before:
            self._leaving.tell(crew.holders[old], lambda actor: actor.hand_over.remote(command))
        self._take_up(self._keeper.move(sources, role), role)
        # From here on the sources have moved, even if a later action fails.
        self._leaving.leave(sources, before)
        try:
            self._wait_until_heard(sources)
        except UnavailableError as error:
            self._gate.check()
            raise MoveUnderWayError(
                f"{counted(len(sources), 'source')} went to {role}, and {error}; {', '.join(before)} answers "
                "for them until all have heard of it"
            ) from None
        self._leaving.drop()

    def _read_first(self, sources: tuple[int, ...], role: str) -> None:
        """Have a loader read the samples that coming steps need while the old loader still answers for the sources.

        Each round reads what has become necessary since the last one. The rounds stop at a limit because no move
        depends on them.
        """
        until_s = time.monotonic() + _READS_FIRST_S
        for _ in range(_ROUNDS):
            if (began_s := time.monotonic()) >= until_s:
                return
            try:
                asked = self._crew.holding(PLANNER).outstanding.remote(sources)
                outstanding = answer_to(asked, PLANNER, check=self._gate.check)
                left_s = until_s - began_s
                reading = self._crew.holding(role).take_over.remote(outstanding, waits_s=left_s)
                answer_to(reading, role, limit_s=left_s + _ASKS_S, check=self._gate.check)
            except UnavailableError as error:  # the planner or the loader is lost, or very late
                self._gate.check()
                _LOG.debug("%s has not read all that it takes over: %s", role, error)
                return
            if time.monotonic() - began_s < _SHORT_S:
                return

    def _take_up(self, taken: "Future[None]", role: str) -> None:
        """Wait until the keeper begins a move; a move that it has not begun in time is cancelled."""
        try:
            self._wait(taken.done, f"the beginning of a move to {role}")
        except BaseException:
            if taken.cancel():
                raise
        taken.result(OPENING_S)

    def _roles_of(self, sources: Sequence[int]) -> list[str]:
        wanted = set(sources)
        return [role for role, each in self._crew.sources_of.items() if wanted.intersection(each)]

    def _wait_until_heard(self, sources: Sequence[int]) -> None:
        """Wait until every role knows of the last move of the sources."""
        until_s = time.monotonic() + OPENING_S
        while waiting := self._leaving.unaware(sources):
            if time.monotonic() > until_s:
                raise UnavailableError(
                    f"{', '.join(waiting)} did not hear of it within {OPENING_S:.0f} s"
                )
            with self._crew.changed:
                self._crew.changed.wait(_TURN_S)

    def _wait(self, done: Callable[[], bool], what: str) -> None:
        """Wait until a condition is met that the keeper brings about."""
        for _ in range(int(OPENING_S / _TURN_S)):
            self._gate.check()
            with self._crew.changed:
                if self._crew.changed.wait_for(done, _TURN_S):
                    return
        raise UnavailableError(f"{what} took more than {OPENING_S:.0f} s")


@dataclass(frozen=True, slots=True)
class _Left:
    """Sources that loaders still answer for after a move."""

    sources: tuple[int, ...]
    roles: tuple[str, ...]
    """Loaders that served the sources before."""


class _Leaving:
    """Sources that loaders of a crew must drop. For the thread that has the turn of ``crew.changing``."""

    def __init__(self, crew: Crew, gate: Gate) -> None:
        self._crew, self._gate = crew, gate
        self._left: list[_Left] = []

    def leave(self, sources: Sequence[int], roles: Sequence[str]) -> None:
        """Note that loaders must drop these sources, except those that a loader owns when it drops them."""
        self._left.append(_Left(tuple(sources), tuple(roles)))

    def is_due(self) -> bool:
        """Return whether any source must be dropped."""
        return bool(self._left)

    def answers(self, role: str) -> bool:
        """Return whether a loader must still answer for sources that are not its own."""
        return any(role in each.roles for each in self._left)

    def unaware(self, sources: Sequence[int]) -> list[str]:
        """Return the roles that do not know of the last move and may still ask the sources' previous loaders."""
        crew = self._crew
        noted = [crew.noted_at.get(s, 0) for s in sources]
        if any(at < crew.moved_at.get(s, 0) for s, at in zip(sources, noted, strict=True)):
            return [PLANNER]  # the constructors learn of it from the planner
        unaware = []
        for name in sorted(crew.dp_ranks_of):
            try:
                answer = crew.holding(name).turns.remote(tuple(sources))
                known = answer_to(answer, name, limit_s=_ASKS_S, check=self._gate.check)
            except UnavailableError as error:  # the successor of a lost constructor is asked later
                self._gate.check()
                _LOG.debug("%s does not say what it knows: %s", name, error)
                unaware.append(name)
                continue
            # The name of the loader that a constructor asks is not enough, because a source may have come back.
            if any(turn < at for turn, at in zip(known, noted, strict=True)):
                unaware.append(name)
        return unaware

    def drop(self) -> None:
        """Have loaders drop moved sources that no role asks them for any more; keep the rest for later."""
        left, self._left = self._left, []
        for each in left:
            if self.unaware(each.sources):
                self._left.append(each)
                continue
            for role in each.roles:
                # A loader keeps a source that has come back to it meanwhile.
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
        """Call a method of a member and wait for its end; a lost member's successor starts without the sources."""
        actor = self._crew.actors.get(member)
        if actor is None:
            return
        try:
            answer_to(call(actor), member.name, check=self._gate.check)
        except UnavailableError as error:
            self._gate.check()
            _LOG.debug("%s was lost while sources were moved: %s", member.name, error)

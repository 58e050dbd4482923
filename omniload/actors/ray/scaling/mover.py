"""Moves sources between the loaders of a running plane. Nothing of what ranks get changes by it.

A move is the hand-over of a lost loader (design page 0009) with the old one alive::

    new one opens ──▶ reads what the old one holds ──▶ old one answers for what the new one reads
                  ──▶ planner: TakeOver, ReadAhead to the new one ──▶ constructors ask it ──▶ old one drops the sources

Before the keeper takes it up, a move that fails has changed nothing. From then on the sources
are the new one's: if a member is lost, the roster hands over what is its role's. A move that takes too
long after that is not undone: it goes on, and the old one drops the sources once it is through.
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
"""Longest wait for a constructor to say whom it asks; it is asked again."""
_READS_FIRST_S = 10.0
"""Longest time in which a loader reads what another holds before it has its sources; the rest it reads behind that.
Shorter than an edit of the mix waits for its turn: where a store is away, such reads end with no move."""
_ROUNDS, _SHORT_S = 6, 0.3
"""Rounds of that at most, each of what came to be needed in the last, and seconds of one that is the last of them."""
_LOG = get_logger(__name__)


class MoveUnderWayError(UnavailableError):
    """Sources are another loader's from now on, and not all who ask for them have heard of it yet."""


class Mover:
    """Adds loaders to a crew, moves sources between them and retires those that have none. For one thread."""

    def __init__(self, crew: Crew, keeper: Keeper, gate: Gate) -> None:
        self._crew, self._keeper, self._gate = crew, keeper, gate
        self._leaving = _Leaving(crew, gate)

    def split(self, sources: Sequence[int], reads: int) -> str:
        """Move sources to a loader that is added for them, and does so many reads at once; return its role.

        Raises:
            MoveUnderWayError: They are its sources from now on, though somebody has not heard of it.
            OmniloadError: It could not be started or could not open them; nothing has changed.
        """
        with self._turn(f"{self._named(sources)} move to a loader that is added"):
            role = self._crew.add_loader(reads)
            # Before anybody is started: who is started meanwhile opens them as well.
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
            MoveUnderWayError: They are its sources from now on, though somebody has not heard of it.
            OmniloadError: It could not open them as they were found first; nothing has changed.
        """
        with self._turn(f"{self._named(sources)} move to {role}"):
            self._crew.coming = dict.fromkeys(sources, role)
            try:
                open_in_all(self._crew, sources, role, self._gate.check)
                self._hand_over(sources, role)
            except BaseException:
                if not set(sources) & set(self._crew.sources_of[role]):
                    # It may be one that was left with an earlier move, and is asked yet.
                    self._leaving.leave(sources, [role])
                    self._leaving.drop()
                raise
            finally:
                self._crew.coming = {}

    def retire(self, role: str) -> None:
        """End a loader that has no source any more.

        Raises:
            StateError: It has some, or somebody may still ask it for one.
            UnavailableError: Another change of the plane takes longer than one waits.
        """
        self.clean_up()
        with self._turn(f"{role} ends"):
            if left := self._crew.sources_of[role]:
                raise StateError(f"{role} serves {len(left)} sources; move them first")
            # Constructors that have not heard of a move ask it yet; of one that has ended they ask elsewhere, late.
            if self._leaving.answers(role):
                raise StateError(
                    f"{role} still answers for sources that were moved; end it once all constructors ask others"
                )
            self._keeper.retire(role)

    def clean_up(self) -> None:
        """Have loaders drop what was moved from them, as soon as nobody asks them for it any more; wait for nobody."""
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
        """Be inside the plane, and the only one who changes it; raises as ``Turn.taken``."""
        refused = "source loaders stay as they are"
        turn = self._crew.changing.taken(does, refused, check=self._gate.check, **limit)
        with self._gate.inside(), turn:
            yield

    def _named(self, sources: Sequence[int]) -> str:
        """Return some sources for messages."""
        names = dict(enumerate(self._crew.spec.history.latest.names))
        # One that was being added may be gone again.
        shown = ", ".join(repr(names.get(s, s)) for s in sources[:_NAMES_SHOWN])
        more = ", ..." * (len(sources) > _NAMES_SHOWN)
        return f"{counted(len(sources), 'source')} ({shown}{more})"

    def _wait_for_first(self, role: str) -> None:
        """Wait for a role that was added to be held."""
        crew = self._crew
        self._wait(
            lambda: role in crew.holders or role not in crew.sources_of, f"the opening of {role}"
        )
        if role not in crew.sources_of:
            raise UnavailableError(f"{role} could not be started; the lines of the keeper say why")

    def _hand_over(self, sources: Sequence[int], role: str) -> None:
        crew, before = self._crew, self._roles_of(sources)
        self._read_first(tuple(sources), role)
        command = HandedOver(sources=tuple(sources))
        # Before the new one is asked: what it alone has read, constructors may ask the old one for.
        for old in before:
            self._leaving.tell(crew.holders[old], lambda actor: actor.hand_over.remote(command))
        self._take_up(self._keeper.move(sources, role), role)
        # From here on the sources have moved, whatever else fails.
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
        """Have a loader read what the steps to come need of sources while the one before it answers for them.

        Each time it reads what has come to be needed meanwhile. As far as it gets: no move depends on it.
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
        """Wait for the keeper to take a move up; one that it has not taken up in time it never will."""
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
        """Wait until everyone has heard of the last move of sources."""
        until_s = time.monotonic() + OPENING_S
        while waiting := self._leaving.unaware(sources):
            if time.monotonic() > until_s:
                raise UnavailableError(
                    f"{', '.join(waiting)} did not hear of it within {OPENING_S:.0f} s"
                )
            with self._crew.changed:
                self._crew.changed.wait(_TURN_S)

    def _wait(self, done: Callable[[], bool], what: str) -> None:
        """Wait until something holds that the keeper brings about."""
        for _ in range(int(OPENING_S / _TURN_S)):
            self._gate.check()
            with self._crew.changed:
                if self._crew.changed.wait_for(done, _TURN_S):
                    return
        raise UnavailableError(f"{what} took more than {OPENING_S:.0f} s")


@dataclass(frozen=True, slots=True)
class _Left:
    """Sources that loaders still answer for after they were moved."""

    sources: tuple[int, ...]
    roles: tuple[str, ...]
    """The loaders that served them."""


class _Leaving:
    """Sources that loaders of a crew are to drop. For the thread that has the turn of ``crew.changing``."""

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

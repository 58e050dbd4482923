"""Changes of a plane of actors, by take-overs and edits of the mix: which roles are told, and in which order."""

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from typing import Any

from omniload.actors.gate import Gate
from omniload.actors.ray.answers import answer_to, has_ended, log_failure, loss_of, plain_error
from omniload.actors.ray.crew import Crew
from omniload.actors.ray.errors.verdict import is_lost, may_live
from omniload.actors.ray.layout import PLANNER
from omniload.actors.ray.scaling.opening import Check, open_in_shadows
from omniload.base.errors import OmniloadError, UnavailableError
from omniload.base.log import get_logger
from omniload.machine.messages import ChangeAsked
from omniload.machine.roster.members import Member
from omniload.mix.config import MixConfig
from omniload.mix.edits.answers import EditRequest, EditTaken
from omniload.mix.edits.edit import AddSource, SkipShard
from omniload.mix.edits.edits_file import read_history
from omniload.mix.edits.history import History
from omniload.mix.edits.shards import shard_meant
from omniload.mix.fingerprint import SourceFacts

__all__ = ["HandingOver", "change_mix"]

_LOG = get_logger(__name__)


def change_mix(crew: Crew, gate: Gate, request: EditRequest) -> EditTaken:
    """Let the planner apply a change.

    Raises:
        OmniloadError: The change is refused, or a role was lost meanwhile; nothing has changed.
        UnavailableError: The planner was lost before it kept the edit; or it gave no answer, and may keep the edit yet;
            or another change took longer than an edit waits, and nothing has changed.
    """
    turn = crew.changing.taken(
        "another edit of the mix is carried out", "the mix was not changed", check=gate.check
    )
    with gate.inside(), turn:
        return _change(crew, request, gate.check)


def _change(crew: Crew, request: EditRequest, check: Check) -> EditTaken:
    asked = ChangeAsked(change=request.change, at=request.at)
    before: History = _answer_of(crew.holding(PLANNER).history.remote(), PLANNER, check)
    if isinstance(request.change, SkipShard):
        asked = replace(asked, change=_shard_meant_by(crew, request.change, before, check))
    if not isinstance(request.change, AddSource):
        return _have_taken_up(crew, asked, None, before, check)
    return _add_source(crew, asked, before, check)


def _answer_of(answer: Any, role: str, check: Check) -> Any:  # noqa: ANN401 -- as ``answer_to``
    """Wait for the answer of a role before the planner has kept anything.

    Raises:
        OmniloadError: As ``answer_to``; for a lost role the remedy is to ask again, not to end the job.
    """
    try:
        return answer_to(answer, role, check=check)
    except UnavailableError as error:
        raise _lost_meanwhile(role) if loss_of(answer) else error from None


def _lost_meanwhile(role: str) -> UnavailableError:
    return UnavailableError(
        f"the mix was not changed: {role} was lost during the change, and another one replaces it; ask again"
    )


def _shard_meant_by(crew: Crew, change: SkipShard, before: History, check: Check) -> SkipShard:
    """Let every loader look for a shard; return the change with the matching one."""
    serving = [role for role, sources in crew.sources_of.items() if sources]
    told = {role: crew.holding(role).look_for_shard.remote(change) for role in serving}
    found = [_answer_of(answer, role, check) for role, answer in told.items()]
    return shard_meant(change, before.latest.names, found)


def _add_source(crew: Crew, asked: ChangeAsked, before: History, check: Check) -> EditTaken:
    """Let the loader with the fewest sources open the new one; then tell constructors, then the planner."""
    number = len(before.latest.names)
    history = before.tried(asked.change, asked.at)
    _forget(crew, number)  # of an earlier change that failed
    serving = {name: sources for name, sources in crew.sources_of.items() if sources}
    role = min(serving, key=lambda name: len(serving[name]))
    beside = crew.sources_of[role][0]
    # First of all, so that a loader which replaces this one meanwhile opens the source as well.
    crew.spec = replace(crew.spec, edits=history.edits)
    crew.sources_of[role] = (*crew.sources_of[role], number)
    try:
        facts = _open_source(crew, role, number, history.latest, check)
    except BaseException:
        _restore(crew, before)
        raise
    return _have_taken_up(crew, replace(asked, facts=facts), beside, before, check)


def _restore(crew: Crew, history: History) -> None:
    """Reset the crew to these edits and their sources."""
    crew.spec = replace(crew.spec, edits=history.edits)
    _forget(crew, len(history.latest.names))


def _forget(crew: Crew, number: int) -> None:
    """Forget the sources from ``number`` on, so that no member opens them."""
    crew.facts.pop(number, None)
    with crew.changed:  # the keeper may note a take-over meanwhile
        crew.serving = {s: member for s, member in crew.serving.items() if s < number}
    for role, sources in crew.sources_of.items():
        crew.sources_of[role] = tuple(s for s in sources if s < number)


def _open_source(crew: Crew, role: str, number: int, mix: MixConfig, check: Check) -> SourceFacts:
    """Let a loader open a source, and tell constructors; return the facts about it."""
    member = crew.holders[role]
    facts: SourceFacts = _answer_of(crew.actors[member].open_also.remote(number, mix), role, check)
    crew.facts[number] = facts
    open_in_shadows(crew, role, number, mix, check)
    crew.note_serving(member, (number,))
    serving = crew.as_serving(member, (number,))
    # All are asked before any answer is awaited, so that they work concurrently.
    told = [crew.holding(name).know.remote(mix) for name in crew.dp_ranks_of]
    told += [crew.holding(name).replace_loader.remote(serving) for name in crew.dp_ranks_of]
    for answer in told:
        _answer_of(answer, "a data constructor", check)
    return facts


def _have_taken_up(
    crew: Crew, asked: ChangeAsked, beside: int | None, before: History, check: Check
) -> EditTaken:
    """Let the planner apply a change, and let members that are started from now on know it.

    If the planner is lost after it has kept the edit, its successor continues with the edit.
    """
    run_dir, mix = crew.spec.run_dir, crew.spec.mix
    told = crew.holding(PLANNER).change.remote(asked, beside)
    try:
        taken: EditTaken = answer_to(told, PLANNER, check=check)
    except UnavailableError as error:
        # Only up to this edit, because the successor may have kept a later one.
        kept = History(mix, read_history(run_dir, mix).edits[: len(before.edits) + 1])
        if kept.edits == before.edits or kept.edits[-1].change != asked.change:
            if not has_ended(told):
                raise  # it may keep the edit later, so the source stays open
            _restore(crew, before)  # it will not keep the edit any more
            raise _lost_meanwhile(PLANNER) from None
        _LOG.warning("the edit is kept despite this error: %s", error)
        step = kept.edits[-1].step
        taken = EditTaken.of(before, kept, step, step)  # how far it had planned is unknown
    except OmniloadError:  # refused, and earlier requests are settled as well
        _restore(crew, History(mix, read_history(run_dir, mix).edits))
        raise
    # An earlier requested source that no planner has reported is in none of them, and is not opened again.
    _restore(crew, History(mix, read_history(run_dir, mix).edits))
    return taken


class HandingOver:
    """Announces a new holder to the other roles. A new planner hears everything that a lost one did not pass on."""

    def __init__(self, crew: Crew, later: Callable[[Callable[[], None]], None]) -> None:
        """Tell the members of ``crew``; ``later`` has a call made in the keeper's thread."""
        self._crew, self._later = crew, later
        self._late: list[Callable[[], None]] = []
        """Messages to repeat: to a planner that has not handed over sources in time, or if a message was lost."""

    def to(self, member: Member) -> None:
        """Announce that a member holds its role."""
        with self._crew.changed:
            self._crew.holders[member.role] = member
            self._crew.changed.notify_all()
        if member.role == PLANNER:
            self._to_planner(member)
        elif member.role in self._crew.dp_ranks_of:
            self._to_constructor(member)
        else:
            self.sources(member, self._crew.sources_of[member.role])

    def _to_planner(self, member: Member) -> None:
        """Tell a planner that has begun about members that took over meanwhile, or while there was no planner."""
        _LOG.warning("%s plans from now on", member.name)
        for role in self._crew.dp_ranks_of:
            holder = self._crew.holders[role]
            if holder != self._crew.known_to_planner[role]:
                self._tell_planner(holder)
        for role, sources in self._crew.sources_of.items():
            loader = self._crew.holders.get(role)
            if loader is not None:
                self.sources(loader, [s for s in sources if self._crew.serving.get(s) != loader])

    def _to_constructor(self, member: Member) -> None:
        """Tell a constructor which loaders serve now; then let the planner tell it what to build."""
        _LOG.warning("%s builds from now on", member.name)
        of: dict[Member, list[int]] = {}
        for source, loader in self._crew.serving.items():
            of.setdefault(loader, []).append(source)
        for loader, sources in of.items():
            self._tell_constructor(member, loader, sources)
        self._tell_planner(member)

    def _tell_planner(self, member: Member) -> None:
        if not self._holds(member):
            return  # it was replaced meanwhile
        number, actor = list(self._crew.dp_ranks_of).index(member.role), self._crew.actors[member]
        told = self._crew.holding(PLANNER).replace_constructor.remote(number, actor, member.number)
        log_failure(told, PLANNER, f"hear of {member.name}")
        self._tell_again_if_lost(told, partial(self._tell_planner, member))

    def _tell_constructor(self, member: Member, loader: Member, sources: Sequence[int]) -> None:
        """Tell a constructor which loader serves sources, unless either was replaced meanwhile."""
        mine = [s for s in sources if self._crew.serving.get(s) == loader]
        if self._holds(member) and mine:
            serving = self._crew.as_serving(loader, mine)
            told = self._crew.actors[member].replace_loader.remote(serving)
            log_failure(told, member.name, f"hear of {loader.name}")
            self._tell_again_if_lost(told, partial(self._tell_constructor, member, loader, sources))

    def _tell_again_if_lost(self, told: Any, again: Callable[[], None]) -> None:  # noqa: ANN401 -- as above
        """Repeat a message to a member that may live, at the next look: it may not have heard, and is not replaced."""

        def heard(done: "Future[Any]") -> None:
            error = None if done.cancelled() else done.exception()
            if error is not None and may_live(error):
                self._later(partial(self._late.append, again))

        told.future().add_done_callback(heard)

    def sources(self, member: Member, sources: Sequence[int]) -> None:
        """Let the planner hand over the outstanding requests of sources; then tell the constructors."""
        if not sources:
            return
        serving = self._crew.as_serving(member, sources)
        _LOG.warning("%s now serves %d sources", member.name, len(serving.sources))
        planner = self._crew.holders[PLANNER]

        def tell(done: "Future[Any]") -> None:
            if (error := done.exception()) is None:
                self._later(partial(self._tell_constructors, member, serving.sources))
            elif may_live(error) or not is_lost(error):
                # Otherwise the next planner is told when it begins.
                late = plain_error(error, PLANNER)
                self._later(partial(self._note_late, planner, member, serving.sources, late))

        told = self._crew.actors[planner].replace_loader.remote(serving)
        told.future().add_done_callback(tell)

    def _note_late(
        self, planner: Member, member: Member, sources: Sequence[int], error: OmniloadError
    ) -> None:
        _LOG.warning("%s is not served by %s yet: %s", sources, member.name, error)
        # Any other error would recur.
        if isinstance(error, UnavailableError):
            self._late.append(partial(self._sources_again, planner, member, sources))

    def _sources_again(self, planner: Member, member: Member, sources: Sequence[int]) -> None:
        # If the loader has ended, its replacement is handed the sources, which takes as long as an outage.
        is_gone = member in self._crew.buried or not self._holds(member)
        if planner == self._crew.holders[PLANNER] and not is_gone:
            mine = self._crew.sources_of[member.role]
            self.sources(member, [s for s in sources if s in mine])

    def tell_again(self) -> None:
        """Repeat messages that were late or lost, because until then constructors ask a lost loader in vain.

        This happens at intervals and not at once, because a loader that has just died fails just as quickly again.
        """
        late, self._late = self._late, []
        for tell in late:
            tell()

    def _holds(self, member: Member) -> bool:
        return self._crew.holders.get(member.role) == member

    def _tell_constructors(self, member: Member, sources: Sequence[int]) -> None:
        if not self._holds(member):
            return  # it was replaced meanwhile
        # A source that was moved on meanwhile is announced by the next hand-over.
        sources = [s for s in sources if s in self._crew.sources_of[member.role]]
        self._crew.note_serving(member, sources)
        for role in self._crew.dp_ranks_of:
            self._tell_constructor(self._crew.holders[role], member, sources)

"""Changing the mix of a plane of actors: who opens a source that is added, and who hears of it."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from omniload.actors.gate import Gate
from omniload.actors.ray.answers import answer_to, has_ended
from omniload.actors.ray.crew import PLANNER, Crew
from omniload.base.errors import StateError, UnavailableError
from omniload.base.log import get_logger
from omniload.machine.messages import ChangeAsked
from omniload.mix.config import MixConfig
from omniload.mix.edits.answers import EditRequest, EditTaken
from omniload.mix.edits.edit import AddSource, SkipShard
from omniload.mix.edits.edits_file import read_history
from omniload.mix.edits.history import History
from omniload.mix.edits.shards import shard_meant
from omniload.mix.fingerprint import SourceFacts

__all__ = ["changed_by"]

_NAMES_SHOWN = 3
_TURN_S = 20.0
"""Shorter than whoever asks waits for an answer: what is refused is not taken up later."""
_LOG = get_logger(__name__)


def changed_by(crew: Crew, gate: Gate, request: EditRequest) -> EditTaken:
    """Have the planner take a change up.

    Raises:
        OmniloadError: It is refused, or a role was lost meanwhile; nothing has changed.
        UnavailableError: The planner is lost, and has kept nothing, or gave no answer: it may keep the edit yet. Or
            source loaders are changing for longer than an edit waits, and nothing has changed.
    """
    with gate.inside(), _turn(crew):
        return _changed(crew, request)


@contextmanager
def _turn(crew: Crew) -> Iterator[None]:
    """Be the only one who changes the crew."""
    if not crew.changing.acquire(timeout=_TURN_S):
        names, coming = crew.spec.history.latest.names, dict(crew.coming)
        moved = ", ".join(
            f"{names[s]!r} to {role}" for s, role in list(coming.items())[:_NAMES_SHOWN]
        )
        what = f"{len(coming)} sources move ({moved})" if coming else "source loaders change"
        raise UnavailableError(
            f"the mix was not changed: {what}, which has not ended within {_TURN_S:.0f} s; ask again once it has"
        )
    try:
        yield
    finally:
        crew.changing.release()


def _changed(crew: Crew, request: EditRequest) -> EditTaken:
    asked = ChangeAsked(change=request.change, at=request.at)
    before: History = answer_to(crew.holding(PLANNER).history.remote(), PLANNER)
    if isinstance(request.change, SkipShard):
        asked = replace(asked, change=_looked_for(crew, request.change, before))
    if not isinstance(request.change, AddSource):
        return _taken(crew, asked, None, before)
    return _added(crew, asked, before)


def _looked_for(crew: Crew, change: SkipShard, before: History) -> SkipShard:
    """Have every loader look for a shard; return the change with the one that is meant."""
    serving = [role for role, sources in crew.sources_of.items() if sources]
    told = {role: crew.holding(role).look_for_shard.remote(change) for role in serving}
    found = [answer_to(answer, role) for role, answer in told.items()]
    return shard_meant(change, before.latest.names, found)


def _added(crew: Crew, asked: ChangeAsked, before: History) -> EditTaken:
    """Have the loader with the fewest sources open one more; then tell constructors, then the planner."""
    number, asks_planner = len(before.latest.names), False
    history = before.edited(asked.change, asked.at or before.edited_to)
    _forget(crew, number)  # of a change that came to nothing
    serving = {name: sources for name, sources in crew.sources_of.items() if sources}
    role = min(serving, key=lambda name: len(serving[name]))
    beside = crew.sources_of[role][0]
    # First of all: a loader that takes this one's place meanwhile opens the source as well.
    crew.spec = replace(crew.spec, edits=history.edits)
    crew.sources_of[role] = (*crew.sources_of[role], number)
    try:
        facts = _opened(crew, role, number, history.latest)
        asks_planner = True
        return _taken(crew, replace(asked, facts=facts), beside, before)
    except BaseException as error:
        # A planner that gives no answer may keep the edit later: the source stays open.
        if not (asks_planner and isinstance(error, UnavailableError)):
            crew.spec = replace(crew.spec, edits=before.edits)
            _forget(crew, number)
        raise


def _forget(crew: Crew, number: int) -> None:
    """Have nobody open the source of a number, and those after it."""
    crew.facts.pop(number, None)
    crew.serving = {s: member for s, member in crew.serving.items() if s < number}
    for role, sources in crew.sources_of.items():
        crew.sources_of[role] = tuple(s for s in sources if s < number)


def _opened(crew: Crew, role: str, number: int, mix: MixConfig) -> SourceFacts:
    """Have a source opened, and constructors know of it; return what was found."""
    member = crew.holders[role]
    facts: SourceFacts = answer_to(crew.actors[member].open_also.remote(number, mix), role)
    crew.facts[number] = facts
    _stand_by(crew, role, number, mix)
    crew.note_serving(member, (number,))
    serving = crew.as_serving(member, (number,))
    told = [crew.holding(name).know.remote(mix) for name in crew.dp_ranks_of]
    told += [crew.holding(name).replace_loader.remote(serving) for name in crew.dp_ranks_of]
    for answer in told:
        answer_to(answer, "a data constructor")
    return facts


def _taken(crew: Crew, asked: ChangeAsked, beside: int | None, before: History) -> EditTaken:
    """Have the planner take a change up, and members that are started from now on know it.

    A planner may be lost after it has kept the edit; the one after it goes on with what was kept.
    """
    run_dir, mix = crew.spec.run_dir, crew.spec.mix
    try:
        told = crew.holding(PLANNER).change.remote(asked, beside)
        taken: EditTaken = answer_to(told, PLANNER)
    except UnavailableError as error:
        kept = History(mix, read_history(run_dir, mix).edits[: len(before.edits) + 1])
        if kept.edits == before.edits or kept.edits[-1].change != asked.change:
            raise
        _LOG.warning("the edit was kept all the same: %s", error)
        step = kept.edits[-1].step
        taken = EditTaken.of(before, kept, step, step)  # how far it had planned, it no longer says
    crew.spec = replace(crew.spec, edits=read_history(run_dir, mix).edits)
    return taken


def _stand_by(crew: Crew, role: str, number: int, mix: MixConfig) -> None:
    """Have those who may take the loader's place open the source too; nobody will ask one that has ended.

    Raises:
        OmniloadError: One that lives could not open it in time, or found other data.
    """
    others = [m for m in list(crew.actors) if m.role == role and m != crew.holders[role]]
    told = {m: crew.actors[m].open_also.remote(number, mix) for m in others}
    for other, answer in told.items():
        try:
            found = answer_to(answer, other.name)
        except UnavailableError as error:
            if not has_ended(answer):
                raise  # it may take over yet, without the source
            _LOG.debug("%s did not open source %d: %s", other.name, number, error)
            continue
        if found != crew.facts[number]:
            raise StateError(
                f"source {mix.names[number]!r} changes while it is added: {other.name} found {found}, its holder "
                f"{crew.facts[number]}; add it once its files stay as they are"
            )

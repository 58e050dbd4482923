"""Changing the mix of a plane of actors: who opens a source that is added, and who hears of it."""

from dataclasses import replace

from omniload.actors.gate import Gate
from omniload.actors.plane import PlaneSpec
from omniload.actors.ray.answers import answer_to
from omniload.actors.ray.crew import PLANNER, Crew
from omniload.base.errors import StateError, UnavailableError
from omniload.base.log import get_logger
from omniload.machine.messages import ChangeAsked
from omniload.mix.config import MixConfig
from omniload.mix.edits.answers import EditRequest, EditTaken
from omniload.mix.edits.edit import AddSource
from omniload.mix.edits.history import History

__all__ = ["changed_by"]

_LOG = get_logger(__name__)


def changed_by(crew: Crew, gate: Gate, request: EditRequest) -> EditTaken:
    """Have the planner take a change up.

    Raises:
        OmniloadError: It is refused, or a role was lost meanwhile; nothing has changed.
    """
    with gate.inside():
        return _changed(crew, request)


def _changed(crew: Crew, request: EditRequest) -> EditTaken:
    planner = crew.holding(PLANNER)
    asked = ChangeAsked(change=request.change, at=request.at)
    if not isinstance(request.change, AddSource):
        taken: EditTaken = answer_to(planner.change.remote(asked, None), PLANNER)
        _keep(crew, taken)
        return taken
    history: History = answer_to(planner.history.remote(), PLANNER)
    return _added(crew, asked, history.edited(request.change, request.at or 0))


def _added(crew: Crew, asked: ChangeAsked, history: History) -> EditTaken:
    """Have the loader with the fewest sources open one more; then tell constructors, then the planner."""
    mix, number = history.latest, len(history.latest.names) - 1
    role = min(crew.sources_of, key=lambda name: len(crew.sources_of[name]))
    beside, before = crew.sources_of[role], crew.spec
    # First of all: a loader that takes this one's place meanwhile opens the source as well.
    crew.spec = replace(before, edits=history.edits)
    crew.sources_of[role] = (*beside, number)
    try:
        member = crew.holders[role]
        facts = answer_to(crew.actors[member].open_also.remote(number, mix), role)
        crew.facts[number] = facts
        _stand_by(crew, role, number, mix)
        serving = crew.as_serving(member)
        told = [crew.holding(name).know.remote(mix.names) for name in crew.dp_ranks_of]
        told += [crew.holding(name).replace_loader.remote(serving) for name in crew.dp_ranks_of]
        for answer in told:
            answer_to(answer, "a data constructor")
        asked = replace(asked, facts=facts)
        taken: EditTaken = answer_to(crew.holding(PLANNER).change.remote(asked, beside[0]), PLANNER)
    except BaseException:
        crew.spec, crew.sources_of[role] = before, beside
        raise
    _keep(crew, taken)
    return taken


def _stand_by(crew: Crew, role: str, number: int, mix: MixConfig) -> None:
    """Have those who may take the loader's place open the source too."""
    others = [m for m in crew.actors if m.role == role and m != crew.holders[role]]
    told = {m: crew.actors[m].open_also.remote(number, mix) for m in others}
    for other, answer in told.items():
        try:
            found = answer_to(answer, other.name)
        except UnavailableError as error:  # it has ended: nobody will ask it
            _LOG.debug("%s did not open source %d: %s", other.name, number, error)
            continue
        if found != crew.facts[number]:
            raise StateError(
                f"source {mix.names[number]!r} changes while it is added: {other.name} found {found}, its holder "
                f"{crew.facts[number]}; add it once its files stay as they are"
            )


def _keep(crew: Crew, taken: EditTaken) -> None:
    """Have members that are started from now on know the edit."""
    spec: PlaneSpec = crew.spec
    crew.spec = replace(spec, edits=(*spec.edits[: taken.edit.revision - 1], taken.edit))

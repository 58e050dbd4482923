"""Members of a loader open sources, at their start or later, and each must find the same data as the first."""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

from omniload.actors.ray.answers import answer_to, has_ended
from omniload.actors.ray.crew import Crew
from omniload.actors.roles.first_look import as_it_is
from omniload.base.errors import StateError, UnavailableError, project_error
from omniload.base.log import get_logger
from omniload.machine.roster.members import Member, MemberEnded, MemberReady
from omniload.mix.config import MixConfig
from omniload.mix.fingerprint import SourceFacts, differences, source_parts

__all__ = ["OPENING_S", "Check", "event_of_opening", "open_in_all", "open_in_shadows"]

Check = Callable[[], None]
"""Raises once the plane is closed, because the closing would wait for a call that waits here."""
OPENING_S = 600.0
"""Longest wait for a loader to start and open sources; the plane continues meanwhile."""
_LOG = get_logger(__name__)


def event_of_opening(
    member: Member, done: "Future[Any]", facts: Mapping[int, SourceFacts], mix: MixConfig
) -> MemberReady | MemberEnded:
    """Return whether a loader found the known facts of its sources; a source that is being added may have none yet."""
    try:
        known = {s: facts[s] for s in done.result() if s in facts}
        now = {s: done.result()[s] for s in known}
    except Exception as error:  # noqa: BLE001 -- a future would swallow it, and the role would hang
        return MemberEnded(member, str(project_error(error, member.name)))
    if now == known:
        return MemberReady(member)
    why = "its sources have changed since the data plane was opened"
    return MemberEnded(member, f"{why}: {_changes(known, now, mix)}")


def _changes(
    then: Mapping[int, SourceFacts], now: Mapping[int, SourceFacts], mix: MixConfig
) -> str:
    """Return the sources for which other data was found, and the differences."""

    def parts(found: Mapping[int, SourceFacts]) -> dict[str, str]:
        named = {mix.names[source]: facts for source, facts in found.items()}
        each = [source_parts(name, mix.sources[name], facts) for name, facts in named.items()]
        return {part: digest for of_one in each for part, digest in of_one.items()}

    return "; ".join(differences(parts(then), parts(now), before="then"))


def open_in_shadows(crew: Crew, role: str, number: int, mix: MixConfig, check: Check) -> None:
    """Have the members that may take the loader's place open the source too; skip members that have ended.

    Raises:
        OmniloadError: A live member could not open the source in time or found other data, or ``check`` raised.
    """
    others = [m for m in list(crew.actors) if m.role == role and m != crew.holders[role]]
    # The holder has checked the source already, and the members' facts are compared with the holder's.
    told = {m: crew.actors[m].open_also.remote(number, mix, as_it_is) for m in others}
    for other, answer in told.items():
        try:
            found = answer_to(answer, other.name, check=check)
        except UnavailableError as error:
            if not has_ended(answer):
                raise  # the member may still take over, but without the source
            _LOG.debug("%s did not open source %d: %s", other.name, number, error)
            continue
        if found != crew.facts[number]:
            said = _changes({number: crew.facts[number]}, {number: found}, mix)
            raise StateError(
                f"source {mix.names[number]!r} changes while it is added, as {other.name} found: {said}; add it once "
                "its files no longer change"
            )


def open_in_all(crew: Crew, sources: Sequence[int], role: str, check: Check) -> None:
    """Have every member of a role open sources; members that start from now on open them anyway.

    Raises:
        OmniloadError: A live member could not open the sources in time or found other data, or ``check`` raised.
    """
    mix, known = crew.spec.history.latest, crew.facts
    told = {
        member: actor.open_more.remote(tuple(sources), mix)
        for member, actor in crew.actors.items()
        if member.role == role
    }
    for member, answer in told.items():
        try:
            found = answer_to(answer, member.name, limit_s=OPENING_S, check=check)
        except UnavailableError:
            if member == crew.holders[role] or not has_ended(answer):
                raise  # a slow member may still take over, but without the sources
            continue  # the member has ended, and its successor opens all sources
        if found != {s: known[s] for s in sources}:
            raise StateError(
                f"{member.name} found other data than the plane was opened with: "
                f"{_changes({s: known[s] for s in sources}, found, mix)}; keep the files of a run as they are"
            )

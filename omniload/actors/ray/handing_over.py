"""How a member of a role takes over: who is told of it, and in which order."""

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

from omniload.actors.ray.answers import is_lost, log_failure, plain_error
from omniload.actors.ray.crew import PLANNER, Crew
from omniload.base.errors import OmniloadError, UnavailableError
from omniload.base.log import get_logger
from omniload.machine.lost_roles import Member

__all__ = ["HandingOver"]

_LOG = get_logger(__name__)


class HandingOver:
    """Tells the others of a new holder. What a lost planner was told, and did not pass on, the next one is told."""

    def __init__(self, crew: Crew, later: Callable[[Callable[[], None]], None]) -> None:
        """Tell the members of ``crew``; ``later`` has a call made in the keeper's thread."""
        self._crew, self._later = crew, later

    def to(self, member: Member) -> None:
        """Have a member hold its role."""
        with self._crew.changed:
            self._crew.holders[member.role] = member
            self._crew.changed.notify_all()
        if member.role == PLANNER:
            self._planning(member)
        elif member.role in self._crew.dp_ranks_of:
            self._ranks(member)
        else:
            self.sources(member, self._crew.sources_of[member.role])

    def fail(self, error: OmniloadError) -> None:
        """Wake every rank that waits: the plane cannot go on."""
        _LOG.error("the data plane ends: %s", error)
        for role in (PLANNER, *self._crew.dp_ranks_of):
            log_failure(self._crew.holding(role).fail.remote(error), role, "pass on the failure")

    def _planning(self, member: Member) -> None:
        """Tell a planner, which has begun, of those who took over while it did, or while there was none."""
        _LOG.warning("%s plans from now on", member.name)
        for role in self._crew.dp_ranks_of:
            holder = self._crew.holders[role]
            if holder != self._crew.known_to_planner[role]:
                self._tell_planner(holder)
        for role, sources in self._crew.sources_of.items():
            loader = self._crew.holders.get(role)
            if loader is not None:
                self.sources(loader, [s for s in sources if self._crew.serving.get(s) != loader])

    def _ranks(self, member: Member) -> None:
        """Tell a constructor which loaders serve by now; then have the planner tell it what to build."""
        _LOG.warning("%s builds from now on", member.name)
        of: dict[Member, list[int]] = {}
        for source, loader in self._crew.serving.items():
            of.setdefault(loader, []).append(source)
        for loader, sources in of.items():
            serving = self._crew.as_serving(loader, sources)
            told = self._crew.actors[member].replace_loader.remote(serving)
            log_failure(told, member.name, f"hear of {loader.name}")
        self._tell_planner(member)

    def _tell_planner(self, member: Member) -> None:
        number, actor = list(self._crew.dp_ranks_of).index(member.role), self._crew.actors[member]
        told = self._crew.holding(PLANNER).replace_constructor.remote(number, actor, member.number)
        log_failure(told, PLANNER, f"hear of {member.name}")

    def sources(self, member: Member, sources: Sequence[int]) -> None:
        """Have the planner hand over what is outstanding of sources; then tell those who fetch."""
        if not sources:
            return
        serving = self._crew.as_serving(member, sources)
        _LOG.warning("%s serves %d sources from now on", member.name, len(serving.sources))
        planner = self._crew.holders[PLANNER]

        def tell(done: "Future[Any]") -> None:
            if (error := done.exception()) is None:
                self._later(partial(self._tell_constructors, member, serving.sources))
            elif not is_lost(error):  # else the next planner is told as it begins
                late = plain_error(error, PLANNER)
                self._later(partial(self._tell_again, planner, member, serving.sources, late))

        told = self._crew.actors[planner].replace_loader.remote(serving)
        told.future().add_done_callback(tell)

    def _tell_again(
        self, planner: Member, member: Member, sources: Sequence[int], error: OmniloadError
    ) -> None:
        """Tell a planner that was late once more: as long as it has not, constructors ask the lost loader in vain."""
        _LOG.warning("%s is not served by %s yet: %s", sources, member.name, error)
        # Any other error would come at once, and again; one that is late comes after a minute.
        is_late = isinstance(error, UnavailableError)
        if is_late and planner == self._crew.holders[PLANNER] and self._holds(member):
            self.sources(member, [s for s in sources if s in self._crew.sources_of[member.role]])

    def _holds(self, member: Member) -> bool:
        return self._crew.holders.get(member.role) == member

    def _tell_constructors(self, member: Member, sources: Sequence[int]) -> None:
        if not self._holds(member):
            return  # it was replaced meanwhile
        # Of a source that was moved on meanwhile, the next hand-over tells.
        sources = [s for s in sources if s in self._crew.sources_of[member.role]]
        self._crew.note_serving(member, sources)
        serving = self._crew.as_serving(member, sources)
        for role in self._crew.dp_ranks_of:
            told = self._crew.holding(role).replace_loader.remote(serving)
            log_failure(told, role, f"hear of {member.name}")

"""The planner as a Ray actor: opened or taking over, asked by ranks, and informed of replacements by the keeper."""

import os
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omniload.actors.heartbeat_board import FolderBoard
from omniload.actors.patience import heard_within, taken_within
from omniload.actors.plane import PlaneSpec, first_step_of
from omniload.actors.planner_journal import open_journal
from omniload.actors.planning import make_planner, make_successor
from omniload.actors.ray.actors import PresentActor
from omniload.actors.ray.hosts.beside_ranks import RanksOn
from omniload.actors.ray.hosts.boards import HostsBoard
from omniload.actors.ray.hosts.rank_claims import LostRanks, claim_for_guest, watch_unheard
from omniload.actors.ray.layout import ranks_with_threads, require_threads
from omniload.actors.ray.links.of_constructor import Loaders, Serving
from omniload.actors.ray.links.of_planner import RayConstructorLink, RayLoaderLinks
from omniload.actors.ray.release import Release
from omniload.actors.roles.planned_counts import COUNTED
from omniload.actors.roles.planner import PlannerShell
from omniload.actors.roles.planner_metrics import serve_metrics
from omniload.base.errors import OmniloadError
from omniload.base.state import JsonObject
from omniload.machine.messages import ChangeAsked, ResizeAsked, TakeOver
from omniload.machine.progress import Progress
from omniload.mix.edits.answers import EditTaken
from omniload.mix.edits.history import History
from omniload.mix.fingerprint import SourceFacts
from omniload.mix.journal.journal import Journal
from omniload.mix.journal.room import Room
from omniload.plan.world import World, WorldRank

__all__ = ["PlannerActor", "PlannerOpening"]

Release.own()  # now, because roles are forked from a process that has loaded this module

_TAKE_OVER_S = 60.0
"""Longest wait for a loader to accept a take-over; it reads the samples afterwards."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannerOpening:
    """The arguments with which a planner begins."""

    spec: PlaneSpec
    """The run, as it was opened."""
    facts: Sequence[SourceFacts]
    """Facts about each source."""
    loaders: Loaders
    constructors: Sequence[tuple[Any, Sequence[int], int]]
    """Data constructors, each with its data-parallel ranks and its number of earlier lives."""
    folder: Path
    """Folder of the journal."""
    namespace: str
    """Namespace of the plane's actors."""
    life: int
    """Number of planners before this one; it takes over from the last of them."""
    counted: float
    """First step that earlier planners have not counted, by heartbeats that were at most a second old."""
    roles_away: Mapping[str, Sequence[str]]
    """Roles of each other host that can report its ranks, if the ranks stay as they are."""


class PlannerActor(PresentActor):
    """The planner: methods for ranks come first, then those for changes of the mix, then those for the keeper.

    The first planner is opened by a method, for the same reason as loaders; later ones take over when they start.
    """

    def __init__(
        self, name: str, board: FolderBoard, logs: Path | None, opening: PlannerOpening | None
    ) -> None:
        """Start and post a heartbeat; with ``opening``, take over."""
        self._activity, self._board = self._appear(name, board, logs), board
        self._ahead_s: dict[tuple[str, str, int], float] = {}
        """Upper bound of how far the clock here is ahead of each guest's, from its quickest message."""
        self._ranks_on = RanksOn()
        self._failure: OmniloadError | None = None
        self._closing = threading.Event()
        if opening is not None:
            # Ranks find the planner by its name, and Ray lets none of their calls in before this ends.
            try:
                self.open(opening)
            except OmniloadError as error:
                self._failure = error

    def open(self, opening: PlannerOpening) -> None:
        """Begin to plan; once and before any other call."""
        os.environ.update(opening.spec.passed_on)
        spec, life = opening.spec, opening.life
        journal: Journal | None
        if life:
            room = Room()
            with self._activity.doing("takes the journal over") as room.says:
                planner, journal = make_successor(
                    spec, opening.facts, opening.folder, life=life, room=room
                )
        else:
            planner = make_planner(spec, opening.facts)
            durable = spec.run_dir is not None
            with self._activity.doing("opens the journal"):
                journal = open_journal(opening.folder, planner, durable=durable)
        # After the journal, so that a planner that is refused leaves the port to the one that is not.
        self._end_metrics = serve_metrics(spec.mix, self._told_board, goes_on=life > 0)
        self._first_step = first_step_of(spec)
        figures = {"restarts": spec.restarts, "lives": life + 1, COUNTED: opening.counted}
        self._activity.figures.note(**figures)
        self._links = RayLoaderLinks(opening.loaders)
        self._constructors = [RayConstructorLink(*told) for told in opening.constructors]
        self._ranks_served = min(
            # The minimum over all constructors, because joining ranks are dealt evenly.
            ranks_with_threads(spec, len(ranks))
            for _, ranks, _ in opening.constructors
        )
        self._shell = PlannerShell(
            planner,
            self._links.of,
            self._constructors,
            journal,
            self._activity,
            # Without a run folder, next to the journal, where it serves only planners of this plane.
            spec.run_dir or opening.folder,
        )
        self._shell.start()
        if life:
            # If ranks stay as they are, a stopped one may continue, and is never replaced.
            silent_s = spec.mix.runtime.silent_after if spec.mix.runtime.elastic else None
            board = HostsBoard(self._board, opening.namespace, opening.roles_away)
            lost = LostRanks(self._board.folder, board, silent_s)
            watch_unheard(self._shell.unheard, self._shell.lose, lost, self._closing)

    @property
    def _planning(self) -> PlannerShell:
        self.begun()  # callers of a planner that could not take over are told why
        return self._shell

    def first_step(self) -> int:
        """Return the step that planning started from."""
        self.begun()
        return self._first_step

    def taken(self, step: int, rank: WorldRank) -> None:
        """Note that a rank's trainer has the batch of ``step``."""
        self._planning.taken(step, rank)

    def state_at(self, step: int) -> JsonObject:
        """Return the state before ``step``."""
        return self._planning.state_at(step)

    def check(self) -> None:
        """Raise the error that ended the planning, if there is one; see ``PlannerShell.check``."""
        self._planning.check()

    def resize(self, asked: ResizeAsked) -> World:
        """Change the ranks; return the new world."""
        planning = self._planning
        require_threads(asked.dp, len(self._constructors), self._ranks_served)
        world = taken_within(planning.resize(asked), what="other ranks")
        self._board.forget_ranks(world.dp)
        return world

    def stands_on(self, dp_rank: int, generation: int, node: str) -> None:
        """Note a rank's node of Ray, if its data constructor may be there."""
        self._ranks_on.note(dp_rank, generation, node)

    def claim(self, name: str, guest: str) -> None:
        """Claim a rank for a process of another host; see ``claim_for_guest``."""
        claim_for_guest(self._board.folder, name, guest)

    def beat(self, now_s: float, told: JsonObject) -> None:
        """Post the heartbeat of another host's rank on the board here, in the time of the clock here."""
        progress = Progress.from_json(told)
        guest = progress.name, progress.host, progress.pid
        ahead_s = time.monotonic() - now_s
        self._ahead_s[guest] = ahead_s = min(ahead_s, self._ahead_s.get(guest, ahead_s))
        self._board.note(progress.moved(ahead_s))

    def forget(self, name: str) -> None:
        """Remove a rank of another host from the board, because it has another name now."""
        self._board.forget(name)

    def history(self) -> History:
        """Return the mix and its edits."""
        return self._planning.history()

    def change(self, asked: ChangeAsked, beside: int | None) -> EditTaken:
        """Change the mix; an added source is served by the loader of source ``beside``."""
        # Before the planner hears of it, because its first command for the new source needs a link to the loader.
        if beside is not None:
            self._links.add(len(self._planning.history().latest.names), beside)
        return taken_within(self._planning.change(asked))

    def begun(self) -> None:
        """Raise the error because of which this planner could not take over, if there is one."""
        if self._failure is not None:
            raise self._failure

    def released_to(self) -> int:
        """Return the first step that not every rank has taken."""
        return self._planning.released_to()

    def filled(self) -> dict[int, float]:
        """Return how full the read-ahead is; see ``PlannerShell.filled``."""
        return self._planning.filled()

    def outstanding(self, sources: Sequence[int]) -> TakeOver:
        """Return the command for a loader that would take sources over now."""
        return self._planning.outstanding(sources)

    def replace_loader(self, serving: Serving) -> None:
        """Let another loader take over sources; return when its samples may be requested."""
        taken_over = self._planning.replace_loader(
            serving.sources, lambda: self._links.follow(serving)
        )
        heard_within(_TAKE_OVER_S, taken_over, serving.name)

    def replace_constructor(self, number: int, actor: Any, life: int) -> None:  # noqa: ANN401 -- Ray's handle has no static type
        """Let a new life of a constructor build the steps under way."""
        planning, link = self._planning, self._constructors[number]
        planning.replace_constructor(number, lambda: link.lead_to(actor, life))

    def nodes_of_ranks(self) -> tuple[int, list[str | None]]:
        """Return the generation of the ranks, and the node of each data constructor's ranks; see ``RanksOn.of``."""
        world, count = self._planning.world(), len(self._constructors)
        served = [world.served_by(number, count).dp_ranks for number in range(count)]
        first = [link.dp_ranks for link in self._constructors]
        ranks_of = served if world.generation else first
        return world.generation, self._ranks_on.of(ranks_of, world.generation)

    def fail(self, error: OmniloadError) -> None:
        """End the planning with an error for every rank."""
        if self._failure is None:  # otherwise it has not begun, and reports that itself
            self._shell.fail(error)

    def close(self) -> None:
        """Stop planning and close the journal."""
        self._closing.set()
        if self._failure is None:
            self._shell.close()
            self._end_metrics()

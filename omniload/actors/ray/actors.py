"""The roles as Ray actors, and the planner's ways to them."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from omniload.actors.heartbeats import Activity, FolderBoard
from omniload.actors.plane import PlaneSpec, make_planner, open_journal
from omniload.actors.ray.environment import ray
from omniload.actors.ray.links import RayConstructorLink, RayLoaderLink, fetch_slices
from omniload.actors.roles.constructor import ConstructorShell
from omniload.actors.roles.loader import LoaderShell
from omniload.actors.roles.planner import PlannerShell
from omniload.actors.roles.planner_metrics import serve_metrics
from omniload.base.state import JsonObject
from omniload.machine.data_constructor import DataConstructor
from omniload.mix.fingerprint import SourceFacts

__all__ = ["ConstructorActor", "LoaderActor", "Loaders", "PlannerActor", "actor_of"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaders:
    """The source loaders of a plane."""

    of: Mapping[int, Any]
    """Actor of each source."""
    names: Mapping[Any, str]
    """Name of each actor as a role."""
    limit_s: float
    """Longest wait for the slices of one of them."""


def actor_of(shell: type, *, threads: int) -> Any:  # noqa: ANN401 -- Ray's decorated classes have no static type
    """Return the actor class of a shell whose methods run in so many threads."""
    # Not restarted by Ray: a restart would run __init__ again and lose what was held. The
    # supervisor starts the whole plane again from the last saved state instead.
    remote: Any = ray.remote
    return remote(max_restarts=0, num_cpus=0, max_concurrency=threads)(shell)


class LoaderActor(LoaderShell):
    """A source loader; its methods run in several threads.

    Sources are opened by a method, not by the constructor: an error in a constructor
    reaches callers as a dead actor, without what was wrong.
    """

    def __init__(self, name: str, board: FolderBoard) -> None:
        """Be there, so that processes start together, and be seen to be."""
        self._activity = Activity(name, reads=True)
        board.post(self._activity)

    def open(self, spec: PlaneSpec, sources: Sequence[int]) -> dict[int, SourceFacts]:
        """Open the sources, once and before any other call, and return what was found."""
        super().__init__(
            spec.mix,
            sources,
            base_dir=spec.base_dir,
            cache_dir=spec.cache_dir,
            activity=self._activity,
        )
        return self.facts()

    def pid(self) -> int:
        """Return the actor's process."""
        return os.getpid()


class ConstructorActor(ConstructorShell):
    """A data constructor that fetches from loader actors."""

    def __init__(
        self, machine: DataConstructor, loaders: Loaders, name: str, board: FolderBoard
    ) -> None:
        activity = Activity(name)
        super().__init__(
            machine,
            partial(fetch_slices, loaders.of, loaders.limit_s),
            activity,
            sorted(set(loaders.names.values())),
        )
        board.post(activity)

    def pid(self) -> int:
        """Return the actor's process."""
        return os.getpid()


class PlannerActor:
    """The planner. It is opened by a method for the reason that loaders are."""

    def __init__(self, board: FolderBoard) -> None:
        """Be there, and be seen to be."""
        self._activity = Activity("planner")
        board.post(self._activity)

    def open(
        self,
        spec: PlaneSpec,
        facts: Sequence[SourceFacts],
        loaders: Loaders,
        constructors: Sequence[Any],
    ) -> None:
        """Begin to plan; once and before any other call."""
        planner = make_planner(spec, facts)
        self._end_metrics = serve_metrics(spec.mix)
        self._first_step = planner.state.step
        links = {actor: RayLoaderLink(actor, name) for actor, name in loaders.names.items()}
        self._shell = PlannerShell(
            planner,
            lambda source: links[loaders.of[source]],
            [RayConstructorLink(actor, ranks) for actor, ranks in constructors],
            open_journal(spec.run_dir, planner),
            self._activity,
        )
        self._shell.start()

    def first_step(self) -> int:
        """Return the step that planning started from."""
        return self._first_step

    def taken(self, step: int, dp_rank: int, cp_rank: int) -> None:
        """Tell that a rank's trainer has the batch of ``step``."""
        self._shell.taken(step, dp_rank, cp_rank)

    def state_at(self, step: int) -> JsonObject:
        """Return the state before ``step``."""
        return self._shell.state_at(step)

    def check(self) -> None:
        """Raise what ended the planning, if anything did; see ``PlannerShell.check``."""
        self._shell.check()

    def pid(self) -> int:
        """Return the actor's process."""
        return os.getpid()

    def close(self) -> None:
        """Stop planning and close the journal."""
        self._shell.close()
        self._end_metrics()

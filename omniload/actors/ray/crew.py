"""The actors of a plane: how a member of each role is started, opened, told of others, and ended."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from omniload.actors.address import PlaneAddress
from omniload.actors.heartbeats import FolderBoard
from omniload.actors.plane import PlaneSpec
from omniload.actors.ray.actors import ConstructorActor, LoaderActor, PlannerActor, PlannerOpening
from omniload.actors.ray.environment import RayError, ray
from omniload.actors.ray.holders import Loaders, Serving
from omniload.actors.ray.layout import ranks_with_threads
from omniload.actors.ray.processes import HeldProcess, Process
from omniload.machine.data_constructor import DataConstructor
from omniload.machine.loader_groups import LoaderShare
from omniload.machine.roster import Member, Roster
from omniload.mix.fingerprint import SourceFacts

__all__ = ["PLANNER", "Crew"]

PLANNER = "planner"
_LEAST_LOADER_THREADS = 5
"""Four calls at once, and one that stays."""
_PLANNER_THREADS = 6


def _actor_of(shell: type, *, threads: int, node: str) -> Any:  # noqa: ANN401 -- Ray's decorated classes have no static type
    """Return the actor class of a shell whose methods run in so many threads, on a node."""
    # Not restarted by Ray: a restart would run __init__ again and lose what was held. The
    # supervisor starts the whole plane again from the last saved state instead.
    remote: Any = ray.remote
    here = NodeAffinitySchedulingStrategy(node_id=node, soft=False)
    options = {"max_concurrency": threads, "scheduling_strategy": here}
    return remote(max_restarts=0, num_cpus=0, **options)(shell)


class Crew:
    """Every actor of a plane by its member, and which member holds each role."""

    def __init__(
        self,
        spec: PlaneSpec,
        shares: Sequence[LoaderShare],
        address: PlaneAddress,
        node: str,
    ) -> None:
        """Begin with nobody.

        Args:
            spec: The run.
            shares: What each loader carries.
            address: Where the plane is.
            node: Node of this process, on which planner and loaders run.
        """
        self.spec, self.board = spec, FolderBoard(address.board)
        self._address, self._node = address, node
        self._shares = {f"loader-{i}": share for i, share in enumerate(shares)}
        self.sources_of = {name: share.sources for name, share in self._shares.items()}
        self.dp_ranks_of = {name: tuple(ranks) for name, ranks in address.dp_ranks_of.items()}
        self.actors: dict[Member, Any] = {}
        self.holders: dict[str, Member] = {}
        self.serving: dict[str, Member] = {}
        """Loaders that constructors may ask: the planner has handed over what is outstanding."""
        self.known_to_planner: dict[str, Member] = {}
        """Holders of roles when the planner of now began."""
        self.facts: dict[int, SourceFacts] = {}
        """What the first loaders found in each source; those after them must find the same."""
        self._processes: dict[Member, HeldProcess] = {}

    def roles(self) -> list[str]:
        """Return the names of all roles."""
        return [*self.sources_of, *self.dp_ranks_of, PLANNER]

    def roster(self) -> Roster:
        """Return who is to be replaced, and when, with the first member of each role as its holder."""
        runtime = self.spec.mix.runtime
        roles = dict.fromkeys(self.roles(), 0) | dict.fromkeys(self.sources_of, runtime.shadows)
        return Roster(roles=roles, silent_s=runtime.silent_after, stuck_s=runtime.stuck_after)

    def start(self, member: Member) -> Any:  # noqa: ANN401 -- Ray's handles have no static type
        """Start the process of a member; return its actor."""
        if member.role in self.sources_of:
            wanted = self._shares[member.role].threads + 1  # one stays
            threads = max(_LEAST_LOADER_THREADS, wanted)
            bare = _actor_of(LoaderActor, threads=threads, node=self._node)
            actor = bare.options(name=member.name).remote(
                member.name, self.board, self._address.logs
            )
        elif member.role in self.dp_ranks_of:
            actor = self._start_constructor(member)
        else:
            bare = _actor_of(PlannerActor, threads=_PLANNER_THREADS, node=self._node)
            opening = self._planner_opening(member) if member.number else None
            actor = bare.options(name=member.name).remote(
                member.name, self.board, self._address.logs, opening
            )
        self.actors[member] = actor
        return actor

    def _start_constructor(self, member: Member) -> Any:  # noqa: ANN401 -- as above
        mix, cp = self.spec.history.latest, self.spec.tree.size_of("cp")
        ranks = self.dp_ranks_of[member.role]
        machine = DataConstructor.of(mix, ranks, cp_size=cp)
        node = self._address.node_of(member.role, self._node)
        most = ranks_with_threads(self.spec, len(ranks))
        bare = _actor_of(ConstructorActor, threads=5 + 2 * most * cp, node=node)
        board = FolderBoard(self._address.board_of(member.role))
        return bare.options(name=member.name).remote(
            machine, self._loaders(self.serving), member.name, board, self._address.logs
        )

    def open_loader(self, member: Member) -> Any:  # noqa: ANN401 -- as above
        """Have a loader open its sources; return the answer to be, which is what it found."""
        return self.actors[member].open.remote(self.spec, self.sources_of[member.role])

    def open_planner(self, member: Member) -> Any:  # noqa: ANN401 -- as above
        """Have a planner begin; return the answer to be."""
        return self.actors[member].open.remote(self._planner_opening(member))

    def _planner_opening(self, member: Member) -> PlannerOpening:
        self.known_to_planner = dict(self.holders)
        return PlannerOpening(
            spec=self.spec,
            # Of a source that is being added, only once its loader has it open.
            facts=[self.facts[s] for s in sorted(self.facts)],
            loaders=self._loaders(self.holders),
            constructors=[
                (self.holding(name), ranks, self.holders[name].number)
                for name, ranks in self.dp_ranks_of.items()
            ],
            folder=self.spec.run_dir or self._address.board,
            life=member.number,
        )

    def _loaders(self, members: Mapping[str, Member]) -> Loaders:
        held = {name: members[name] for name in self.sources_of}
        return Loaders(
            of={
                s: self.actors[member]
                for name, member in held.items()
                for s in self.sources_of[name]
            },
            names={self.actors[member]: member.name for member in held.values()},
            lives={
                s: member.number for name, member in held.items() for s in self.sources_of[name]
            },
            limit_s=self.spec.mix.runtime.batch_timeout,
        )

    def as_serving(self, member: Member) -> Serving:
        """Return a loader as those who speak to it know it."""
        return Serving(
            sources=self.sources_of[member.role],
            actor=self.actors[member],
            name=member.name,
            life=member.number,
        )

    def holding(self, role: str) -> Any:  # noqa: ANN401 -- as above
        """Return the actor that holds a role."""
        return self.actors[self.holders[role]]

    def take_hold(self, member: Member, process: Process) -> None:
        """Hold the process of a member, to look at it and to end it; one of another machine is Ray's to end."""
        with suppress(ProcessLookupError):
            self._processes[member] = HeldProcess(process)

    def stopped(self) -> frozenset[str]:
        """Return the names of members whose process is stopped."""
        held = list(self._processes.items())
        return frozenset(member.name for member, process in held if process.is_stopped())

    def end(self, member: Member) -> None:
        """End a member for good, also one that is stopped; it may have ended already."""
        process = self._processes.pop(member, None)
        if process is not None:
            process.kill()
            process.close()
        actor = self.actors.get(member)
        if actor is not None:
            with suppress(RayError):
                ray.kill(actor, no_restart=True)
        self.board.forget(member.name)

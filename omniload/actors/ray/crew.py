"""The crew: the actors of a plane, how a member of each role is started, opened, informed of others, and ended."""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import count
from typing import Any

from omniload.actors.address import PlaneAddress
from omniload.actors.gate import Turn
from omniload.actors.heartbeat_board import FolderBoard
from omniload.actors.plane import PlaneSpec
from omniload.actors.ray.actors import ConstructorActor, LoaderActor
from omniload.actors.ray.answers import value_of, wait_for_ref
from omniload.actors.ray.environment import RayError, ray
from omniload.actors.ray.given.seats import Seats
from omniload.actors.ray.hosts.beside_ranks import Moves
from omniload.actors.ray.hosts.member_processes import MemberProcesses
from omniload.actors.ray.hosts.nodes import Team, nodes_seen, wait_for_room
from omniload.actors.ray.hosts.placing import Placing
from omniload.actors.ray.hosts.starting import Start, actor_of
from omniload.actors.ray.layout import PLANNER, ranks_with_threads
from omniload.actors.ray.links.of_constructor import Loaders, Serving
from omniload.actors.ray.planner_actor import PlannerActor, PlannerOpening
from omniload.actors.ray.processes import Process
from omniload.actors.roles.planned_counts import COUNTED
from omniload.base.clock import SystemClock
from omniload.machine.data_constructor import DataConstructor
from omniload.machine.loader_groups import ANSWERING, LoaderShare
from omniload.machine.roster.members import Member
from omniload.machine.roster.roster import Roster
from omniload.mix.fingerprint import SourceFacts
from omniload.mix.schema.places import PlaceConfig

__all__ = ["Crew", "pids_of"]

_LOADER_THREADS = ANSWERING + 1
"""Threads that answer, and one for the call that stays; reads have threads of their own."""
_PLANNER_THREADS = 6
_FOLLOWS_S = 10.0
"""Longest wait for the process of a member that takes over a role; starting one takes seconds."""
_TURN_S = 0.2
_BURIED_KEPT = 64
"""Number of ended members to remember, because an edit that has begun with one may still ask for it."""


class Crew:
    """Every actor of a plane by its member, and which member holds each role."""

    def __init__(
        self,
        spec: PlaneSpec,
        shares: Sequence[LoaderShare],
        address: PlaneAddress,
        node: str,
        processes: MemberProcesses,
    ) -> None:
        """Begin without members.

        Args:
            spec: The run.
            shares: The share of each loader.
            address: The plane's address.
            node: Node of this process, on which the planner runs; loaders and shadows may be on others.
            processes: Processes of members, once they are known.
        """
        self.spec, self.board = spec, FolderBoard(address.board)
        self._address, self._node, self.processes = address, node, processes
        self.place, self.seats = spec.mix.runtime.place, Seats()
        self.placing = Placing.of(node, self.place.loaders)
        """Node of each loader."""
        self.moves = Moves(node)
        """Node of each constructor whose ranks come and go."""
        self.follows_ranks = address.terms is not None and address.terms.is_given
        """Whether constructors move to the hosts of their ranks, which they do if nodes there outlive a rank."""
        self._numbers, self._turns = count(), count(1)
        self._reads: dict[str, int] = {}
        self.sources_of: dict[str, tuple[int, ...]] = {}
        """Sources that each loader should serve; a change replaces the whole mapping."""
        for share in shares:
            self.add_loader(share.reads, share.sources)
        self.coming: dict[int, str] = {}
        """Sources on their way to another loader, which opens them first."""
        self.changing = Turn()
        """Held during a change of the sources, or of the loaders that serve them."""
        self.changed = threading.Condition()
        """Notified once another member holds a role, or serves sources."""
        self.dp_ranks_of = {name: tuple(ranks) for name, ranks in address.dp_ranks_of.items()}
        self.actors: dict[Member, Any] = {}
        self.buried: list[Member] = []
        """Members in ``actors`` that have ended, the oldest first; their role may have no other member yet."""
        self.holders: dict[str, Member] = {}
        self.serving: dict[int, Member] = {}
        """The loader of each source that constructors may ask, because the planner has handed over its requests."""
        self.moved_at: dict[int, int] = {}
        """Turn of the last move of each source."""
        self.noted_at: dict[int, int] = {}
        """Turn in which the loader of a source was last announced; constructors that know it ignore earlier ones."""
        self.known_to_planner: dict[str, Member] = {}
        """Holders of roles when the present planner began."""
        self.facts: dict[int, SourceFacts] = {}
        """Facts that the first loaders found about each source; later loaders must find the same."""

    def place_at(self, place: PlaceConfig) -> None:
        """Place roles by ``place`` instead of by the mix; only before the first member is started."""
        self.place, self.placing = place, Placing.of(self._node, place.loaders)

    def roles(self) -> list[str]:
        """Return the names of all roles."""
        return [*self.sources_of, *self.dp_ranks_of, PLANNER]

    def appoint(self) -> None:
        """Let the first member of every role hold it, though none is started yet."""
        self.holders = {role: Member(role) for role in self.roles()}
        self.serving = {
            s: self.holders[role] for role, sources in self.sources_of.items() for s in sources
        }

    def add_loader(self, reads: int, sources: tuple[int, ...] = ()) -> str:
        """Add a loader with this many concurrent reads; return its role, whose name was never used before."""
        role = f"loader-{next(self._numbers)}"
        self._reads[role] = reads
        # A new dictionary each time, because other threads iterate over the one that they have.
        self.sources_of = {**self.sources_of, role: sources}
        return role

    def forget_loader(self, role: str) -> None:
        """Remove a loader whose members have all ended."""
        self.sources_of = {name: each for name, each in self.sources_of.items() if name != role}
        self.holders.pop(role, None)
        self.actors = {m: actor for m, actor in self.actors.items() if m.role != role}

    def move(self, sources: Sequence[int], role: str) -> None:
        """Assign sources to another loader; the hand-over tells constructors which loader to ask."""
        self.moved_at |= dict.fromkeys(sources, next(self._turns))
        self.sources_of = {
            name: tuple(s for s in each if s not in sources) + tuple(sources) * (name == role)
            for name, each in self.sources_of.items()
        }

    def note_serving(self, member: Member, sources: Sequence[int]) -> None:
        """Let constructors that are started from now on ask this loader for sources."""
        with self.changed:
            self.serving = {**self.serving, **dict.fromkeys(sources, member)}
            self.noted_at |= dict.fromkeys(sources, next(self._turns))
            self.changed.notify_all()

    def opened_by(self, role: str) -> tuple[int, ...]:
        """Return the sources that a member of a role opens: those of the role, and those that are moving to it."""
        coming = tuple(s for s, to in self.coming.items() if to == role)
        return (*self.sources_of[role], *coming)

    def wait_for_room(self) -> None:
        """Wait until there is room for the first members of the plane, including shadows; see ``nodes``."""
        team = Team(
            home=self._node,
            loaders=len(self.sources_of) * (1 + self.spec.mix.runtime.shadows),
            constructors=[self._address.node_of(name, self._node) for name in self.dp_ranks_of],
        )
        look = partial(nodes_seen, *self.place.groups())
        wait_for_room(self.place, team, look, SystemClock())

    def roster(self) -> Roster:
        """Return a roster with the first member of each role as its holder."""
        runtime = self.spec.mix.runtime
        roles = dict.fromkeys(self.roles(), 0) | dict.fromkeys(self.sources_of, runtime.shadows)
        return Roster(roles=roles, silent_s=runtime.silent_after, stuck_s=runtime.stuck_after)

    def start(self, member: Member) -> Any:  # noqa: ANN401 -- Ray's handles have no static type
        """Start the process of a member; return its actor."""
        if member.role in self.sources_of:
            start = self._start_of_loader(member)
            board = None if start.is_away else self.board
            bare = actor_of(LoaderActor, member.name, start)
            actor = bare.remote(member.name, board, self._address.logs)
        elif member.role in self.dp_ranks_of:
            actor = self._start_constructor(member)
        else:
            place, asked = self.seats.of(member, self._node, self.place.planner)
            start = self._starting(place, _PLANNER_THREADS, asked)
            bare = actor_of(PlannerActor, member.name, start)
            # Only for later planners: the first one is opened by a method, so that its error reaches the user.
            # Through the object store, because Ray's tables keep an actor's arguments, and variables may be secrets.
            opening = ray.put(self._planner_opening(member)) if member.number else None
            actor = bare.remote(member.name, self.board, self._address.logs, opening)
        self.actors = {**self.actors, member: actor}
        return actor

    def _starting(self, place: str, threads: int, asked: Mapping[str, float]) -> Start:
        """Return the start options of a member at a place."""
        return Start(
            place=place,
            threads=threads,
            asked=asked,
            namespace=self._address.namespace,
            variables=self.spec.mix.runtime.env.set,
        )

    def _start_of_loader(self, member: Member) -> Start:
        there, is_away = self.placing.place(member), self.placing.is_away(member)
        place = None if self.placing.is_stranded(member) else self.place.loaders
        asked = {} if place is None else place.asked()
        return replace(
            self._starting(there, _LOADER_THREADS, asked),
            reads=self._reads[member.role],
            is_away=is_away,
            # Not if the user chose the nodes: a member that cannot be there ends, and the next one is placed anew.
            is_soft=is_away and place is None,
        )

    def _start_constructor(self, member: Member) -> Any:  # noqa: ANN401 -- as above
        mix, cp = self.spec.history.latest, self.spec.tree.size_of("cp")
        ranks = self.dp_ranks_of[member.role]
        # The latest mix, because a plan may name sources that edits have added.
        machine = DataConstructor.of(mix, ranks, cp_size=cp)
        node, board = self._address.node_of(member.role, self._node), None
        if self.follows_ranks:
            node = self.moves.place(member)
        if not (is_away := member in self.moves.away()):
            board = FolderBoard(self._address.board_of(member.role))
        threads = 7 + 2 * ranks_with_threads(self.spec, len(ranks)) * cp
        place, asked = self.seats.of(member, node, self.place.constructors)
        start = replace(self._starting(place, threads, asked), is_away=is_away)
        bare = actor_of(ConstructorActor, member.name, start)
        return bare.remote(
            machine, self._loaders(self.serving), member.name, board, self._address.logs
        )

    def open_loader(self, member: Member) -> Any:  # noqa: ANN401 -- as above
        """Let a loader open its sources; return the future facts about them."""
        opened = self.opened_by(member.role)
        return self.actors[member].open.remote(self.spec, opened, member.number)

    def open_planner(self, member: Member) -> Any:  # noqa: ANN401 -- as above
        """Let a planner begin; return the future answer."""
        return self.actors[member].open.remote(self._planner_opening(member))

    def _planner_opening(self, member: Member) -> PlannerOpening:
        # Noted now: members that take over while the planner begins are announced to it afterwards.
        self.known_to_planner = dict(self.holders)
        return PlannerOpening(
            spec=self.spec,
            # A source that is being added is known only once its loader has opened it.
            facts=[self.facts[s] for s in sorted(self.facts)],
            loaders=self._loaders(
                {s: self.holders[role] for role, each in self.sources_of.items() for s in each}
            ),
            constructors=[
                (self.holding(name), ranks, self.holders[name].number)
                for name, ranks in self.dp_ranks_of.items()
            ],
            folder=self.spec.run_dir or self._address.board,
            namespace=self._address.namespace,
            life=member.number,
            counted=max(
                (b.figures.get(COUNTED, 0.0) for b in self.board.read().values()), default=0.0
            ),
            # If ranks come and go, ranks of other hosts report to the planner themselves.
            roles_away=(
                {}
                if self.spec.mix.runtime.elastic
                else self._address.roles_away_from(self._address.host)
            ),
        )

    def _loaders(self, members: Mapping[int, Member]) -> Loaders:
        return Loaders(
            of={s: self.actors[member] for s, member in members.items()},
            names={self.actors[member]: member.name for member in members.values()},
            roles={s: member.role for s, member in members.items()},
            turn=next(self._turns),
            limit_s=self.spec.mix.runtime.batch_timeout,
        )

    def as_serving(self, member: Member, sources: Sequence[int]) -> Serving:
        """Return the announcement that a loader serves sources, with a higher turn than all earlier ones."""
        return Serving(
            sources=tuple(sources),
            actor=self.actors[member],
            name=member.name,
            role=member.role,
            turn=next(self._turns),
        )

    def holding(self, role: str) -> Any:  # noqa: ANN401 -- as above
        """Return the actor that holds a role."""
        return self.actors[self.holders[role]]

    def take_hold(self, member: Member, process: Process, ended: Callable[[], None]) -> None:
        """Hold the process of a member; see ``MemberProcesses.take``."""
        self.seats.forget(member)
        is_elsewhere = member.role in self._address.host_of
        board = self._address.board_of(member.role) if is_elsewhere else None
        self.processes.take(member, process, board, ended)

    def end(self, member: Member, *, is_replaced: bool = False) -> None:
        """Make sure that a member never answers again, even if it is stopped; it may have ended already."""
        self.placing.end(member, is_replaced=is_replaced)
        self.moves.forget(member)
        self.seats.forget(member)
        if not self.processes.end(member):
            self._end_by_ray(member)

    def bury(self, member: Member) -> None:
        """Tell Ray, and the board of heartbeats, about the end of a member.

        This comes after everything else that its end requires, because Ray takes up to 25 ms and ranks are waiting.
        """
        self._end_by_ray(member)
        self.board.forget(member.name)
        self.buried = [*(each for each in self.buried if each != member), member]
        # A member that is gone stays the holder of its role, and the server of its sources, until there is another.
        used = {*self.holders.values(), *self.serving.values()}
        gone = {each for each in self.buried[:-_BURIED_KEPT] if each not in used}
        if gone:
            self.buried = [each for each in self.buried if each not in gone]
            self.actors = {m: actor for m, actor in self.actors.items() if m not in gone}

    def _end_by_ray(self, member: Member) -> None:
        if (actor := self.actors.get(member)) is not None:
            with suppress(RayError):
                ray.kill(actor, no_restart=True)


def pids_of(crew: Crew, check: Callable[[], None]) -> dict[str, int]:
    """Return the process id of every role; if its holder is lost, that of a replacement within some seconds.

    Roles without a holder by then, or whose process does not answer, are left out.

    Args:
        crew: The actors.
        check: Called several times a second; an error that it raises ends the wait.
    """
    until_s = time.monotonic() + _FOLLOWS_S
    found = {role: _pid_of(crew, role, until_s, check) for role in crew.roles()}
    return {role: pid for role, pid in found.items() if pid is not None}


def _pid_of(crew: Crew, role: str, until_s: float, check: Callable[[], None]) -> int | None:
    asked: Member | None = None
    answer: Any = None
    while (member := crew.holders.get(role)) is not None:
        if member != asked:
            # The role may be retired at this moment.
            if (actor := crew.actors.get(member)) is None:
                return None
            asked, answer = member, actor.pid.remote()
        if wait_for_ref(answer, _TURN_S, check):
            with suppress(RayError):  # it is lost
                pid: int = value_of(answer)
                return pid
        if time.monotonic() >= until_s:
            return None
        with crew.changed:
            crew.changed.wait(_TURN_S)
    return None

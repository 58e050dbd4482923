"""The actors of a plane: how a member of each role is started, opened, told of others, and ended."""

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
"""One stays; reads have threads of their own."""
_PLANNER_THREADS = 6
_FOLLOWS_S = 10.0
"""Longest wait for the process of a member that takes over a role: to start one takes seconds."""
_TURN_S = 0.2
_BURIED_KEPT = 64
"""Members that ended last: an edit that has begun with one may ask for it yet."""


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
        """Begin with nobody.

        Args:
            spec: The run.
            shares: What each loader carries.
            address: Where the plane is.
            node: Node of this process, on which the planner runs; loaders and shadows may be on others.
            processes: Those of members, once they are known.
        """
        self.spec, self.board = spec, FolderBoard(address.board)
        self._address, self._node, self.processes = address, node, processes
        self.place, self.seats = spec.mix.runtime.place, Seats()
        self.placing = Placing.of(node, self.place.loaders)
        """Which node each loader is on."""
        self.moves = Moves(node)
        """Which node each constructor is on whose ranks come and go."""
        self.follows_ranks = address.terms is not None and address.terms.is_given
        """Whether constructors move to the hosts of ranks: those have nodes that outlive a rank."""
        self._numbers, self._turns = count(), count(1)
        self._reads: dict[str, int] = {}
        self.sources_of: dict[str, tuple[int, ...]] = {}
        """Sources that each loader is to serve; a change makes another mapping."""
        for share in shares:
            self.add_loader(share.reads, share.sources)
        self.coming: dict[int, str] = {}
        """Sources on their way to another loader, which opens them first."""
        self.changing = Turn()
        """Held during a change of which sources there are, or which loader serves them."""
        self.changed = threading.Condition()
        """Notified once another member holds a role, or serves sources."""
        self.dp_ranks_of = {name: tuple(ranks) for name, ranks in address.dp_ranks_of.items()}
        self.actors: dict[Member, Any] = {}
        self.buried: list[Member] = []
        """Those of ``actors`` that have ended, the oldest first; a role may have no other yet."""
        self.holders: dict[str, Member] = {}
        self.serving: dict[int, Member] = {}
        """The loader of each source that constructors may ask: the planner has handed over what is outstanding."""
        self.moved_at: dict[int, int] = {}
        """Turn in which each source was moved last."""
        self.noted_at: dict[int, int] = {}
        """Turn in which the loader of a source was noted last: a constructor that knows of it asks none before."""
        self.known_to_planner: dict[str, Member] = {}
        """Holders of roles when the planner of now began."""
        self.facts: dict[int, SourceFacts] = {}
        """What the first loaders found in each source; those after them must find the same."""

    def place_at(self, place: PlaceConfig) -> None:
        """Have roles where this says, in the place of what the mix does; before the first is started."""
        self.place, self.placing = place, Placing.of(self._node, place.loaders)

    def roles(self) -> list[str]:
        """Return the names of all roles."""
        return [*self.sources_of, *self.dp_ranks_of, PLANNER]

    def add_loader(self, reads: int, sources: tuple[int, ...] = ()) -> str:
        """Have one loader more, which does so many reads at once; return its role, which was never that of another."""
        role = f"loader-{next(self._numbers)}"
        self._reads[role] = reads
        # Another dictionary each time: other threads go through the one they have.
        self.sources_of = {**self.sources_of, role: sources}
        return role

    def forget_loader(self, role: str) -> None:
        """Have a loader no more, of which every member has ended."""
        self.sources_of = {name: each for name, each in self.sources_of.items() if name != role}
        self.holders.pop(role, None)
        self.actors = {m: actor for m, actor in self.actors.items() if m.role != role}

    def move(self, sources: Sequence[int], role: str) -> None:
        """Have another loader serve sources from now on; the hand-over tells constructors which loader to ask."""
        self.moved_at |= dict.fromkeys(sources, next(self._turns))
        self.sources_of = {
            name: tuple(s for s in each if s not in sources) + tuple(sources) * (name == role)
            for name, each in self.sources_of.items()
        }

    def note_serving(self, member: Member, sources: Sequence[int]) -> None:
        """Have constructors that are started from now on ask a loader for sources."""
        with self.changed:
            self.serving = {**self.serving, **dict.fromkeys(sources, member)}
            self.noted_at |= dict.fromkeys(sources, next(self._turns))
            self.changed.notify_all()

    def opened_by(self, role: str) -> tuple[int, ...]:
        """Return the sources that a member of a role opens: those of the role, and those on their way to it."""
        coming = tuple(s for s, to in self.coming.items() if to == role)
        return (*self.sources_of[role], *coming)

    def wait_for_room(self) -> None:
        """Wait until there is room for the members that the plane is opened with, shadows too; see ``nodes``."""
        team = Team(
            home=self._node,
            loaders=len(self.sources_of) * (1 + self.spec.mix.runtime.shadows),
            constructors=[self._address.node_of(name, self._node) for name in self.dp_ranks_of],
        )
        look = partial(nodes_seen, *self.place.groups())
        wait_for_room(self.place, team, look, SystemClock())

    def roster(self) -> Roster:
        """Return who is to be replaced, and when, with the first member of each role as its holder."""
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
            # Only one that follows: the first is opened by a method, whose error says what is wrong with a run.
            # From the object store: Ray's tables keep what an actor is started with, and variables may be secrets.
            opening = ray.put(self._planner_opening(member)) if member.number else None
            actor = bare.remote(member.name, self.board, self._address.logs, opening)
        self.actors = {**self.actors, member: actor}
        return actor

    def _starting(self, place: str, threads: int, asked: Mapping[str, float]) -> Start:
        """Return how a member is started at a place."""
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
            # Not where a user says which nodes: a member that cannot be there ends, and the next is placed anew.
            is_soft=is_away and place is None,
        )

    def _start_constructor(self, member: Member) -> Any:  # noqa: ANN401 -- as above
        mix, cp = self.spec.history.latest, self.spec.tree.size_of("cp")
        ranks = self.dp_ranks_of[member.role]
        # The latest mix: it knows the sources that edits have added, of which a plan may name some.
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
        """Have a loader open its sources; return the answer to be, which is what it found."""
        opened = self.opened_by(member.role)
        return self.actors[member].open.remote(self.spec, opened, member.number)

    def open_planner(self, member: Member) -> Any:  # noqa: ANN401 -- as above
        """Have a planner begin; return the answer to be."""
        return self.actors[member].open.remote(self._planner_opening(member))

    def _planner_opening(self, member: Member) -> PlannerOpening:
        # Noted as it is told: of a member that takes over while it begins, it is told once it has.
        self.known_to_planner = dict(self.holders)
        return PlannerOpening(
            spec=self.spec,
            # Of a source that is being added, only once its loader has it open.
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
            # Where ranks come and go, those of other hosts tell the planner themselves.
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
        """Return a loader, with sources of it, as those who speak to it are told; later than all they were told."""
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
        """See to it that a member never speaks again, also one that is stopped; it may have ended already."""
        self.placing.end(member, is_replaced=is_replaced)
        self.moves.forget(member)
        self.seats.forget(member)
        if not self.processes.end(member):
            self._end_by_ray(member)

    def bury(self, member: Member) -> None:
        """Have Ray, and who reads heartbeats, know of the end of a member.

        Behind whatever else its end calls for, as Ray takes up to 25 ms: ranks wait for the next member.
        """
        self._end_by_ray(member)
        self.board.forget(member.name)
        self.buried = [*(each for each in self.buried if each != member), member]
        # One that is gone stays its role's holder, and who serves its sources, until another is.
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
    """Return the process of every role; of one whose holder is lost, that of the next member within some seconds.

    A role that nobody has by then is left out, as is one whose process does not answer.

    Args:
        crew: The actors.
        check: Called several times a second; what it raises ends the wait.
    """
    until_s = time.monotonic() + _FOLLOWS_S
    found = {role: _pid_of(crew, role, until_s, check) for role in crew.roles()}
    return {role: pid for role, pid in found.items() if pid is not None}


def _pid_of(crew: Crew, role: str, until_s: float, check: Callable[[], None]) -> int | None:
    asked: Member | None = None
    answer: Any = None
    while (member := crew.holders.get(role)) is not None:
        if member != asked:
            # Its role may be retired at this moment.
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

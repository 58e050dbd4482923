"""Shell of the Roster machine: watches the actors of a plane and replaces lost ones."""

import queue
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from contextlib import nullcontext, suppress
from functools import partial
from typing import Any, assert_never

from omniload.actors.gate import Gate
from omniload.actors.ray.answers import future_of, log_failure, why_ended
from omniload.actors.ray.changes import HandingOver
from omniload.actors.ray.crew import Crew
from omniload.actors.ray.hosts.relay import Relay
from omniload.actors.ray.layout import PLANNER
from omniload.actors.ray.processes import Process
from omniload.actors.ray.release import other_release
from omniload.actors.ray.scaling.opening import event_of_opening
from omniload.actors.ray.shadows import Shadows
from omniload.base.errors import OmniloadError, UnavailableError
from omniload.base.log import RoleLog, get_logger
from omniload.machine.roster.members import (
    Abandoned,
    EndMember,
    EndPlane,
    HandOver,
    Member,
    MemberEnded,
    MemberReady,
    MembersSeen,
    PlaceFound,
    RoleAdded,
    RoleRetired,
    RosterCommand,
    RosterEvent,
    StartMember,
    StepsReleased,
)
from omniload.machine.roster.roster import Roster
from omniload.machine.status import SkippedRecords
from omniload.machine.waiting import SlowCalls

__all__ = ["Keeper"]

_LOG = get_logger(__name__)
_LOOK_S = 0.25
_LOOK_AGAIN_S = 0.1
"""Interval of looks at a stopped process, which may continue."""
_CLOSE_S = 5.0


class Keeper:
    """Keeps every role of a plane held, in a thread of the process that opened it."""

    def __init__(
        self, crew: Crew, roster: Roster, shadows: Shadows, gate: Gate, log: RoleLog | None
    ) -> None:
        """Begin with the first members of the plane; nothing is watched before ``begin``."""
        self._crew, self._roster, self._shadows = crew, roster, shadows
        self._gate, self._log = gate, log
        self._events: queue.SimpleQueue[RosterEvent | Callable[[], None] | None] = (
            queue.SimpleQueue()
        )
        self._handing_over = HandingOver(crew, self._events.put)
        self._slow_calls, self._skipped = SlowCalls(), SkippedRecords()
        self._relay = Relay(crew.board, self._events.put)
        self._failure: OmniloadError | None = None
        self._asked_released: Any = None
        self._asked_nodes: Any = None
        self._thread = threading.Thread(target=self._run, name="omniload-keeper", daemon=True)

    def begin(self) -> None:
        """Watch the members, and start shadows."""
        for member in self._roster.members():
            self._watch(member)
        self._thread.start()

    def is_whole(self) -> bool:
        """Return whether every role is held and every shadow is ready, with its first blocks decoded."""
        return self._roster.is_whole() and self._shadows.have_decoded(self._roster.shadows())

    def check(self) -> None:
        """Return if lost roles are still replaced; roles that would report the plane's end may be lost with it.

        Raises:
            OmniloadError: The reason why no role is replaced any more.
        """
        if self._failure is not None:
            raise self._failure

    def add(self, role: str) -> None:
        """Start the first member of a loader that was added to the crew, and its shadows."""
        self._events.put(RoleAdded(role, self._crew.spec.mix.runtime.shadows))

    def move(self, sources: Sequence[int], role: str) -> "Future[None]":
        """Let the holder of a role serve sources that it has opened; other roles hear of it afterwards.

        Returns:
            A future that is done once the sources belong to the role; if it is cancelled before, nothing changes.
        """
        taken: Future[None] = Future()
        self._events.put(partial(self._move, tuple(sources), role, taken))
        return taken

    def retire(self, role: str) -> None:
        """End a loader that has no sources left."""
        self._events.put(partial(self._retire, role))

    def close(self) -> None:
        """Stop replacing members."""
        self._events.put(None)
        if self._thread.is_alive():
            self._thread.join(_CLOSE_S)

    def _run(self) -> None:
        with nullcontext() if self._log is None else self._log.speaking():
            self._keep()

    def _keep(self) -> None:
        event: RosterEvent | Callable[[], None] | None = None
        try:
            with self._gate.inside():
                self._carry(self._roster.begin())
                look_at_s = time.monotonic()
                while True:
                    try:
                        event = self._events.get(timeout=max(0.0, look_at_s - time.monotonic()))
                    except queue.Empty:
                        event = self._look()
                        look_at_s = event.now_s + (_LOOK_AGAIN_S if event.stopped else _LOOK_S)
                    if event is None:
                        return
                    if callable(event):
                        event()
                    else:
                        self._carry(self._roster.handle(event))
        except UnavailableError:
            return  # the plane is closed
        except Exception:  # noqa: BLE001 -- the outermost loop: the plane runs on until a role is lost
            _LOG.exception("lost roles of this data plane are not replaced any more")
            self._await_loss(event)

    def _await_loss(self, event: object) -> None:
        """Tell ranks about the first lost holder, perhaps lost by this event, as they would wait for a replacement."""
        while not (isinstance(event, MemberEnded) and event.member in self._crew.holders.values()):
            if (event := self._events.get()) is None:
                return
        why = f"{event.member.name} was lost ({event.why}), and no role is replaced after a fault of the keeper"
        with suppress(UnavailableError), self._gate.inside():
            self._fail(UnavailableError(f"{why}; start again from the last checkpoint"))

    def _look(self) -> MembersSeen:
        if self._asked_released is None:
            planner = self._crew.holding(PLANNER)
            self._asked_released = future_of(planner.released_to.remote(), PLANNER)
            self._asked_released.add_done_callback(self._hear_released)
        if self._crew.follows_ranks and self._asked_nodes is None:
            asked = self._crew.holding(PLANNER).nodes_of_ranks.remote()
            self._asked_nodes = future_of(asked, PLANNER)
            self._asked_nodes.add_done_callback(self._hear_nodes)
        # Members of this host write their heartbeats into the folder that is read below.
        elsewhere = (*self._crew.placing.away(), *self._crew.moves.away())
        away = {member.name: self._crew.actors[member] for member in elsewhere}
        self._relay.ask(away, now_s := time.monotonic())
        self._crew.processes.look(now_s, self._events.put)
        self._handing_over.tell_again()
        # Passed for all members of a role; the roster knows which one holds it.
        for member in self._crew.placing.crowded():
            found = PlaceFound(member, self._crew.placing.is_stranded(member))
            self._carry(self._roster.handle(found))
        beats = self._crew.board.read()
        self._shadows.lead(self._roster.shadows(), time.monotonic(), self._events.put)
        for line in (*self._slow_calls.see(beats), *self._skipped.see(beats)):
            _LOG.warning("%s", line)
        now_s = time.monotonic()
        return MembersSeen(
            now_s=now_s,
            # Without members of hosts that do not answer, because these may only be cut off.
            beats=self._crew.processes.beats(now_s) | beats,
            stopped=self._crew.processes.stopped(),
        )

    def _hear_released(self, done: "Future[int]") -> None:
        self._asked_released = None
        if done.exception() is None:
            self._events.put(StepsReleased(done.result()))

    def _hear_nodes(self, done: "Future[tuple[int, list[str | None]]]") -> None:
        self._asked_nodes = None
        if done.exception() is None:
            self._events.put(partial(self._follow_ranks, *done.result()))

    def _follow_ranks(self, generation: int, nodes: Sequence[str | None]) -> None:
        """Let constructors move to the nodes of their ranks."""
        of = dict(zip(self._crew.dp_ranks_of, nodes, strict=True))
        for member in self._crew.moves.wanted(self._crew.holders, generation, of):
            self._carry(self._roster.handle(PlaceFound(member, may_hold=True)))
            self._crew.moves.stay(member.role)

    def _carry(self, commands: Iterable[RosterCommand]) -> None:
        ended: list[Member] = []
        for command in commands:
            match command:
                case StartMember(member=member):
                    self._start(member)
                case EndMember(member=member, why=why):
                    is_replaced = self._roster.wants(member.role)
                    done = "is replaced" if is_replaced else "ends"
                    _LOG.warning("%s %s: %s", member.name, done, why)
                    self._end(member, is_replaced=is_replaced)
                    ended.append(member)
                case HandOver(member=member):
                    self._handing_over.to(member)
                case Abandoned(role=role, why=why):
                    _LOG.warning("%s is not added: %s", role, why)
                    with self._crew.changed:
                        self._crew.forget_loader(role)
                        self._crew.changed.notify_all()
                case EndPlane(why=why):
                    self._fail(UnavailableError(why))
                case _:
                    assert_never(command)
        for member in ended:
            self._crew.bury(member)

    def _fail(self, error: OmniloadError) -> None:
        """Wake every waiting rank, because the plane cannot go on."""
        _LOG.error("the data plane ends: %s", error)
        self._failure = error
        # Including members being started, because a holder may be lost by now and is not replaced any more.
        for member in self._roster.members():
            if member.role in (PLANNER, *self._crew.dp_ranks_of):
                told = self._crew.actors[member].fail.remote(error)
                log_failure(told, member.name, "pass on the failure")

    def _start(self, member: Member) -> None:
        self._crew.start(member)
        self._watch(member)
        if member.role in self._crew.sources_of:
            self._open(member)
        elif member.role == PLANNER:
            self._hear_begun(member)

    def _end(self, member: Member, *, is_replaced: bool = False) -> None:
        # First, because an answer that is on its way would put the member on the board again.
        self._relay.forget(member.name)
        self._crew.end(member, is_replaced=is_replaced)

    def _move(self, sources: Sequence[int], role: str, taken: "Future[None]") -> None:
        if not taken.set_running_or_notify_cancel():
            return  # the mover has given up
        self._crew.move(sources, role)
        taken.set_result(None)
        # A member that takes a vacant role is handed all sources of the role.
        if (holder := self._roster.holder_of(role)) is not None:
            self._handing_over.sources(holder, sources)

    def _retire(self, role: str) -> None:
        self._carry(self._roster.handle(RoleRetired(role)))
        self._crew.forget_loader(role)

    def _hear_begun(self, member: Member) -> None:
        """Check whether a planner could take over; what it cannot restore, no other planner will."""

        def begun(done: "Future[Any]") -> None:
            error = done.exception()
            if isinstance(error, UnavailableError):
                self._events.put(MemberEnded(member, str(error)))
                return
            self._events.put(MemberReady(member))
            if isinstance(error, OmniloadError):
                self._events.put(partial(self._fail, error))

        begun_there = self._crew.actors[member].begun.remote()
        future_of(begun_there, member.name).add_done_callback(begun)

    def _open(self, member: Member) -> None:
        opening = future_of(self._crew.open_loader(member), member.name)

        def heard(done: "Future[Any]") -> None:
            facts, mix = dict(self._crew.facts), self._crew.spec.history.latest
            event = event_of_opening(member, done, facts, mix)
            if isinstance(event, MemberReady):
                self._events.put(partial(self._crew.placing.stands_ready, member))
            self._events.put(event)

        opening.add_done_callback(heard)

    def _hold(self, member: Member, process: Process) -> None:
        ended = MemberEnded(member, "its process has ended")
        self._crew.take_hold(member, process, partial(self._events.put, ended))
        if member not in self._roster.members():
            self._end(member)  # it was stopped, and names its process only now
            self._crew.bury(member)
        elif self._crew.placing.is_astray(member, process.node):
            why = "Ray has started it on another node than the one chosen for it"
            self._carry(self._roster.handle(MemberEnded(member, why)))
        elif why := other_release(process.release, member.name):
            self._carry(self._roster.handle(MemberEnded(member, why)))

    def _watch(self, member: Member) -> None:
        """Hold the member's process, and notice its end by a call that never returns otherwise."""
        actor = self._crew.actors[member]

        def ended(done: "Future[Any]") -> None:
            self._events.put(MemberEnded(member, why_ended(done.exception())))

        def held(done: "Future[Any]") -> None:
            if done.exception() is None:
                process = done.result()
                self._events.put(partial(self._hold, member, process))
                if member.role in self._crew.dp_ranks_of:  # there is nothing to open
                    self._events.put(MemberReady(member))

        # One call for the whole life of a member; Ray fails it when the process ends, sooner than any look would
        # notice.
        actor.stay.remote().future().add_done_callback(ended)
        future_of(actor.process.remote(), member.name).add_done_callback(held)

"""A rank's handle of a data plane of Ray actors, in the process that opened it or in another one of the job."""

import atexit
import math
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

from typing_extensions import override

from omniload.actors.address import PlaneAddress, check_rank
from omniload.actors.gate import Gate
from omniload.actors.heartbeat_board import Activity
from omniload.actors.lifeline import LifelineEnd
from omniload.actors.patience import note_taken, wait_until
from omniload.actors.plane import RankHandle, join_world
from omniload.actors.rank_locks import name_in
from omniload.actors.ray.answers import (
    error_of,
    plain_error,
    value_of,
    wait_for_future,
    wait_for_head,
    wait_for_ref,
)
from omniload.actors.ray.cluster import node_here
from omniload.actors.ray.environment import RayError
from omniload.actors.ray.errors.verdict import is_lost, may_live
from omniload.actors.ray.finding import Search, await_newest
from omniload.actors.ray.head_watch import HeadWatch, Raylet, raylet_here
from omniload.actors.ray.hosts.boards import boards_of
from omniload.actors.ray.hosts.placing import host_here
from omniload.actors.ray.hosts.rank_claims import claim_rank, was_claimed
from omniload.actors.ray.processes import Opener
from omniload.actors.ray.rank.ahead import BatchesAhead
from omniload.actors.ray.rank.planner_link import PlannerLink
from omniload.base.errors import OmniloadError, UnavailableError
from omniload.base.linux.file_lock import FileLock
from omniload.base.linux.network import host_id
from omniload.base.log import RoleLogs, get_logger
from omniload.base.state import JsonObject
from omniload.batch.microbatch import Batch
from omniload.machine.messages import ResizeAsked
from omniload.machine.plans.fetch_pace import FetchPace
from omniload.machine.progress import Progress, rank_name
from omniload.machine.waiting import Wait
from omniload.plan.place_tree import ClientPlaceTree
from omniload.plan.world import World, WorldRank

__all__ = ["RayHandle"]

_LOG = get_logger(__name__)
_CLOSE_S = 10.0
_MARK = secrets.token_hex(4)
"""Distinguishes processes, because hosts may share a name, and their processes a number."""
_HEAD_S = 1.0
"""Longest wait for Ray's head. It answers in milliseconds or is unreachable; Ray then ends the process in a minute."""
_SOON_S = 0.1
"""Time in which a constructor confirms a lent batch, also on a busy machine."""
_LOOK_S = 0.1
"""Interval of looking for the replacement of a lost constructor."""
_ASK_AGAIN_S = 1.0
"""Time after which a constructor that may live is asked again, unless it was replaced."""


class RayHandle(RankHandle):
    """A rank's link to its constructor; it requests the next batches while the rank trains on the present ones."""

    def __init__(
        self,
        address: PlaneAddress,
        dp_rank: int,
        cp_rank: int,
        on_close: Callable[[], None],
        asked: ResizeAsked | None = None,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        """Reach the plane over this process's Ray, as one of the ranks that ``asked`` says.

        ``check`` raises where this process knows that the plane is lost.

        Raises:
            ConfigError: The plane has no such rank.
            StateError: The rank has a handle already; names the process that holds it.
            UnavailableError: The plane has ended, or does not answer.
        """
        dp_rank, self._cp_rank = check_rank(address.sizes_with(asked), dp_rank, cp_rank)
        self._address, self._on_close, self._check_plane = address, on_close, check
        self._gate, self._left = Gate(), threading.Event()
        pace, limit_s = FetchPace(address.steps_at_once), address.batch_timeout_s
        self._ahead = BatchesAhead(self._gate, self._check_alive, pace=pace, limit_s=limit_s)
        self._folder = address.on_host(host_id())[1]
        self._is_guest = address.terms is not None and address.host != host_id()
        self._lock: FileLock | None = None
        self._line, self._opener, self._end_is_told = LifelineEnd(""), Opener(0, ""), False
        ranks = math.prod(address.sizes_with(asked).values())
        self._head, self._raylet = HeadWatch(address.cluster, ranks), Raylet(0)
        try:
            if asked is None:  # else the planner is asked first
                if not self._is_guest:
                    self._lock = self._claim(0, dp_rank)
                # In the first world the rank's number is enough: the address says which constructor serves it.
                self._become(World(tree=ClientPlaceTree.of()), dp_rank)
            self._opener, self._raylet = Opener(*address.opener), Raylet(raylet_here())
            # On the opener's own host none is needed: its process is seen there.
            self._line = LifelineEnd(address.lifeline if address.host != host_id() else "")
            self._planner = PlannerLink(
                address.namespace, dp_rank, self._cp_rank, self._check_alive
            )
            self.first_step = self._planner.first_step
            # Only in a given Ray: a node of our own ends with this rank, so no other rank's batches are built there.
            self._node = node_here() if address.terms is not None and address.terms.is_given else ""
            if asked is not None:
                self._become(self._join_world(asked, dp_rank), dp_rank)
                self.first_step = asked.step
            self._planner.become(dp_rank, self._generation, self._node)
            self._lead_to(*self._find_constructor(self._constructor_role))
            # Last of what can fail: once it was claimed, the next rank of this place comes after this one.
            if self._lock is None:
                self._lock = self._claim(self._generation, dp_rank)
        except BaseException:
            self._release()
            raise
        self._own_board, self._board = boards_of(address, self._folder)
        self._logs = RoleLogs(address.logs)
        self._post_heartbeats()
        self._start_watches(ranks)

    @override
    def take(self, step: int, timeout_s: float | None = None) -> Batch | None:
        began_s = time.monotonic()
        self._gate.check()
        if not self._ahead.begins_at(step):
            self._open_window(step, timeout_s)
        if self._ahead.is_lent and not self._confirms(step, timeout_s):
            self._open_window(step, timeout_s)
        batch = self._ahead.next()
        note_taken(self._activity, step, time.monotonic() - began_s, is_end=batch is None)
        return batch

    @override
    def is_ready(self, step: int) -> bool:
        with self._gate.inside():
            coming = self._ahead.coming  # that of the next step, if there is no batch left
            return not self._ahead.is_empty or bool(
                coming and wait_for_future(coming, 0, self._check_alive)
            )

    @property
    def is_empty(self) -> bool:
        """Whether there is no batch left, so that the next one begins a new window."""
        return self._ahead.is_empty

    @override
    def lent(self, step: int, timeout_s: float | None = None) -> Batch | None:
        self._gate.check()
        if self._ahead.is_empty:
            self._open_window(step, timeout_s)
        return self._ahead.peek() if self._ahead.is_lent else None

    @override
    def taken(self, step: int) -> None:
        if not (self._ahead.is_empty or self._ahead.is_lent):
            return  # reported with the last batch of its window
        with self._gate.inside():
            self._planner.taken(step)

    @override
    def state_at(self, step: int) -> JsonObject:
        with self._gate.inside():
            return self._planner.state_at(step)

    @override
    def resize(self, asked: ResizeAsked, dp_rank: int) -> None:
        asked = asked.after(self._generation)
        check_rank(self._address.sizes_with(asked), dp_rank, self._cp_rank)
        # A rank with a new name removes the heartbeat of its old one, which would look like a stopped rank.
        before = self._name
        with self._gate.inside():
            self._planner.tell()
            # Everything that can fail comes before any change of this handle.
            world = self._planner.resize(asked)
            found = self._find_constructor(self._role_in(world, dp_rank))
            lock = self._claim(world.generation, dp_rank)
            self._unlock()
            self._lock = lock
            self._planner.become(dp_rank, world.generation, self._node)
            self._become(world, dp_rank)
            self._lead_to(*found)
        self.first_step = asked.step
        self._end_heartbeats()
        if before != self._name:
            self._own_board.forget(before)
            if self._is_guest:
                self._planner.forget(before)
        self._post_heartbeats()

    def leave(self, limit_s: float) -> bool:
        """Give the rank back, and make threads that wait for a batch leave Ray.

        Returns:
            Whether that happened within the limit.
        """
        atexit.unregister(self._end_with_process)
        # Before anything is given back, because a call inside may still use it.
        left = self._end_calls(limit_s) and wait_for_head(min(limit_s, _HEAD_S))
        self._ahead.close(min(limit_s, _HEAD_S))
        self._end_heartbeats()
        self._logs.close()
        self._release()
        return left

    @override
    def close(self) -> None:
        if self.leave(_CLOSE_S):
            self._on_close()
        else:
            _LOG.warning("%s is closed while a call to Ray does not end", self._name)

    def _open_window(self, step: int, timeout_s: float | None) -> None:
        """Get the window of batches from ``step`` on; it is empty at the end of the data."""
        self._ahead.ask(step)
        # The usual case: a rank that trains finds them there, without waiting or calling.
        if self._ahead.take_in():
            return
        doing = f"waits for step {step}"
        with self._gate.inside(), self._activity.doing(doing, (self._constructor_name,)):
            self._wait_for_window(step, timeout_s)

    def _wait_for_window(self, step: int, timeout_s: float | None) -> None:
        """Wait for batches; if the constructor is lost, wait for its replacement and ask that one."""
        limit_s = timeout_s or self._address.batch_timeout_s
        stay, asks = self._address.ranks_stay, self._constructor_name
        wait = Wait.for_batch(self._name, step, asks, limit_s, ranks_stay=stay)
        while True:
            asked = self._ahead.ask(step)
            wait_until(lambda s: wait_for_future(asked, s, self._planner.look), wait, self._board)  # noqa: B023 -- waited for here
            if self._ahead.take_in():
                return
            self._ahead.forget_asked()
            error = error_of(asked)
            assert error is not None, "batches that came were taken in"
            if not is_lost(error):
                raise plain_error(error, self._constructor_name) from None
            wait_until(self._following(error), wait, self._board)

    def _confirms(self, step: int, timeout_s: float | None) -> bool:
        """Return whether a lent step is still valid; if it was taken back, all batches are dropped.

        They are also dropped if the constructor that has lent it is lost, because its replacement is asked anew.
        """
        doing, asks = f"asks whether step {step} still stands", self._constructor_name
        limit_s = timeout_s or self._address.batch_timeout_s
        wait = Wait.for_batch(self._name, step, asks, limit_s, ranks_stay=self._address.ranks_stay)
        with self._gate.inside(), self._activity.doing(doing, (asks,)):
            asked = self._ahead.confirm(step)
            # The answer is nearly always there at once, so the planner is checked, which takes a call, only after that.
            if not wait_for_ref(asked, _SOON_S, self._check_alive):
                wait_until(lambda s: wait_for_ref(asked, s, self._planner.look), wait, self._board)
            try:
                stands = bool(value_of(asked))
            except RayError as error:
                if not is_lost(error):
                    raise plain_error(error, asks) from None
                stands = False
                wait_until(self._following(error), wait, self._board)
        if not stands:
            self._ahead.drop()
        return stands

    def _following(self, error: BaseException) -> Callable[[float], bool]:
        """Return a function that waits for a constructor to ask: the replacement of a lost one, or a living one."""
        again_s = time.monotonic() + (_ASK_AGAIN_S if may_live(error) else math.inf)
        return lambda timeout_s: self._follow(timeout_s) or time.monotonic() >= again_s

    def _follow(self, timeout_s: float) -> bool:
        """Look for the replacement of a lost constructor; return whether it was found."""
        self._planner.look()
        self._search.ask()
        self._left.wait(min(timeout_s, _LOOK_S))
        # No long wait: if the head is unreachable, Ray ends the process before an answer.
        found = self._search.found()
        # The name of the lost one stays in Ray's list until Ray has noticed its end.
        if found is None or found[0] == self._constructor_name:
            return False
        self._lead_to(*found)
        return True

    def _claim(self, generation: int, dp_rank: int) -> FileLock:
        """Take the number of a rank; raises as ``claim_rank``."""
        name = self._rank_in(generation, dp_rank)
        # If ranks of other hosts come and go, only the plane's host knows which ones are taken.
        if self._is_guest:
            this = f"process {os.getpid()} on {socket.gethostname()} ({_MARK})"
            self._planner.claim(name, this)
        return claim_rank(self._folder, name)

    def _rank_in(self, generation: int, dp_rank: int) -> str:
        """Return the name by which a rank of a generation is claimed."""
        return name_in(generation, rank_name(dp_rank, self._cp_rank, self._address.cp_size))

    def _join_world(self, asked: ResizeAsked, dp_rank: int) -> World:
        """Return the world that this rank joins; see ``join_world``."""

        def was_held(world: World) -> bool:
            if not was_claimed(self._folder, self._rank_in(world.generation, dp_rank)):
                return False
            self._claim(world.generation, dp_rank).close()  # refused where that one lives
            return True

        return join_world(asked, self._planner.resize, was_held)

    def _become(self, world: World, dp_rank: int) -> None:
        """Become a rank of an existing world, and use the constructor that serves it."""
        self._name = rank_name(dp_rank, self._cp_rank, self._address.cp_size)
        self._dp_rank, self._generation = dp_rank, world.generation
        self._constructor_role = self._role_in(world, dp_rank)
        self._search = Search(self._constructor_role, self._address.namespace)

    def _role_in(self, world: World, dp_rank: int) -> str:
        of = self._address  # knows the constructors of the first world
        return of.constructor_in(world, dp_rank) if world.generation else of.constructor_of(dp_rank)

    def _find_constructor(self, role: str) -> tuple[str, Any]:
        """Return name and actor of the constructor that holds a role; raises as ``await_newest``."""
        pause = partial(self._left.wait, _LOOK_S)
        return await_newest(role, self._address.namespace, self._planner.look, pause)

    def _lead_to(self, name: str, constructor: Any) -> None:  # noqa: ANN401 -- Ray's handle has no static type
        self._constructor_name = name
        rank = WorldRank(self._dp_rank, self._cp_rank, self._generation)
        self._ahead.lead_to(constructor, rank, self._planner.tell_past)
        self._planner.tell_by(constructor)

    def _start_watches(self, ranks: int) -> None:
        """Watch planner and head in a thread, until the rank is given back or the process ends."""
        beat = self._beat if self._is_guest else None
        self._planner.watch(self._gate, self._left, ranks, beat)
        self._head.watch(self._left)
        # Registered to run before Ray's own exit handler, which would shut Ray down under a call of the thread.
        self._pid = os.getpid()
        atexit.register(self._end_with_process)

    def _post_heartbeats(self) -> None:
        """Post heartbeats under the name of this rank."""
        self._activity = Activity(self._name, log=self._logs.of(self._name), host=host_here())
        self._activity.rest("has asked for no batch")
        self._end_heartbeats = self._own_board.post(self._activity)

    def _beat(self) -> Progress:
        return self._activity.progress()  # another one after ``resize``

    def _check_alive(self) -> None:
        """Leave a closed plane, and one whose opener has ended."""
        self._gate.check()
        self._check_plane()
        self._opener.check()
        try:
            self._raylet.check()
            self._line.check()
            self._head.check()
        except UnavailableError as error:
            # Now, because the reason is needed after Ray was left, and Ray may end both processes before a later call.
            if not (self._end_is_told or self._line.has_ended):
                self._end_is_told = True
                _LOG.error("%s", error)
            raise

    def _end_with_process(self) -> None:
        # A forked child does not have the threads whose calls this would wait for.
        if os.getpid() == self._pid:
            self._end_calls(_CLOSE_S)

    def _end_calls(self, limit_s: float) -> bool:
        """Let no call to Ray begin, and wait for those under way; return whether they ended within the limit."""
        with suppress(OmniloadError, RayError), self._gate.inside():
            self._planner.tell()
        # First, because this wakes a rank that waits for another constructor, which then leaves the gate.
        self._left.set()
        self._planner.end_watch()
        return self._gate.close(limit_s)

    def _release(self) -> None:
        self._unlock()
        self._line.close()
        self._opener.close()
        self._raylet.close()

    def _unlock(self) -> None:
        if self._lock is not None:
            self._lock.close()

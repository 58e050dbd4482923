"""The Ray runtime's plane: every role is an actor, and batches travel through the shared-memory object store."""

import atexit
import os
import threading
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import partial
from typing import Any

from typing_extensions import override

from omniload.actors.address import Gather
from omniload.actors.answering_edits import answer_edits, last_question
from omniload.actors.claim import claim
from omniload.actors.gate import Gate
from omniload.actors.heartbeat_board import FolderBoard
from omniload.actors.patience import wait_for_opening
from omniload.actors.plane import DataPlane, PlaneSpec
from omniload.actors.ray.answers import answer_to, plain_error, wait_for_ref
from omniload.actors.ray.changes import change_mix
from omniload.actors.ray.cluster import node_here
from omniload.actors.ray.crew import Crew, pids_of
from omniload.actors.ray.environment import RayError, ray
from omniload.actors.ray.errors.verdict import is_lost
from omniload.actors.ray.given.seats import at_current
from omniload.actors.ray.head_watch import check_servers
from omniload.actors.ray.hosts.boards import boards_of
from omniload.actors.ray.hosts.member_processes import MemberProcesses
from omniload.actors.ray.hosts.members import (
    address_of,
    cluster_of,
    head_of,
    lifeline_of,
    listening_of,
    terms_of,
)
from omniload.actors.ray.hosts.placing import host_here
from omniload.actors.ray.hosts.watch import begin_watch
from omniload.actors.ray.hosts.watches import Watches
from omniload.actors.ray.keeper import Keeper
from omniload.actors.ray.layout import PLANNER, dp_ranks_of_constructors, store_bytes
from omniload.actors.ray.rank.handle import RayHandle
from omniload.actors.ray.release import require_own_release
from omniload.actors.ray.scaling.mover import Mover
from omniload.actors.ray.scaling.shell import SCALER, Scaling
from omniload.actors.ray.shadows import Shadows
from omniload.actors.status_file import write_status
from omniload.actors.versions import with_versions
from omniload.base.concurrency.held_signals import SignalsHeld
from omniload.base.errors import OmniloadError
from omniload.base.linux.cores import cores_here
from omniload.base.log import RoleLogs
from omniload.machine.loader_groups import LoaderShare, costs_of, partition, seconds_in_loaders
from omniload.machine.messages import ResizeAsked
from omniload.plan.world import require_rows
from omniload.source.kept_profile import kept_profiles

__all__ = ["RayPlane"]

_CLOSE_S, _LOOK_S = 10.0, 1.0


class RayPlane(DataPlane):
    """A data plane of Ray actors: planner and, by default, loaders on the opener's host, constructors next to ranks."""

    def __init__(self, spec: PlaneSpec, gather: Gather | None = None) -> None:
        """Start Ray and the actors, open the sources and start planning.

        Args:
            spec: The run.
            gather: Makes the other hosts of the job join; ``None`` if all ranks are on this one.

        Raises:
            ConfigError: A source or the batch is refused.
            StateError: ``spec.state`` does not fit, or this process uses Ray already.
            UnavailableError: No nodes had room for ``runtime.place`` within its limit.
        """
        # Before anything is started, so that a mistake in the file does not cost a start of Ray.
        require_rows(spec.mix, spec.tree)
        runtime = spec.mix.runtime
        listening = listening_of(runtime.bind, runtime.ports, os.environ.get("MASTER_ADDR"))
        self._gate, self._closing, self._closed = Gate(), threading.Lock(), False
        self._handles: list[RayHandle] = []
        self._opened = ExitStack()
        try:
            self._asked_before = last_question(spec.run_dir)
            self._opened.callback(claim(spec))
            passed_on = runtime.env.passed_on(os.environ)
            spec = replace(with_versions(spec.with_edits()), passed_on=passed_on)
            mix = spec.history.latest
            costs = costs_of(mix, kept_profiles(spec.cache_dir, mix.names))
            shares = partition(costs, num_loaders=runtime.loaders, max_loaders=runtime.scaling.most)
            self._cluster = cluster_of(
                runtime,
                listening,
                bytes_=store_bytes(spec.mix),
                workers=len(shares) + len(dp_ranks_of_constructors(spec, cores_here())) + 1,
            )
            # From here on, so that everything that is opened below ends before Ray does, in the order of an exit stack.
            self._opened.push(self._end_cluster)
            self._node = node_here()
            hosts = None if gather is None else gather(head_of(runtime, self._cluster))
            line, terms = None, terms_of(spec, listening)
            if terms is not None or (hosts is not None and hosts.elsewhere):
                line = lifeline_of(self._cluster, listening)
                self._opened.callback(line.close)
            self.address = address_of(spec, self._cluster, hosts, line, terms)
            self.address.board.mkdir()
            self._start(spec, shares)
        except BaseException:
            self._opened.close()
            raise
        # Registered to run before Ray's own exit handler; otherwise the plane would replace all roles that end by it.
        atexit.register(self._end_with_process, os.getpid())

    def _start(self, spec: PlaneSpec, shares: Sequence[LoaderShare]) -> None:
        # All processes start concurrently; they are connected to each other afterwards.
        self._board = FolderBoard(self.address.board)
        processes = MemberProcesses(Watches(begin_watch))
        self._crew = crew = Crew(spec, shares, self.address, self._node, processes)
        crew.place_at(at_current(spec.mix.runtime.place))
        crew.appoint()
        crew.wait_for_room()
        loaders = [crew.holders[role] for role in crew.sources_of]
        members = *loaders, *(crew.holders[role] for role in (PLANNER, *crew.dp_ranks_of))
        for member in members:
            crew.start(member)
        opening = [crew.open_loader(member) for member in loaders]
        for member in members:
            process = self._patiently(crew.actors[member].process.remote(), member.name)
            require_own_release(process.release, member.name)
        for member, found in zip(loaders, opening, strict=True):
            # One after the other, although all open concurrently, because the limit is on time without progress.
            crew.facts |= self._patiently(found, member.name)
        self._patiently(crew.open_planner(crew.holders[PLANNER]), PLANNER)
        spec.keep()
        logs = RoleLogs(self.address.logs)
        self._opened.callback(logs.close)
        self._keeper = Keeper(crew, crew.roster(), Shadows(crew), self._gate, logs.of("keeper"))
        # After the first opening, because a failure there is a fault of the run, which a replacement would repeat.
        self._keeper.begin()
        if spec.mix.runtime.scaling.mode == "auto":
            cost_S = seconds_in_loaders(spec.mix, kept_profiles(spec.cache_dir, spec.mix.names))
            self._scaling = Scaling(crew, self.mover(), self._gate, cost_S, logs.of(SCALER))
        self._opened.callback(
            write_status(spec.run_dir, boards_of(self.address, self.address.board)[1], host_here())
        )
        changed = partial(change_mix, crew, self._gate)
        self._opened.callback(answer_edits(spec.run_dir, changed, self._asked_before))

    def _patiently(self, answer: Any, role: str) -> Any:  # noqa: ANN401 -- as the actor's method
        """Wait for an answer as long as there is progress."""
        limit_s = self.address.batch_timeout_s
        wait_for_opening(
            lambda s: wait_for_ref(answer, s, self._gate.check), role, limit_s, self._board
        )
        return answer_to(answer, role)

    @override
    def handle(self, dp_rank: int, cp_rank: int = 0, asked: ResizeAsked | None = None) -> RayHandle:
        with self._gate.inside():
            handle = RayHandle(self.address, dp_rank, cp_rank, lambda: None, asked, self._check)
            self._handles.append(handle)
        return handle

    def _check(self) -> None:
        """Raise the error that has ended the plane, if this process knows one."""
        check_servers(self._cluster.ended_service)
        self._keeper.check()

    def pids(self) -> dict[str, int]:
        """Return the process id of every role that has one (``planner``, ``loader-0``, ...); see ``pids_of``."""
        with self._gate.inside():
            return pids_of(self._crew, self._gate.check)

    def holders(self) -> dict[str, str]:
        """Return the name of the member that holds each role: ``loader-0+2`` is the third life of ``loader-0``."""
        return {role: member.name for role, member in self._crew.holders.items()}

    def mover(self) -> Mover:
        """Return a mover of sources between the loaders of this running plane; the scaler has one of its own."""
        return Mover(self._crew, self._keeper, self._gate)

    def planner(self) -> Any:  # noqa: ANN401 -- Ray's handles have no static type
        """Return the actor of the present planner."""
        return self._crew.holding(PLANNER)

    def failure(self) -> OmniloadError | None:
        """Return the error that ended the plane; ``None`` while it runs, or while a planner is being replaced."""
        try:
            self._check()
        except OmniloadError as error:
            return error
        with self._gate.inside():
            asked = self._crew.holding(PLANNER).check.remote()
            if not wait_for_ref(asked, _LOOK_S, self._gate.check):
                return None
            try:
                ray.get(asked)
            except RayError as error:
                return None if is_lost(error) else plain_error(error, PLANNER)
        return None

    def ended_service(self) -> str:
        """Return which server of this plane's private Ray has ended here, and how; empty while all run."""
        return self._cluster.ended_service()

    def is_whole(self) -> bool:
        """Return whether every role is held and every wanted shadow is ready."""
        return self._keeper.is_whole()

    @override
    def close(self) -> None:
        with SignalsHeld(to_the_end=True), self._closing:  # a concurrent call waits for the first
            if not self._closed:
                self._closed = True
                atexit.unregister(self._end_with_process)
                self._opened.close()

    def _end_with_process(self, opener: int) -> None:
        # A fork that exits normally runs this handler too, but the plane belongs to its parent.
        if os.getpid() == opener:
            self.close()

    def _end_cluster(self, *_: object) -> None:
        """End the actors and their Ray, once no thread of this process waits for one of them."""
        # These first, because they would replace, or add, roles that are ended below.
        if (scaling := getattr(self, "_scaling", None)) is not None:
            scaling.close()
        if (keeper := getattr(self, "_keeper", None)) is not None:
            keeper.close()
            self._crew.processes.close()
        is_used = not self._gate.close(_CLOSE_S)
        for handle in self._handles:
            is_used |= not handle.leave(_CLOSE_S)
        try:
            # A dead planner has nothing to close; one that hangs, or has not begun, ends with the cluster.
            if not is_used and keeper is not None:
                with suppress(OmniloadError, RayError, KeyError):
                    ray.get(self._crew.holding(PLANNER).close.remote(), timeout=_CLOSE_S)
        finally:
            self._cluster.close(is_used=is_used)

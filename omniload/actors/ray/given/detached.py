"""A plane that outlives the driver which opened it: its opener is an actor, which a later driver finds.

::

    rank 0 of a driver ── attach(run, state) ──▶ opener, a detached actor ── opens, keeps, ends ──▶ the plane
    rank 0 of the next ── attach(run, state) ──▶      └── continues at the state's step if its steps are held

The opener owns the actors and runs the keeper, as rank 0 does for any other plane. If it dies, they die too.
"""

import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from omniload.actors.address import PlaneAddress
from omniload.actors.claim import LOCK_NAME
from omniload.actors.heartbeat_board import Activity, FolderBoard
from omniload.actors.plane import PlaneSpec, RankHandle, first_step_of
from omniload.actors.rank_locks import name_in, rank_has_ended
from omniload.actors.ray.answers import answer_to, plain_error, wait_for_ref
from omniload.actors.ray.cluster import node_here
from omniload.actors.ray.environment import RayError, ray
from omniload.actors.ray.errors.verdict import is_lost, may_live
from omniload.actors.ray.given.attached import code_of_job, given_cluster
from omniload.actors.ray.given.tenancy import Attaching, Tenancy, opener_of, rank_names
from omniload.actors.ray.hosts.placing import host_here
from omniload.actors.ray.hosts.rank_claims import was_claimed
from omniload.actors.ray.hosts.starting import ASKED, LEASED, Start, actor_of
from omniload.actors.ray.layout import PLANNER
from omniload.actors.ray.plane import RayPlane
from omniload.actors.ray.processes import end_by_sigterm
from omniload.actors.ray.rank.joining import handle_in, node_for_rank
from omniload.base.errors import OmniloadError, StateError, UnavailableError
from omniload.base.linux.file_lock import is_locked
from omniload.base.linux.network import host_id
from omniload.base.log import RoleLog, RoleLogs, get_logger, logs_folder, speak_for
from omniload.machine.messages import ResizeAsked
from omniload.machine.progress import is_rank

__all__ = ["PlaneOpener", "attach", "join_detached", "stop_detached"]

_OPENER = "opener"
_LOG = get_logger(__name__)
_LOOK_S, _LOOKS_S, _ATTACHING_S = 1.0, 10.0, 60.0
"""Time between an opener's looks at its ranks, the longest duration of a look, and the longest wait for a driver."""
_NAMESPACE = "omniload-detached"
"""Namespace of the openers of all runs in a Ray; a name of an opener is unique because it derives from a folder."""
_THREADS = 4
_TRIES, _PAUSE_S = 20, 0.5
"""Retries of a call to an opener that is just ending."""
_STOPPED_S, _ENDED_S = 60.0, 20.0
_ASK_S, _SILENT_S = 5.0, 60.0
"""Time between questions to an opener that is opening a plane, and the longest wait for an answer."""


class PlaneOpener:
    """Opens the plane of one run and keeps it while it has ranks; an actor that no driver owns."""

    def __init__(self) -> None:
        """Begin without a plane."""
        end_by_sigterm()
        self._changing = threading.Lock()
        self._tenancy = Tenancy()
        self._plane: RayPlane | None = None
        self._spec: PlaneSpec | None = None
        self._log: RoleLog | None = None
        self._unpost: Callable[[], None] = lambda: None
        self._changed_for, self._generation, self._is_over = "", 0, False
        """What other drivers wait for while the plane is opened or ended; empty while its ranks are looked at."""
        self._used_s = time.monotonic()
        self._lease: Any = None
        """An unanswered call of the driver, whose result fails when the driver's process ends."""
        # The actor ends itself through its own handle, because every other way of ending an actor raises an error.
        self._self = ray.get_runtime_context().current_actor
        threading.Thread(target=self._watch, name="omniload-opener", daemon=True).start()

    def told(self) -> str:
        """Return which process this is; callers use the answer as a sign of life."""
        return f"process {os.getpid()} on {socket.gethostname()}"

    def stay(self) -> None:
        """Never return: Ray tells whoever holds the result when the calling process ends."""
        threading.Event().wait()

    def attach(
        self, asked: Attaching, waited_s: float, lease: Sequence[Any] = (None,)
    ) -> PlaneAddress | str:
        """Have the plane serve a driver's ranks from its state on, or return what the driver must wait for.

        A waiting driver asks again, so nothing is done for a driver that has gone. The ``lease`` is the result of a
        call of ``stay``, inside a sequence, because Ray would wait for a bare result before it makes this call.

        Raises:
            StateError: The plane is of another mix or release, or another driver has ranks of it.
            OmniloadError: See the opening of a plane.
        """
        if not self._changing.acquire(timeout=0.0 if self._changed_for else _LOOKS_S):
            return f"the plane to be there for {self._changed_for or 'its opener, which looks at its ranks'}"
        try:
            # Ray reports the end of a driver two seconds late, both of a whole job and of an actor of a running job.
            if self._lease is not None and ray.wait([self._lease], timeout=0)[0]:
                self._tenancy.driver_ended()
            if waits := self._tenancy.why_wait(asked, waited_s, self._ranks(), time.monotonic()):
                return waits
            self._changed_for = asked.driver
            os.environ.update(asked.environment)
            if (generation := self._going_on(asked)) is None:
                generation = 0
                self._open(asked)
            assert self._plane is not None, "it was opened, or goes on"
            self._generation, self._used_s = generation, time.monotonic()
            self._tenancy.give(asked, self._used_s)
            (self._lease,) = lease
            return self._plane.address.model_copy(update={"generation": generation})
        finally:
            self._changed_for = ""
            self._changing.release()

    def stop(self) -> str:
        """End the plane; return a description of what was found."""
        with self._changing:
            self._changed_for = "a command that ends it"
            ranks = self._ranks()
            self._close()
        return f"it served {', '.join(ranks)}" if ranks else "no rank was there"

    def _going_on(self, asked: Attaching) -> int | None:
        """Continue the plane at a driver's state; return the generation of its ranks, ``None`` to open it anew."""
        plane, before, spec = self._plane, self._spec, asked.spec
        if plane is None or before is None or plane.failure() is not None:
            return None
        if len({(each.tree.size_of("cp"), each.num_steps) for each in (before, spec)}) > 1:
            return None
        step = first_step_of(spec)
        try:
            if self._tenancy.has_other_variables(asked):
                raise StateError("variables of runtime.env.pass_on have other values")
            planner = plane.planner()
            if spec.state is not None:
                held = answer_to(planner.state_at.remote(step), PLANNER)
                if json.dumps(held, sort_keys=True) != json.dumps(spec.state, sort_keys=True):
                    raise StateError("before that step it drew other samples than the state says")
            over: int = answer_to(planner.nodes_of_ranks.remote(), PLANNER)[0]
            resized = ResizeAsked(dp=spec.tree.size_of("dp"), step=step, generation=over + 1)
            answer_to(planner.resize.remote(resized), PLANNER)
            # The folder describes each start, whether or not the start opened the plane.
            spec.with_edits().keep()
        except OmniloadError as error:
            _LOG.warning("the plane cannot resume at step %d and is opened again: %s", step, error)
            return None
        self._spec = spec
        _LOG.info("ranks of another driver continue at step %d", step)
        return over + 1

    def _open(self, asked: Attaching) -> None:
        spec = asked.spec
        self._close()
        assert spec.run_dir is not None, "a plane is found by its run's folder"
        asked.require_same_folder(self.told())
        if self._log is None:  # an opener serves one run for its whole life
            speak_for(log := RoleLogs(logs_folder(spec.run_dir)).of(_OPENER))
            self._log = log
        self._plane, self._spec = RayPlane(spec), spec
        self._tenancy.opened(asked)
        self._activity = Activity(_OPENER, log=self._log, host=host_here())
        self._unpost = FolderBoard(self._plane.address.board).post(self._activity)

    def _close(self) -> None:
        plane, self._plane = self._plane, None
        self._tenancy.closed()
        if plane is not None:
            self._is_over = True  # stays set if the end fails, because leftovers would block the next plane's folder
            self._unpost()
            plane.close()
            self._is_over = False

    def _ranks(self) -> list[str]:
        """Return the ranks that are present; note whether a rank of the driver has joined."""
        if self._plane is None or self._spec is None:
            return []
        folder, now_s = self._plane.address.board, time.monotonic()
        names = [name_in(self._generation, name) for name in rank_names(self._spec)]
        if any(was_claimed(folder, name) for name in names):
            self._tenancy.joined()
        silent_s = self._spec.mix.runtime.silent_after
        found = [
            name
            for name, beat in FolderBoard(folder).read().items()
            # A rank of this host holds a lock until it ends; a rank of another host has only heartbeats.
            if is_rank(name) and not rank_has_ended(folder, name) and now_s - beat.beat_s < silent_s
        ]
        return sorted(found)

    def _watch(self) -> None:
        """End the plane and this actor once the plane has had no rank for as long as the mix allows."""
        while True:
            threading.Event().wait(_LOOK_S)
            if not self._changing.acquire(blocking=False):
                continue  # a driver is attaching
            try:
                if self._look(time.monotonic()):
                    break
            except Exception:  # noqa: BLE001 -- without a next look, nothing would ever end the plane
                _LOG.exception("the opener of a detached data plane could not look at its ranks")
            finally:
                self._changing.release()
        with suppress(RayError):
            ray.kill(self._self, no_restart=True)

    def _look(self, now_s: float) -> bool:
        """Return whether this actor must end because its plane was ended or has been unused for too long."""
        if self._is_over:
            return True
        if ranks := self._ranks():
            self._used_s = now_s
        is_open = self._plane is not None and self._spec is not None
        keep_s = self._spec.mix.runtime.keep if is_open and self._spec else _ATTACHING_S
        idle_s = now_s - self._used_s
        if is_open:
            nobody = f"no rank for {idle_s:.0f} s; ends after {keep_s:.0f}"
            self._activity.rest(f"is detached: {f'serves {len(ranks)} ranks' if ranks else nobody}")
        if idle_s < keep_s:
            return False
        _LOG.warning(
            "the detached data plane has had no rank for %.0f s, the limit of runtime.keep, and ends",
            idle_s,
        )
        self._changed_for = "its opener, which ends it"
        try:
            self._close()
        except Exception:  # noqa: BLE001 -- the plane's actors end with this one
            _LOG.exception("the detached data plane did not end as it should: its opener ends it")
        return True


def attach(stack: ExitStack, asked: Attaching) -> PlaneAddress:
    """Have the plane of a run serve this driver's ranks; start the plane if there is none.

    Args:
        stack: Receives the cleanup of this process's connection to the Ray.
        asked: The run with the state it continues from, and its mix and release.

    Raises:
        StateError: The plane of the run is of another mix or release, or has ranks of another driver.
        UnavailableError: The plane was not ready in time, or its opener does not answer.
        OmniloadError: See the opening of a plane.
    """
    runtime, run_dir = asked.spec.mix.runtime, asked.spec.run_dir
    assert run_dir is not None, "whoever opens a detached plane requires one"
    stack.callback(given_cluster(runtime.address).close)
    asked = replace(
        asked.for_an_actor(),
        # The plane uses the code of the job that opened it, including the functions that a mix names.
        identity={**asked.identity, **code_of_job()},
        environment=runtime.env.passed_on(os.environ),
        driver=f"process {os.getpid()} on {socket.gethostname()}",
        opener=opener_of(run_dir, is_new=True),
        ticket=secrets.token_hex(8),
    )
    began_s, limit_s, said = time.monotonic(), runtime.place.wait + runtime.batch_timeout, ""
    ended, silent_from_s = 0, None  # how often it ended, and since when it cannot be reached
    leases = dict[Any, Any]()
    while (waited_s := time.monotonic() - began_s) < limit_s and ended < _TRIES:
        try:
            found = _answer_of(asked, waited_s, limit_s, leases)
        except RayError as error:
            if not is_lost(error):
                raise plain_error(error, _OPENER) from error
            silent_from_s = silent_from_s or time.monotonic()
            if not may_live(error):
                ended, silent_from_s = ended + 1, None
            elif time.monotonic() - silent_from_s >= _SILENT_S:
                raise _silent(run_dir) from error
        else:
            if isinstance(found, PlaneAddress):
                return found
            silent_from_s = None
            if found != said:
                _LOG.warning(
                    "the detached data plane of %s: waiting for %s", run_dir, said := found
                )
        threading.Event().wait(_PAUSE_S)
    if ended:
        raise UnavailableError(
            f"the opener of the detached data plane of {run_dir} ended {ended} times instead of answering; see its log"
        )
    raise UnavailableError(
        f"the detached data plane of {run_dir} was not ready within {limit_s:.0f} s "
        f"({said or 'it was being opened'}); see its logs, or end it by omniload mix stop"
    )


def _answer_of(
    asked: Attaching, waited_s: float, limit_s: float, leases: dict[Any, Any]
) -> PlaneAddress | str:
    """Return the answer of a run's opener; opening takes long, so the opener is asked meanwhile whether it lives.

    Each opener gets one lease from this process, kept in ``leases``.

    Raises:
        RayError: The opener raised an error, or has ended.
        UnavailableError: The opener does not answer.
    """
    was_there, until_s = (opener := _found(asked.opener)) is not None, time.monotonic() + limit_s
    opener = opener if was_there else _started(asked.opener, asked.spec)
    if opener not in leases:
        leases[opener] = opener.stay.options(concurrency_group=LEASED).remote()
    told = opener.attach.remote(asked, waited_s, [leases[opener]])
    while not wait_for_ref(told, _ASK_S, lambda: None):
        # An opener that is just being started cannot answer before Ray has a process for it.
        lives = opener.told.options(concurrency_group=ASKED).remote()
        if not wait_for_ref(lives, _SILENT_S, lambda: None) and was_there:
            raise _silent(asked.spec.run_dir)
        if time.monotonic() >= until_s:
            raise UnavailableError(
                f"the detached data plane of {asked.spec.run_dir} was not opened within {limit_s:.0f} s; see its logs"
            )
    found: PlaneAddress | str = ray.get(told)
    return found


def _silent(run_dir: Path | None) -> UnavailableError:
    return UnavailableError(
        f"the opener of the detached data plane of {run_dir} has given no answer for {_SILENT_S:.0f} s: it is stopped "
        f"or stuck, or its host is cut off; end it by omniload mix stop {run_dir}, and start again"
    )


def join_detached(
    stack: ExitStack, address: PlaneAddress, ranks: tuple[int, int, int], step: int
) -> RankHandle:
    """Return this rank's handle; ``ranks`` are its places along dp and cp, and the size of dp."""
    dp_rank, cp_rank, dp_size = ranks
    here = host_id()
    asked: ResizeAsked | None = None
    if address.generation:
        asked = ResizeAsked(dp=dp_size, step=step, generation=address.generation)
    if is_away := address.host != here:
        node = stack.enter_context(closing(node_for_rank(address, "")))
        address = address.with_node_on(here, node.place)
    return handle_in(address, dp_rank, cp_rank, is_connected=is_away, asked=asked)


def stop_detached(run_dir: Path, address: str) -> str:
    """End the detached plane of a run; return a description of what was done.

    Raises:
        ConfigError: No Ray can be joined at ``address``.
        StateError: The run has no detached plane there.
    """
    cluster = given_cluster(address)
    try:
        if (opener := _found(opener_of(run_dir))) is None:
            raise StateError(
                f"no detached data plane of {run_dir} is in the Ray at {cluster.address}: it has ended, by itself "
                "after runtime.keep, or was opened by another path of this folder"
            )
        try:
            asked = opener.stop.options(concurrency_group=ASKED).remote()
            found: str = answer_to(asked, _OPENER, limit_s=_STOPPED_S)
        except UnavailableError:  # the opener is stopped or stuck, or still opens a plane
            found = "its opener gave no answer and was killed"
        finally:
            ray.kill(opener, no_restart=True)
        # Ray gives a process some seconds to end by itself. The next job would find its folder taken meanwhile.
        until_s = time.monotonic() + _ENDED_S
        with suppress(OSError):  # the folder is on another host
            while is_locked(run_dir / LOCK_NAME) and time.monotonic() < until_s:
                threading.Event().wait(_PAUSE_S)
    finally:
        cluster.close()
    return found


def _found(name: str) -> Any:  # noqa: ANN401 -- Ray's handles have no static type
    """Return the opener of a run; ``None`` if there is none."""
    try:
        return ray.get_actor(name, namespace=_NAMESPACE)
    except ValueError:
        return None


def _started(name: str, spec: PlaneSpec) -> Any:  # noqa: ANN401 -- as above
    """Return a new opener on this node, or the opener that another driver has just started."""
    start = Start(
        place=node_here(),
        threads=_THREADS,
        namespace=_NAMESPACE,
        variables=spec.mix.runtime.env.set,
        is_detached=True,
    )
    return actor_of(PlaneOpener, name, start).remote()

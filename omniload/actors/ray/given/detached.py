"""A plane that outlives the driver which opened it: its opener is an actor of its own, which a later driver finds.

::

    rank 0 of a driver ── attach(run, state) ──▶ opener, a detached actor ── opens, keeps, ends ──▶ the plane
    rank 0 of the next ── attach(run, state) ──▶      └── goes on at the state's step where its steps are held

The opener is what rank 0 is to any other plane: owner of its actors, keeper of its roles. Where it dies, they do.
"""

import hashlib
import json
import os
import socket
import threading
import time
from collections.abc import Mapping
from contextlib import ExitStack, closing, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from omniload.actors.address import PlaneAddress
from omniload.actors.heartbeat_board import Activity, FolderBoard
from omniload.actors.plane import PlaneSpec, RankHandle
from omniload.actors.rank_locks import rank_has_ended
from omniload.actors.ray.answers import answer_to, is_lost, plain_error, wait_for_ref
from omniload.actors.ray.cluster import node_here
from omniload.actors.ray.environment import RayError, ray
from omniload.actors.ray.given.attached import given_cluster
from omniload.actors.ray.hosts.placing import host_here
from omniload.actors.ray.hosts.starting import Start, actor_of
from omniload.actors.ray.layout import PLANNER
from omniload.actors.ray.plane import RayPlane
from omniload.actors.ray.processes import end_by_sigterm
from omniload.actors.ray.rank.joining import handle_in, node_for_rank
from omniload.base.errors import OmniloadError, StateError, UnavailableError
from omniload.base.linux.network import host_id
from omniload.base.log import RoleLogs, get_logger, logs_folder, speak_for
from omniload.machine.messages import ResizeAsked
from omniload.machine.progress import is_rank

__all__ = ["PlaneOpener", "attach", "join_detached", "stop_detached"]

_OPENER = "opener"
_LOG = get_logger(__name__)
_LOOK_S = 1.0
_ATTACHING_S = 60.0
"""How long an opener without a plane waits for a driver."""
_LEFT_S = 5.0
"""Beside the silence of ranks on other hosts: how long a driver waits for the ranks of the one before to be gone."""
_NAMESPACE = "omniload-detached"
"""Of the openers of all runs in a Ray: their names are unique by the folders of runs."""
_THREADS = 4
_CODE = ("working_dir", "py_modules")
"""Of a ``runtime_env``; Ray names them by what is in them."""
_TRIES, _PAUSE_S = 20, 0.5
"""For an opener that is just ending."""
_STOPPED_S = 60.0


class PlaneOpener:
    """Opens the plane of one run, and keeps it while ranks come; an actor that no driver owns."""

    def __init__(self) -> None:
        """Begin without a plane."""
        end_by_sigterm()
        self._identity: dict[str, str] = {}
        self._changing = threading.Lock()
        self._plane: RayPlane | None = None
        self._spec: PlaneSpec | None = None
        self._driver = ""
        self._used_s = time.monotonic()
        # By its own handle: what else ends an actor ends it by an error.
        self._self = ray.get_runtime_context().current_actor
        threading.Thread(target=self._watch, name="omniload-opener", daemon=True).start()

    def identity(self) -> dict[str, str]:
        """Return of which mix and release the plane is; nothing while there is none."""
        return {} if self._plane is None else self._identity

    def attach(
        self,
        spec: PlaneSpec,
        identity: Mapping[str, str],
        environment: Mapping[str, str],
        driver: str,
    ) -> PlaneAddress:
        """Have the plane serve the ranks of a driver, from its state on.

        Args:
            spec: The run, with the state that the driver goes on from.
            identity: Of which mix and release it is, by names of what differs.
            environment: Variables of the driver that ``runtime.env.pass_on`` names.
            driver: Which process of which host it is, for messages.

        Raises:
            StateError: Another driver has ranks of the plane.
            OmniloadError: As for opening a plane.
        """
        with self._changing:
            self._refuse_second(spec, driver)
            os.environ.update(environment)
            if (generation := self._going_on(spec)) is None:
                generation = 0
                self._open(spec)
            assert self._plane is not None, "it was opened, or goes on"
            self._identity, self._driver = dict(identity), driver
            self._used_s = time.monotonic()
            return self._plane.address.model_copy(update={"generation": generation})

    def stop(self) -> str:
        """End the plane; return what was found."""
        with self._changing:
            ranks = self._ranks()
            self._close()
        return f"it served {', '.join(ranks)}" if ranks else "no rank was there"

    def _refuse_second(self, spec: PlaneSpec, driver: str) -> None:
        """Wait until the ranks of the driver before are gone, as those that were killed are seen to be."""
        until_s = time.monotonic() + spec.mix.runtime.silent_after + _LEFT_S
        while ranks := self._ranks():
            if time.monotonic() >= until_s:
                raise StateError(
                    f"the detached data plane of {spec.run_dir} has ranks of another driver ({', '.join(ranks)}; "
                    f"attached by {self._driver}), and {driver} is to attach: end that one first, or give this job a "
                    "run_dir of its own"
                )
            time.sleep(_LOOK_S / 4)

    def _going_on(self, spec: PlaneSpec) -> int | None:
        """Have the plane go on at a driver's state; return the generation of its ranks, ``None`` for a plane anew."""
        plane, before = self._plane, self._spec
        if plane is None or before is None or plane.failure() is not None:
            return None
        if (before.tree.size_of("cp"), before.num_steps) != (
            spec.tree.size_of("cp"),
            spec.num_steps,
        ):
            return None
        step = 0 if spec.state is None else spec.state["step"]
        assert isinstance(step, int), "a loader was made of it"
        planner = plane.planner()
        try:
            if spec.state is not None:
                held = answer_to(planner.state_at.remote(step), PLANNER)
                if json.dumps(held, sort_keys=True) != json.dumps(spec.state, sort_keys=True):
                    raise StateError("it has drawn other samples before it than the state tells")
            over: int = answer_to(planner.nodes_of_ranks.remote(), PLANNER)[0]
            asked = ResizeAsked(dp=spec.tree.size_of("dp"), step=step, generation=over + 1)
            answer_to(planner.resize.remote(asked), PLANNER)
        except OmniloadError as error:
            _LOG.warning("the plane cannot go on at step %d and is opened anew: %s", step, error)
            return None
        _LOG.info("ranks of another driver go on at step %d", step)
        return over + 1

    def _open(self, spec: PlaneSpec) -> None:
        self._close()
        assert spec.run_dir is not None, "a plane is found by its run's folder"
        spec.run_dir.mkdir(parents=True, exist_ok=True)  # else there are no logs in it
        speak_for(log := RoleLogs(logs_folder(spec.run_dir)).of(_OPENER))
        self._plane, self._spec = RayPlane(spec), spec
        activity = Activity(_OPENER, log=log, host=host_here())
        self._activity = activity
        self._unpost = FolderBoard(self._plane.address.board).post(activity)

    def _close(self) -> None:
        plane, self._plane = self._plane, None
        if plane is not None:
            self._unpost()
            plane.close()

    def _ranks(self) -> list[str]:
        """Return the ranks that are there, or about to be."""
        if self._plane is None or self._spec is None:
            return []
        folder, now_s = self._plane.address.board, time.monotonic()
        silent_s = self._spec.mix.runtime.silent_after
        found = [
            name
            for name, beat in FolderBoard(folder).read().items()
            # Those of this host hold a lock until they end; of others there are heartbeats alone.
            if is_rank(name) and not rank_has_ended(folder, name) and now_s - beat.beat_s < silent_s
        ]
        return sorted(found)

    def _watch(self) -> None:
        """End the plane and this actor once no rank has been there for as long as the mix says."""
        while True:
            time.sleep(_LOOK_S)
            if not self._changing.acquire(blocking=False):
                continue  # a driver attaches
            try:
                if self._look(time.monotonic()):
                    break
            finally:
                self._changing.release()
        with suppress(RayError):
            ray.kill(self._self, no_restart=True)

    def _look(self, now_s: float) -> bool:
        """Tell whether the plane was ended, as nobody has used it for too long."""
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
            "no rank has been there for %.0f s, the limit of runtime.keep: the detached data plane ends",
            idle_s,
        )
        self._close()
        return True


def attach(stack: ExitStack, spec: PlaneSpec, identity: Mapping[str, str]) -> PlaneAddress:
    """Have the plane of a run serve this driver's ranks, and start it where there is none.

    Args:
        stack: Gets what is to be closed: this process's way to the Ray.
        spec: The run, with the state that it goes on from.
        identity: Of which mix and release it is, by names of what differs.

    Raises:
        StateError: The plane of the run is of another mix or release, or has ranks of another driver.
        OmniloadError: As for opening a plane.
    """
    runtime = spec.mix.runtime
    environment = runtime.env.passed_on(os.environ)
    stack.callback(given_cluster(runtime.address).close)
    # The plane has the code of the job that opened it, functions that a mix names among it.
    identity = {**identity, **_code_of_job()}
    driver = f"process {os.getpid()} on {socket.gethostname()}"
    limit_s = runtime.place.wait + runtime.batch_timeout
    for _ in range(_TRIES):
        opener = _opener_of(spec)
        try:
            _refuse_another(spec, ray.get(opener.identity.remote()), identity)
            told = opener.attach.remote(_at_whole_paths(spec), identity, environment, driver)
            if not wait_for_ref(told, limit_s, lambda: None):
                raise UnavailableError(
                    f"the detached data plane of {spec.run_dir} was not opened within {limit_s:.0f} s; see its logs"
                )
            address: PlaneAddress = ray.get(told)
        except RayError as error:
            if not is_lost(error):
                raise plain_error(error, _OPENER) from error
            threading.Event().wait(_PAUSE_S)
        else:
            return address
    raise UnavailableError(
        f"the opener of the detached data plane of {spec.run_dir} ended {_TRIES} times as it was asked; see its log"
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
    """End the detached plane of a run; return what it did.

    Raises:
        ConfigError: No Ray can be joined at ``address``.
        StateError: No such plane is there.
    """
    cluster = given_cluster(address)
    try:
        try:
            opener: Any = ray.get_actor(_name_of(run_dir), namespace=_NAMESPACE)
        except ValueError:
            raise StateError(
                f"no detached data plane of {run_dir} is in the Ray at {cluster.address}: it has ended, by itself "
                "after runtime.keep, or was opened by another path of this folder"
            ) from None
        found: str = answer_to(opener.stop.remote(), _OPENER, limit_s=_STOPPED_S)
        ray.kill(opener, no_restart=True)
    finally:
        cluster.close()
    return found


def _name_of(run_dir: Path) -> str:
    folder = str(run_dir.resolve()).encode()
    return f"{_OPENER}-{hashlib.blake2b(folder, digest_size=8).hexdigest()}"


def _opener_of(spec: PlaneSpec) -> Any:  # noqa: ANN401 -- Ray's handles have no static type
    """Return the opener of a run; a new one on this node where there is none."""
    assert spec.run_dir is not None, "whoever opens a detached plane requires one"
    start = Start(
        place=node_here(),
        threads=_THREADS,
        namespace=_NAMESPACE,
        variables=spec.mix.runtime.env.set,
        is_detached=True,
    )
    return actor_of(PlaneOpener, _name_of(spec.run_dir), start).remote()


def _code_of_job() -> dict[str, str]:
    """Return what of its code the job of this process brought, each by a name that tells its content."""
    brought: Mapping[str, Any] = ray.get_runtime_context().runtime_env
    return {f"{key} of the job": str(brought[key]) for key in _CODE if brought.get(key)}


def _refuse_another(spec: PlaneSpec, found: Mapping[str, str], mine: Mapping[str, str]) -> None:
    differ = [key for key in {**mine, **found} if found.get(key) != mine.get(key)] if found else []
    if differ:
        key = differ[0]
        raise StateError(
            f"the detached data plane of {spec.run_dir} is of another mix, or release: {key} is "
            f"{found.get(key, 'not given')}, here {mine.get(key, 'not given')}; end it by omniload mix stop "
            f"{spec.run_dir}, or open what it is of"
        )


def _at_whole_paths(spec: PlaneSpec) -> PlaneSpec:
    """Return a run whose folders are the same in a process of another working directory."""
    assert spec.run_dir is not None, "whoever opens a detached plane requires one"
    return replace(
        spec,
        base_dir=spec.base_dir.resolve(),
        run_dir=spec.run_dir.resolve(),
        cache_dir=None if spec.cache_dir is None else spec.cache_dir.resolve(),
    )

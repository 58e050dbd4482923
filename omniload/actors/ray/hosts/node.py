"""The processes of a node of Ray, without those that no data plane asks.

``ray.init`` also starts an autoscaler, a log monitor, and a dashboard server even where the
dashboard is left out, and waits for that one: 3.7 s of processor time together, most of the
start on a small machine. Ray has no option against them, so this starts Ray's own ``Node``
as Ray's ``cluster_utils`` does, without them. The dashboard's agent on the node, 0.8 s more,
is replaced by a process that does nothing, as a raylet ends when its agent does; the agent for
environments of tasks, 0.6 s, by one that becomes it when somebody asks. Processes of actors
are forked from one that loads what roles need while Ray starts (``worker``).
"""

import subprocess
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from ipaddress import ip_address
from typing import Any, Protocol

from typing_extensions import override

from omniload.actors.ray.environment import ray
from omniload.actors.ray.hosts import worker
from omniload.actors.ray.hosts.node_plan import (
    NodePlan,
    begin_loading,
    places_of,
    ports_of,
    without_agents,
)
from omniload.base.clock import SystemClock
from omniload.base.concurrency.held_signals import let_signals_in
from omniload.base.log import get_logger

__all__ = ["RayNode", "look_often", "start_node"]

_LOG = get_logger(__name__)
_REGISTERED_WITHIN_S = 120.0
"""Ray itself waits another 30 s then; without this, those 30 s are all, too few where cores are scarce."""
_LOOK_AGAIN_S = 0.02
_NO_SERVICE = -1
"""What Ray's own agent says of a service that its installation lacks."""
_CONNECTED_AT_ONCE = {"RAY_prestart_worker_first_driver": "0"}
"""Else a raylet answers its first driver once the workers are there that it starts ahead: meanwhile that one makes its
actors, for which workers are started all the same. Of a node that others may join nothing is set: Ray then started
what had affinity to another node on this one."""
_PATCHING = threading.Lock()


class RayNode(Protocol):
    """What was started: address, and an end to it."""

    @property
    def gcs_address(self) -> str:
        """Where others join."""
        ...

    def dead_processes(self) -> "list[tuple[str, subprocess.Popen[bytes]]]":
        """Return the processes that have ended, by kind."""
        ...

    def kill_all_processes(
        self, check_alive: bool, allow_graceful: bool, wait: bool
    ) -> None:  # Ray's signature
        """End every process of the node."""


class _Loads:
    """What workers of a node are forked from."""

    _raylet_socket_name: str | None
    _loading: "subprocess.Popen[bytes] | None" = None
    _has_actors = True

    def load(self, begun: list[Any]) -> None:
        """Begin it, once, while Ray's servers start, which takes as long; note that there is something to be ended."""
        if self not in begun:
            begun.append(self)
            if self._has_actors:
                self._loading = begin_loading(str(self._raylet_socket_name))

    def kill_all_processes(
        self, check_alive: bool = True, allow_graceful: bool = False, wait: bool = False
    ) -> None:  # Ray's signature
        """End it, and every process of Ray's."""
        if self._loading is not None:
            self._loading.kill()
            self._loading.wait()
        super().kill_all_processes(check_alive, allow_graceful, wait)  # type: ignore[misc]


def _is_lasting() -> bool:
    """Tell whether Ray may tie what it starts to this thread: one beside the main one may end long before the plane."""
    return threading.current_thread() is threading.main_thread()


def start_node(plan: NodePlan) -> RayNode | None:
    """Start a node whose processes end with this one, however it ends.

    Returns:
        The node, or ``None`` where this version of Ray cannot be started this way.

    Raises:
        ConfigError: The plan's ports are too few.
    """
    begun: list[RayNode] = []
    # Inside, so that a Ray that has moved them does not keep this module from loading.
    try:
        from ray._private.node import Node  # noqa: PLC0415
        from ray._private.parameter import RayParams  # noqa: PLC0415

        class LeanNode(_Loads, Node):
            _has_actors = plan.workers > 0

            @override
            def start_head_processes(self) -> None:
                self.load(begun)
                super().start_head_processes()  # type: ignore[no-untyped-call]

            @override
            def start_api_server(self, **_: Any) -> None:
                """Start no dashboard server."""

            @override
            def start_ray_processes(self) -> None:
                self.load(begun)
                with _no_agents(self):
                    super().start_ray_processes()  # type: ignore[no-untyped-call]
                look_often(self)

        parameters = RayParams(
            num_cpus=plan.workers,
            node_ip_address=plan.address,
            object_store_memory=plan.object_store_bytes,
            include_dashboard=False,
            # Roles write their own lines, by role: Ray's copies would only be copied once more.
            include_log_monitor=False,  # type: ignore[arg-type]  # annotated as text, used as a flag
            no_monitor=True,
            worker_path=worker.__file__,
            gcs_address=plan.head,
            **ports_of(plan),
            **places_of(plan),
        )
        # ``spawn_reaper``: Ray's own watch on its processes, beside ours, which ends what that one misses.
        node: RayNode = LeanNode(
            parameters, head=plan.head is None, shutdown_at_exit=False, spawn_reaper=_is_lasting()
        )
    except (ImportError, TypeError, AttributeError) as error:
        # The node is Ray's inside and may change; ray.init is its promise, and only slower.
        _LOG.info("Ray %s is started by ray.init: %s", ray.__version__, error)
        _end(begun)
        return None
    except BaseException:
        _end(begun)
        raise
    return node


def _end(begun: Sequence[RayNode]) -> None:
    """End the processes of a node that did not come to be."""
    for node in begun:
        node.kill_all_processes(check_alive=False, allow_graceful=False, wait=True)


def look_often(node: Any) -> None:  # noqa: ANN401 -- Ray is untyped
    """Wait until a node has joined itself. Ray does too, but looks once a second, and not for long.

    Raises:
        RuntimeError: A process of the node has ended.
    """
    ended: list[Any] = []
    try:
        client, clock = node.get_gcs_client(), SystemClock()
        numbers = [ray.NodeID.from_hex(node._node_id)]
        until_s = clock.now_s() + _REGISTERED_WITHIN_S
        while clock.now_s() < until_s and not client.check_alive(numbers, timeout=1)[0]:
            if ended := node.dead_processes():
                break
            let_signals_in()
            clock.sleep(_LOOK_AGAIN_S)
    except Exception as error:  # noqa: BLE001 -- a short cut only: Ray waits in its own way now
        _LOG.debug("the node is waited for as Ray does: %s", error)
    if ended:
        kind, process = ended[0]
        raise RuntimeError(f"Ray's {kind} ended with {process.returncode} while the node started")


def _leave_out_services(node: Any) -> None:  # noqa: ANN401 -- Ray is untyped
    """Say that the services of the node's agents that nobody asks are not there.

    The raylet waits 15 s for its agents to say their ports and then ends itself; no option
    changes that, and a loaded machine starts no Python process so fast. The port of the one
    service that is asked is chosen before.
    """
    raylet: Any = import_module("ray._raylet")
    for name in (
        raylet.DASHBOARD_AGENT_LISTEN_PORT_NAME,
        raylet.METRICS_AGENT_PORT_NAME,
        raylet.METRICS_EXPORT_PORT_NAME,
    ):
        raylet.persist_port(node._session_dir, node._node_id, name, _NO_SERVICE)


@contextmanager
def _no_agents(node: Any) -> Iterator[None]:  # noqa: ANN401 -- Ray is untyped
    """Have the raylet of a node, which is started meanwhile, begin without its agents."""
    # Before the raylet is started, which reads them from its folder.
    _leave_out_services(node)
    services: Any = import_module("ray._private.services")
    # Whether a dashboard could be started, Ray finds out by loading its web server: 0.2 s of processor time.
    asked: Any = import_module("ray._private.utils")

    def start(command: Sequence[str], *words: Any, **named: Any) -> Any:  # noqa: ANN401 -- Ray is untyped
        if ip_address(node.node_ip_address).is_loopback:
            named["env_updates"] = {**(named.get("env_updates") or {}), **_CONNECTED_AT_ONCE}
        return own(without_agents(command), *words, **named)

    with _PATCHING:
        own = services.start_ray_process
        could = asked.get_dashboard_dependency_error
        services.start_ray_process, asked.get_dashboard_dependency_error = start, lambda: None
        try:
            yield
        finally:
            services.start_ray_process, asked.get_dashboard_dependency_error = own, could

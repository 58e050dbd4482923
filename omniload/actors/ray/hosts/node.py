"""The processes of a node of Ray, without those that a data plane never uses.

``ray.init`` also starts an autoscaler, a log monitor, and a dashboard server (even without the dashboard), and waits
for that server. Together they take 3.7 s of processor time, most of the start on a small machine. Ray has no option to
disable them. So this module starts Ray's own ``Node`` without them, in the same way as Ray's ``cluster_utils``. A
raylet ends when an agent ends, so agents are replaced: the dashboard's agent (0.8 s) by a process that does nothing,
and the agent for environments of tasks (0.6 s) by a process that becomes the agent when it is first asked. Processes of
actors are forked from a process that loads the modules of roles while Ray starts (``worker``).
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
"""Ray waits another 30 s after this. With its own setting it waits those 30 s alone, too short when cores are
scarce."""
_LOOK_AGAIN_S = 0.02
_NO_SERVICE = -1
"""Port that Ray's own agent reports for a service that its installation lacks."""
_CONNECTED_AT_ONCE = {"RAY_prestart_worker_first_driver": "0"}
"""Without this setting, a raylet answers its first driver only after it has started its spare workers. With it, the
driver creates its actors meanwhile, and workers are started for them anyway. The setting is left out on a node that
others may join: with it, Ray started actors here that had affinity to another node."""
_PATCHING = threading.Lock()


class RayNode(Protocol):
    """A started node: its address, and a way to end it."""

    @property
    def gcs_address(self) -> str:
        """Address where other nodes join."""
        ...

    def dead_processes(self) -> "list[tuple[str, subprocess.Popen[bytes]]]":
        """Return the processes that have ended, by kind."""
        ...

    def kill_all_processes(
        self, check_alive: bool, allow_graceful: bool, wait: bool
    ) -> None:  # Ray's signature
        """End every process of the node."""


class _Loads:
    """Adds to a node the process that its workers are forked from."""

    _raylet_socket_name: str | None
    _loading: "subprocess.Popen[bytes] | None" = None
    _has_actors = True

    def load(self, begun: list[Any]) -> None:
        """Start the loading process once, in parallel with Ray's servers; note this node among those to be ended."""
        if self not in begun:
            begun.append(self)
            if self._has_actors:
                self._loading = begin_loading(str(self._raylet_socket_name))

    def kill_all_processes(
        self, check_alive: bool = True, allow_graceful: bool = False, wait: bool = False
    ) -> None:  # Ray's signature
        """End the loading process and every process of Ray."""
        if self._loading is not None:
            self._loading.kill()
            self._loading.wait()
        super().kill_all_processes(check_alive, allow_graceful, wait)  # type: ignore[misc]


def _is_lasting() -> bool:
    """Return whether Ray may tie its processes to this thread: only the main thread surely outlives the plane."""
    return threading.current_thread() is threading.main_thread()


def start_node(plan: NodePlan) -> RayNode | None:
    """Start a node whose processes end with this process, however it ends.

    Returns:
        The node, or ``None`` if this version of Ray cannot be started this way.

    Raises:
        ConfigError: The plan's ports are too few.
    """
    begun: list[RayNode] = []
    # Imported here, so that this module still loads if a later Ray has moved these modules.
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
            # Each role writes its own log, so Ray's log monitor would only copy the lines once more.
            include_log_monitor=False,  # type: ignore[arg-type]  # annotated as text, used as a flag
            no_monitor=True,
            worker_path=worker.__file__,
            gcs_address=plan.head,
            **ports_of(plan),
            **places_of(plan),
        )
        # ``spawn_reaper`` adds Ray's own watch over its processes, which ends any process that ours misses.
        node: RayNode = LeanNode(
            parameters, head=plan.head is None, shutdown_at_exit=False, spawn_reaper=_is_lasting()
        )
    except (ImportError, TypeError, AttributeError) as error:
        # ``Node`` is internal to Ray and may change. ``ray.init`` is the stable way, and only slower.
        _LOG.info("Ray %s is started by ray.init: %s", ray.__version__, error)
        _end(begun)
        return None
    except BaseException:
        _end(begun)
        raise
    return node


def _end(begun: Sequence[RayNode]) -> None:
    """End the processes of a node that failed to start."""
    for node in begun:
        node.kill_all_processes(check_alive=False, allow_graceful=False, wait=True)


def look_often(node: Any) -> None:  # noqa: ANN401 -- Ray is untyped
    """Wait until a node has registered itself; Ray waits too, but looks only once a second and gives up early.

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
    except Exception as error:  # noqa: BLE001 -- only a short cut: Ray now waits in its own way
        _LOG.debug("the node is waited for as Ray does: %s", error)
    if ended:
        kind, process = ended[0]
        raise RuntimeError(f"Ray's {kind} ended with {process.returncode} while the node started")


def _leave_out_services(node: Any) -> None:  # noqa: ANN401 -- Ray is untyped
    """Report that the services of the node's agents do not exist, apart from the one that is used.

    The raylet waits 15 s for its agents to report their ports, and then ends itself. Ray has no option to change this,
    and a loaded machine does not start a Python process that fast. The port of the one service that is used is chosen
    in advance.
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
    """Let the raylet that is started within this context begin without its agents."""
    # This comes before the raylet starts, because the raylet reads the ports from its folder.
    _leave_out_services(node)
    services: Any = import_module("ray._private.services")
    # Ray loads its web server to find out whether it could start a dashboard, which takes 0.2 s of processor time.
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

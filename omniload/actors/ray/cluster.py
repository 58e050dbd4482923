"""The Ray that a process is connected to: a private one, or a given one that somebody else started.

A private Ray has private folders and a private token, listens only on loopback unless told otherwise, and leaves
nothing behind. Its head is on the host where the plane is opened; a node joins it on each other host of the job.
"""

import logging
import os
import signal
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

from typing_extensions import override

from omniload.actors.ray.answers import ask_head, wait_for_future, wait_for_head
from omniload.actors.ray.environment import place_traces, ray
from omniload.actors.ray.given.namespaces import (
    in_turn,
    new_namespace,
    own_the_ray,
    require_unconnected,
)
from omniload.actors.ray.head_watch import SERVERS, once_none_is_stopped, why_late
from omniload.actors.ray.hosts.node import RayNode, start_node
from omniload.actors.ray.hosts.node_plan import Listening, NodePlan
from omniload.actors.ray.tokens import own_token
from omniload.actors.reaper import PlaneFolder, Reaper, marked
from omniload.base.errors import ConfigError, OmniloadError, StateError, UnavailableError
from omniload.base.linux.cores import task_room
from omniload.base.linux.folders import working_folder
from omniload.base.linux.network import require_reachable
from omniload.base.log import get_logger
from omniload.base.units import counted

__all__ = ["Cluster", "PrivateCluster", "connect", "node_here"]

_LOG = get_logger(__name__)
_CONNECTED_WITHIN_S, _TOLD_AFTER_S, _LEAVE_S = 150.0, 10.0, 30.0
"""Limit for connecting a process; time after which the user is told; limit for ending an attempt that is given up."""
_TASKS_EACH, _OTHERS = 30, 3
"""Threads of each of Ray's processes, about; and the number of processes without a role: two servers, and a rank."""


class Cluster(Protocol):
    """A Ray that this process is connected to."""

    address: str
    """Host and port that others join."""
    namespace: str
    """Namespace of the job's actors."""
    node_address: str
    """IP address of the node on this host; empty if Ray finds it."""

    @property
    def folder(self) -> Path:
        """Folder of this host for the plane's files, removed with it."""
        ...

    def ended_service(self) -> str:
        """Return which of Ray's servers that were started here has ended, and how; empty while all run."""
        return ""

    def close(self, *, is_used: bool = False) -> None:
        """End everything that was started; see ``PrivateCluster.close``."""
        ...


def connect(
    address: str,
    namespace: str,
    node_address: str = "",
    folder: Path | None = None,
) -> None:
    """Join a job's cluster from another process of it.

    Args:
        address: Host and port of the head.
        namespace: Namespace of the job's actors.
        node_address: IP address of the node on this host; if empty, Ray finds it.
        folder: Folder of the node, if several nodes of one host have that address.
    """
    options: dict[str, Any] = {"_node_ip_address": node_address} if node_address else {}
    if folder is not None:
        options["_temp_dir"] = str(folder)
    _init_ray(
        partial(_connected, f"the Ray at {address}"),
        address=address,
        namespace=namespace,
        **options,
    )


def node_here() -> str:
    """Return the id of the node through which this process is connected."""
    return str(ray.get_runtime_context().get_node_id())


def _init_ray(
    carried_out: Callable[[Callable[[], Any]], Any],
    **options: Any,  # noqa: ANN401 -- what Ray takes and returns
) -> Any:  # noqa: ANN401
    """Connect to Ray, and keep this process's own handler of SIGTERM.

    Ray replaces it by a trace and an abort, so a training script that saves a checkpoint at
    SIGTERM would die instead. In Python only the main thread can restore it.
    """
    place_traces()
    answer = signal.getsignal(signal.SIGTERM)

    def init() -> Any:  # noqa: ANN401 -- as above
        # Set by the connecting thread, which may continue after Ctrl-C, and is then waited for.
        with _addresses_as_they_are(), _no_word_of_sigterm():
            return ray.init(configure_logging=False, log_to_driver=False, **options)

    try:
        return carried_out(init)
    finally:
        if answer is not None and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, answer)


def _connected(
    which: str,
    init: Callable[[], Any],
    until: threading.Event | None = None,
) -> Any:  # noqa: ANN401 -- as above
    """Connect to a Ray with a time limit; log for whom the wait is.

    The call runs in a thread, because Ray waits for an hour if its head is stopped, and only the end of this process
    ends that wait.

    Args:
        which: The Ray, for messages.
        init: Connects.
        until: As for ``ask_head``, if Ray starts its processes in that call.

    Raises:
        StateError: An earlier call is still waiting.
        UnavailableError: Ray does not answer; it must not be shut down, see ``wait_for_head``.
    """
    if not wait_for_head(0.0):
        raise StateError(
            "this process still waits for a Ray that did not answer, and cannot connect to another; start a new "
            "process"
        )
    late = f"{which} has not connected this process within"
    context = ask_head(partial(once_none_is_stopped, init), until)
    if not wait_for_future(context, _TOLD_AFTER_S, lambda: None):
        _LOG.warning("%s %.0f of %.0f s: %s", late, _TOLD_AFTER_S, _CONNECTED_WITHIN_S, why_late())
        if not wait_for_future(context, _CONNECTED_WITHIN_S - _TOLD_AFTER_S, lambda: None):
            raise UnavailableError(
                f"{late} {_CONNECTED_WITHIN_S:.0f} s: {why_late()}; end this process, which still waits for it, and "
                "start again"
            )
    return context.result()


@contextmanager
def _no_word_of_sigterm() -> Iterator[None]:
    """Suppress Ray's warning that its own handler of SIGTERM is not set, which is intended."""

    def is_of_another(record: logging.LogRecord) -> bool:
        return not str(record.msg).startswith("SIGTERM handler is not set")

    logger = logging.getLogger("ray._private.worker")
    logger.addFilter(is_of_another)
    try:
        yield
    finally:
        logger.removeFilter(is_of_another)


@contextmanager
def _addresses_as_they_are() -> Iterator[None]:
    """Keep Ray from replacing loopback by the machine's outward address.

    Ray's servers listen on loopback alone only where a node's address is 127.0.0.1 itself; with
    any other, 127.0.0.2 included, they listen on every interface.
    """
    constants: Any = import_module("ray._private.ray_constants")
    before = getattr(constants, "ENABLE_RAY_CLUSTER", True)
    constants.ENABLE_RAY_CLUSTER = False
    try:
        yield
    finally:
        constants.ENABLE_RAY_CLUSTER = before


_LOOPBACK_ALONE = Listening()


class PrivateCluster(Cluster):
    """A node of Ray that is started for one job and ends with its opener, however that process ends."""

    @in_turn("starts a Ray of its own")
    def __init__(
        self,
        *,
        object_store_bytes: int,
        workers: int,
        listening: Listening = _LOOPBACK_ALONE,
        join: tuple[str, str] | None = None,
    ) -> None:
        """Start Ray, with room for ``workers`` actor processes; try once more if that fails.

        Args:
            object_store_bytes: Shared memory.
            workers: Number of actor processes; 0 for a node without actors.
            listening: Where the node listens.
            join: Address and namespace of the job's head on another host; ``None`` starts the head.

        Raises:
            ConfigError: There are too few ports, or Ray cannot start in this process, because its folder is gone or its
                host cannot reach itself.
            StateError: This process already uses Ray.
            UnavailableError: Ray did not start.
        """
        require_unconnected()
        # Otherwise Ray would wait for minutes, twice, and its error would not name the cause.
        working_folder()
        require_reachable(listening.address)
        _warn_of_few_tasks(workers)
        # A joining process has got the head's token already.
        if join is None:
            own_token()
        self._object_store_bytes, self._workers = object_store_bytes, workers
        self._listening, self._to_join = listening, join
        self.node_address = listening.address
        try:
            self._start()
        except OmniloadError:
            raise
        except Exception as error:  # noqa: BLE001 -- Ray raises bare exceptions when it is late
            _LOG.warning("Ray did not start, so it is started once more: %s", _said(error))
            self._start_again()

    def _start_again(self) -> None:
        try:
            self._start()
        except OmniloadError:
            raise
        except Exception as error:
            raise UnavailableError(
                f"Ray did not start, twice: {_said(error)}; load on this machine is {os.getloadavg()[0]:.1f} on "
                f"{counted(os.cpu_count() or 0, 'core')}: free cores, memory and space in {tempfile.gettempdir()} and "
                "try again, or set runtime.kind to local where one process holds all ranks"
            ) from error

    def _start(self) -> None:
        mark = new_namespace()
        self.namespace = mark if self._to_join is None else self._to_join[1]
        self._folder = PlaneFolder()
        self._node: RayNode | None = None
        self._ended = threading.Event()
        # Before the first file and process, so that the reaper ends them if this process is killed from now on.
        self._reaper = Reaper(mark, self._folder.places)
        self._own_no_more = own_the_ray()
        try:
            self._folder.make()
            with marked(mark):
                self.address = self._join()
        except BaseException:
            self._own_no_more()
            # If Ray were left during a call, it would end this process. The reaper ends Ray after this process.
            if wait_for_head(_LEAVE_S):
                self.close()
            raise

    def _join(self) -> str:
        """Start the node and connect to it; return its address."""
        self._node = start_node(
            NodePlan(
                folder=str(self._ray_folder),
                address=self._listening.address,
                workers=self._workers,
                object_store_bytes=self._object_store_bytes,
                ports=self._listening.ports,
                head=None if self._to_join is None else self._to_join[0],
            )
        )
        if self._node is None:
            return self._init_whole()
        # Identified by its folder, because each rank that joins from another host has a node at the same address.
        own = None if self._to_join is None else self._ray_folder
        connect(self._node.gcs_address, self.namespace, self.node_address, own)
        return self._node.gcs_address

    def _init_whole(self) -> str:
        if self._to_join is not None or self._listening.ports is not None:
            raise ConfigError(
                f"Ray {ray.__version__} cannot be started by omniload on several hosts or on ports of a range; install "
                "Ray 2.54 to 2.60, which is tested, or start a Ray yourself and name it by runtime.address"
            )
        context = _init_ray(
            partial(_connected, "the Ray that this process starts", until=self._ended),
            address="local",
            namespace=self.namespace,
            num_cpus=self._workers,
            object_store_memory=self._object_store_bytes,
            include_dashboard=False,
            _temp_dir=str(self._ray_folder),
            _node_ip_address=self.node_address,
        )
        return str(context.address_info["gcs_address"])

    @property
    @override
    def folder(self) -> Path:
        """Folder of its files, removed with it."""
        return self._folder.path

    @property
    def _ray_folder(self) -> Path:
        # Ray repeatedly opens its folder to every user of the host, so it lies inside a folder of this user alone.
        return self._folder.path / "r"

    @override
    def ended_service(self) -> str:
        """Return which server of this node has ended, and how; empty while all run."""
        ended = [] if self._node is None else self._node.dead_processes()
        return next(
            (f"{kind} ended with {it.returncode}" for kind, it in ended if kind in SERVERS), ""
        )

    @override
    @in_turn("ends a Ray of its own")
    def close(self, *, is_used: bool = False) -> None:
        """End every Ray process and remove the folder.

        Args:
            is_used: Whether a call to Ray is still under way in this process. If so, the process stays
                connected, because Ray would end it otherwise.
        """
        try:
            if not is_used:
                ray.shutdown()
            if self._node is not None:
                # Not gracefully, because nothing of Ray's is kept, and its own shutdown waits for one process after
                # another.
                self._node.kill_all_processes(check_alive=False, allow_graceful=False, wait=True)
                self._node = None
        finally:
            self._own_no_more()
            self._ended.set()
            # This also ends processes that Ray could not end, such as a stopped actor.
            self._reaper.close()
            self._folder.remove()


def _warn_of_few_tasks(workers: int) -> None:
    """Warn if Ray may get too few threads; it would abort, or never start an actor, without naming the limit."""
    room, needed = task_room(), _TASKS_EACH * (workers + _OTHERS)
    if room is not None and room.left < needed:
        _LOG.warning(
            "%s is %d processes and threads, of which at most %d are left; a data plane of %s on Ray takes about %d, "
            "and without them it may not start, or may abort: raise the limit, or end other processes",
            *(room.name, room.limit, room.left, counted(workers, "role"), needed),
        )


def _said(error: Exception) -> str:
    """Return the first line of an error of Ray."""
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"

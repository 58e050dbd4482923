"""The Ray that a process is connected to: one of our own, or one that somebody else started.

Our own has private folders and a private token, listens on loopback only unless told otherwise, and leaves nothing
behind. Its head is where the plane is opened; a node joins it on each other host of the job.
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
"""Longest that Ray may take to connect a process; when its user is told; and longest wait for one that is given up."""
_TASKS_EACH, _OTHERS = 30, 3
"""Threads that Ray has in each of its processes, about; and those that hold no role: two servers, and a rank."""


class Cluster(Protocol):
    """A Ray that this process is connected to."""

    address: str
    """Host and port that others join."""
    namespace: str
    """Of the job's actors."""
    node_address: str
    """IP address of the node on this host; empty where Ray finds it."""

    @property
    def folder(self) -> Path:
        """Folder of this host for the plane's files, removed with it."""
        ...

    def ended_service(self) -> str:
        """Return which server of Ray's that was started here has ended, and how; empty while all run."""
        return ""

    def close(self, *, is_used: bool = False) -> None:
        """End what was started; see ``PrivateCluster.close``."""
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
        namespace: Of the job's actors.
        node_address: IP address of the node on this host; empty to have Ray find it.
        folder: Of the node, where several of one host have that address.
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
    """Return the number of the node that this process is connected through."""
    return str(ray.get_runtime_context().get_node_id())


def _init_ray(
    carried_out: Callable[[Callable[[], Any]], Any],
    **options: Any,  # noqa: ANN401 -- what Ray takes and returns
) -> Any:  # noqa: ANN401
    """Connect to Ray, and keep this process's own answer to SIGTERM.

    Ray puts a trace and an abort in its place: a training script that saves a checkpoint when it
    is asked to end would die instead. Python lets the main thread alone put it back.
    """
    place_traces()
    answer = signal.getsignal(signal.SIGTERM)

    def init() -> Any:  # noqa: ANN401 -- as above
        # By the thread that connects: it may go on behind Ctrl-C, and be waited for.
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
    """Connect to a Ray; say for whom that waits, and give up in the end.

    In a thread: where its head is stopped, Ray waits for an hour, and nothing but this process's end ends that.

    Args:
        which: The Ray, for messages.
        init: Connects.
        until: As of ``ask_head``, where Ray starts its processes in that call.

    Raises:
        StateError: A call of before waits yet.
        UnavailableError: Ray does not answer; it must not be shut down, see ``wait_for_head``.
    """
    if not wait_for_head(0.0):
        raise StateError(
            "this process waits yet for a Ray that did not answer, and cannot be connected to another; start a new one"
        )
    late = f"{which} has not connected this process within"
    context = ask_head(partial(once_none_is_stopped, init), until)
    if not wait_for_future(context, _TOLD_AFTER_S, lambda: None):
        _LOG.warning("%s %.0f of %.0f s: %s", late, _TOLD_AFTER_S, _CONNECTED_WITHIN_S, why_late())
        if not wait_for_future(context, _CONNECTED_WITHIN_S - _TOLD_AFTER_S, lambda: None):
            raise UnavailableError(
                f"{late} {_CONNECTED_WITHIN_S:.0f} s: {why_late()}; end this process, which waits for it yet, and "
                "start again"
            )
    return context.result()


@contextmanager
def _no_word_of_sigterm() -> Iterator[None]:
    """Keep Ray from warning that its answer to SIGTERM, which is not wanted, is not set."""

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
    """Keep Ray from putting the machine's outward address in place of loopback.

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
    """A node of Ray started for one job and ended with its opener, whatever becomes of that process."""

    @in_turn("starts a Ray of its own")
    def __init__(
        self,
        *,
        object_store_bytes: int,
        workers: int,
        listening: Listening = _LOOPBACK_ALONE,
        join: tuple[str, str] | None = None,
    ) -> None:
        """Start Ray, with room for so many processes of actors; once more where that fails.

        Args:
            object_store_bytes: Shared memory.
            workers: Processes; 0 for a node on which no actor is to run.
            listening: Where the node listens.
            join: Address and namespace of the job's head on another host; ``None`` starts the head.

        Raises:
            ConfigError: The ports to listen on are too few, or Ray could not start as this process is: its folder is
                gone, or its host does not reach itself.
            StateError: This process already uses Ray.
            UnavailableError: Ray did not start.
        """
        require_unconnected()
        # Else it is seen when Ray has waited for minutes, twice, and what it says then does not name it.
        working_folder()
        require_reachable(listening.address)
        _warn_of_few_tasks(workers)
        # Who joins was given the head's token by now.
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
            _LOG.warning("Ray did not start, it is started once more: %s", _said(error))
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
        # Before the first file and process: the reaper ends them if this process is killed now.
        self._reaper = Reaper(mark, self._folder.places)
        self._own_no_more = own_the_ray()
        try:
            self._folder.make()
            with marked(mark):
                self.address = self._join()
        except BaseException:
            self._own_no_more()
            # Ray ends a process that it leaves under a call. The reaper ends it behind this process.
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
        # By its folder: ranks that join from another host have a node each, all at the address of that host.
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
        # Ray opens its own to every user of the host, again and again: it lies in one that is this user's alone.
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
            is_used: A call to Ray does not end in this process. Then this process stays
                connected: Ray ends a process that it leaves under a call.
        """
        try:
            if not is_used:
                ray.shutdown()
            if self._node is not None:
                # Not gracefully: nothing of Ray's is kept, and its own way out waits for each process in turn.
                self._node.kill_all_processes(check_alive=False, allow_graceful=False, wait=True)
                self._node = None
        finally:
            self._own_no_more()
            self._ended.set()
            # Also what Ray could not end, such as an actor that was stopped.
            self._reaper.close()
            self._folder.remove()


def _warn_of_few_tasks(workers: int) -> None:
    """Say where Ray may get too few threads: it would abort, or never start an actor, and name no limit."""
    room, needed = task_room(), _TASKS_EACH * (workers + _OTHERS)
    if room is not None and room.left < needed:
        _LOG.warning(
            "%s is %d processes and threads, of which %d are left at most; a data plane of %s on Ray takes about %d, "
            "and may not start, or abort, without them: raise it, or end what runs beside it",
            *(room.name, room.limit, room.left, counted(workers, "role"), needed),
        )


def _said(error: Exception) -> str:
    """Return the first line of what Ray raised."""
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"

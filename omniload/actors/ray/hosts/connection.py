"""A connection of this process to a Ray, on the addresses it is told."""

import secrets
import shutil
import signal
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

from typing_extensions import override

from omniload.actors.ray.environment import ray, use_given_token
from omniload.actors.reaper import Reaper
from omniload.base.errors import ConfigError, StateError
from omniload.base.linux.network import LOOPBACK

__all__ = ["AttachedCluster", "Cluster", "Listening", "connect", "init_ray", "node_here"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Listening:
    """Where a node listens."""

    address: str = LOOPBACK
    """IP address of this host."""
    ports: range | None = None
    """``None`` for any."""


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


def connect(address: str, namespace: str, node_address: str = "") -> None:
    """Join a job's cluster from another process of it.

    Args:
        address: Host and port of the head.
        namespace: Of the job's actors.
        node_address: IP address of the node on this host; empty to have Ray find it.
    """
    options = {"_node_ip_address": node_address} if node_address else {}
    init_ray(address=address, namespace=namespace, **options)


def node_here() -> str:
    """Return the number of the node that this process is connected through."""
    return str(ray.get_runtime_context().get_node_id())


def init_ray(**options: Any) -> Any:  # noqa: ANN401 -- what Ray takes and returns
    """Connect to Ray, and keep this process's own answer to SIGTERM.

    Ray puts a trace and an abort in its place: a training script that saves a checkpoint when it
    is asked to end would die instead. Python lets the main thread alone put it back.
    """
    answer = signal.getsignal(signal.SIGTERM)
    try:
        with _addresses_as_they_are():
            return ray.init(configure_logging=False, log_to_driver=False, **options)
    finally:
        if answer is not None and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, answer)


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


class AttachedCluster(Cluster):
    """The connection to a Ray that somebody else started; its actors end with this process."""

    def __init__(self, address: str, namespace: str | None = None) -> None:
        """Connect.

        Args:
            address: Host and port of its head, or ``auto`` for the one that this machine is part of.
            namespace: Of the job's actors; a new one by default.

        Raises:
            ConfigError: No Ray answers there, or not to this token.
            StateError: This process already uses Ray.
        """
        if ray.is_initialized():
            raise StateError(
                "this process is connected to a Ray cluster already; close it (ray.shutdown()) before the data plane "
                "is opened"
            )
        use_given_token()
        self.namespace = namespace or f"omniload-{secrets.token_hex(4)}"
        self.node_address = ""
        try:
            connect(address, self.namespace)
        except Exception as error:
            raise ConfigError(
                f"runtime.address {address!r}: no Ray can be joined there ({type(error).__name__}: "
                f"{str(error).strip().partition(chr(10))[0]}); start one with 'ray start --head' on this machine or "
                "join it to the cluster, and where that asks for a token set RAY_AUTH_MODE and RAY_AUTH_TOKEN"
            ) from error
        try:
            self.address = str(ray.get_runtime_context().gcs_address)
            self._folder = Path(tempfile.gettempdir()) / f"omniload-ray-{secrets.token_hex(4)}"
            self._reaper = Reaper(self.namespace, [self._folder])
            self._folder.mkdir(mode=0o700)
        except BaseException:
            ray.shutdown()
            raise

    @property
    @override
    def folder(self) -> Path:
        return self._folder

    @override
    def close(self, *, is_used: bool = False) -> None:
        try:
            if not is_used:
                ray.shutdown()  # ends the actors that this process is the owner of
        finally:
            self._reaper.close()
            shutil.rmtree(self._folder, ignore_errors=True)

"""A Ray of our own on this machine: private folder, private token, loopback only.

It never joins a cluster that happens to run here, and leaves nothing behind.
"""

import os
import secrets
import shutil
import signal
import tempfile
import threading
from pathlib import Path
from typing import Any

from omniload.actors.ray.environment import own_token, ray
from omniload.actors.ray.node import RayNode, start_node
from omniload.actors.reaper import Reaper, marked
from omniload.base.errors import OmniloadError, StateError, UnavailableError
from omniload.base.log import get_logger

__all__ = ["PrivateCluster", "connect"]

_LOG = get_logger(__name__)
_NODE_ADDRESS = "127.0.0.2"
"""Loopback. Ray replaces 127.0.0.1 by the machine's outward address; other loopback addresses it leaves alone."""


class PrivateCluster:
    """A single-node Ray started for one job and ended with it, whatever becomes of this process."""

    def __init__(self, *, object_store_bytes: int, workers: int) -> None:
        """Start Ray, with so many processes ready for actors; once more where that fails.

        Raises:
            StateError: This process already uses Ray.
            UnavailableError: Ray did not start.
        """
        if ray.is_initialized():
            raise StateError(
                "this process is connected to a Ray cluster already; close it (ray.shutdown()) "
                "or set runtime.kind to local"
            )
        own_token()
        self._object_store_bytes, self._workers = object_store_bytes, workers
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
                f"{os.cpu_count()} cores: free cores, memory and space in {tempfile.gettempdir()} and try again, "
                "or set runtime.kind to local where one process holds all ranks"
            ) from error

    def _start(self) -> None:
        self.namespace = f"omniload-{secrets.token_hex(4)}"
        # Short: the paths of Ray's sockets below it must stay under 107 characters.
        self._folder = Path(tempfile.gettempdir()) / f"omniload-ray-{secrets.token_hex(4)}"
        self._node: RayNode | None = None
        # Before the first file and process: the reaper ends them if this process is killed now.
        self._reaper = Reaper(self.namespace, [self._folder])
        try:
            self._folder.mkdir(mode=0o700)
            with marked(self.namespace):
                self.address = self._join()
        except BaseException:
            self.close()
            raise

    def _join(self) -> str:
        """Start the node and connect to it; return its address."""
        self._node = start_node(
            folder=str(self._folder),
            address=_NODE_ADDRESS,
            workers=self._workers,
            object_store_bytes=self._object_store_bytes,
        )
        if self._node is None:
            return _init_whole(
                str(self._folder), self.namespace, self._workers, self._object_store_bytes
            )
        connect(self._node.gcs_address, self.namespace)
        return self._node.gcs_address

    @property
    def folder(self) -> Path:
        """Folder of its files, removed with it."""
        return self._folder

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
                self._node.kill_all_processes(check_alive=False, allow_graceful=False, wait=True)
                self._node = None
        finally:
            # Also what Ray could not end, such as an actor that was stopped.
            self._reaper.close()
            shutil.rmtree(self._folder, ignore_errors=True)


def _said(error: Exception) -> str:
    """Return the first line of what Ray raised."""
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"


def _init_whole(folder: str, namespace: str, workers: int, object_store_bytes: int) -> str:
    """Start Ray as its documentation says; return the address."""
    context = _init(
        address="local",
        namespace=namespace,
        num_cpus=workers,
        object_store_memory=object_store_bytes,
        include_dashboard=False,
        _temp_dir=folder,
    )
    return str(context.address_info["gcs_address"])


def connect(address: str, namespace: str) -> None:
    """Join a job's cluster from another process of it."""
    _init(address=address, namespace=namespace)


def _init(**options: Any) -> Any:  # noqa: ANN401 -- what Ray takes and returns
    """Connect to Ray, and keep this process's own answer to SIGTERM.

    Ray puts a trace and an abort in its place: a training script that saves a checkpoint when it
    is asked to end would die instead. Python lets the main thread alone put it back.
    """
    answer = signal.getsignal(signal.SIGTERM)
    try:
        return ray.init(
            configure_logging=False,
            log_to_driver=False,
            _node_ip_address=_NODE_ADDRESS,
            **options,
        )
    finally:
        if answer is not None and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, answer)

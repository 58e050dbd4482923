"""A Ray of our own on this machine: private folder, private token, loopback only.

It never joins a cluster that happens to run here, and leaves nothing behind.
"""

import secrets
import shutil
import tempfile
from typing import Any

from omniload.actors.ray_environment import ray
from omniload.actors.ray_node import RayNode, start_node
from omniload.base.errors import StateError

__all__ = ["PrivateCluster", "connect"]

_NODE_ADDRESS = "127.0.0.2"
"""Loopback. Ray replaces 127.0.0.1 by the machine's outward address; other loopback addresses it leaves alone."""


class PrivateCluster:
    """A single-node Ray started for one job and ended with it."""

    def __init__(self, *, object_store_bytes: int, workers: int) -> None:
        """Start Ray, with so many processes ready for actors.

        Raises:
            StateError: This process already uses Ray.
        """
        if ray.is_initialized():
            raise StateError(
                "this process is connected to a Ray cluster already; close it (ray.shutdown()) "
                "or set runtime.kind to local"
            )
        self.namespace = f"omniload-{secrets.token_hex(4)}"
        # Short: the paths of Ray's sockets below it must stay under 107 characters.
        self._folder = tempfile.mkdtemp(prefix="omniload-ray-")
        self._node: RayNode | None = None
        try:
            self._node = start_node(
                folder=self._folder,
                address=_NODE_ADDRESS,
                workers=workers,
                object_store_bytes=object_store_bytes,
            )
            if self._node is None:
                self.address = _init_whole(
                    self._folder, self.namespace, workers, object_store_bytes
                )
            else:
                self.address = self._node.gcs_address
                connect(self.address, self.namespace)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End every Ray process and remove the folder."""
        ray.shutdown()
        if self._node is not None:
            self._node.kill_all_processes(check_alive=False, allow_graceful=False, wait=True)
            self._node = None
        shutil.rmtree(self._folder, ignore_errors=True)


def _init_whole(folder: str, namespace: str, workers: int, object_store_bytes: int) -> str:
    """Start Ray as its documentation says; return the address."""
    context: Any = ray.init(
        address="local",
        namespace=namespace,
        num_cpus=workers,
        object_store_memory=object_store_bytes,
        include_dashboard=False,
        configure_logging=False,
        log_to_driver=False,
        _temp_dir=folder,
        _node_ip_address=_NODE_ADDRESS,
    )
    return str(context.address_info["gcs_address"])


def connect(address: str, namespace: str) -> None:
    """Join a job's cluster from another process of it."""
    ray.init(
        address=address,
        namespace=namespace,
        configure_logging=False,
        log_to_driver=False,
        _node_ip_address=_NODE_ADDRESS,
    )

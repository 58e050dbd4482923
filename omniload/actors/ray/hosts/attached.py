"""A Ray that runs already: this job's actors in a namespace of their own, and nothing of Ray's ended with them."""

import secrets
import shutil
import tempfile
from pathlib import Path

from typing_extensions import override

from omniload.actors.ray.environment import ray, use_given_token
from omniload.actors.ray.hosts.connection import Cluster, connect
from omniload.actors.reaper import Reaper
from omniload.base.errors import ConfigError, StateError

__all__ = ["AttachedCluster"]


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

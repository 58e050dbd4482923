"""A Ray that runs already: this process joins it for a plane, or reuses the connection that it already has."""

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from typing_extensions import override

from omniload.actors.ray.cluster import Cluster, connect
from omniload.actors.ray.environment import RayError, ray
from omniload.actors.ray.given.namespaces import (
    in_turn,
    new_namespace,
    require_not_owned,
    require_unconnected,
    use_connection,
)
from omniload.actors.ray.given.running import address_meant, require_listening, require_same
from omniload.actors.ray.tokens import use_given_token
from omniload.actors.reaper import PlaneFolder, Reaper
from omniload.base.errors import ConfigError, UnavailableError

__all__ = ["AttachedCluster", "SharedCluster", "code_of_job", "given_cluster"]

_CODE = ("working_dir", "py_modules")
"""Keys of a ``runtime_env`` whose values Ray names by a digest of their content."""


class _GivenCluster(Cluster):
    """A Ray that the user started, and this process's folder on its host; other planes may have folders there too."""

    def __init__(self, namespace: str | None) -> None:
        """Use the namespace of another process's plane, or a new one, whose actors all end with this process."""
        self._is_opener = namespace is None
        # A new namespace each time: actors are found by name, and two planes in one Ray have roles of the same names.
        self.namespace = namespace or new_namespace()

    def _begin(self, *, made: bool) -> None:
        """Create the folder and count the plane; ``made`` says whether this plane made the connection to Ray."""
        self.node_address = ""
        self.address = str(ray.get_runtime_context().gcs_address)
        self._folder = PlaneFolder()
        # Registered before the folder exists, so that the folder is removed even if this process is killed right
        # afterwards. Ray ends the actors.
        self._reaper = Reaper("", self._folder.places)
        self._folder.make()
        self._use_no_more = use_connection(made=made)

    @property
    @override
    def folder(self) -> Path:
        return self._folder.path

    @override
    def close(self, *, is_used: bool = False) -> None:
        """End the actors of this plane; the last plane leaves the Ray, if a plane had made the connection."""
        try:
            # The turn lasts until the Ray is left, so that no new plane opens over a connection that is going away.
            with in_turn(f"leaves the Ray at {self.address}"):
                leaves = self._use_no_more()
                if is_used:
                    return  # Ray ends a process that leaves it during a call
                if leaves:
                    ray.shutdown()  # ends the actors that this process owns
                elif self._is_opener:
                    _end_actors_in(self.namespace)
        finally:
            self._reaper.close()
            self._folder.remove()


class AttachedCluster(_GivenCluster):
    """A connection that this process makes to a Ray started by the user; its actors end with this process.

    Further planes of this process share the connection, and the last of them closes it.
    """

    def __init__(self, address: str, namespace: str | None = None) -> None:
        """Connect.

        Args:
            address: Host and port of the Ray's head, or ``auto`` for the Ray that this machine is part of.
            namespace: Namespace of the job's actors; a new one by default.

        Raises:
            ConfigError: No Ray answers there, or it rejects this token, or it is unclear which Ray ``auto`` means.
            StateError: This process already uses Ray.
            UnavailableError: The Ray does not answer in time.
        """
        require_unconnected()
        require_listening(address := address_meant(address))
        asked = use_given_token()
        super().__init__(namespace)
        try:
            connect(address, self.namespace)
        except UnavailableError:
            raise
        except Exception as error:
            raise ConfigError(
                f"runtime.address {address!r}: no Ray can be joined there ({type(error).__name__}: "
                f"{str(error).strip().partition(chr(10))[0]}); start one with 'ray start --head' on this machine or "
                f"join it to the cluster. It was asked {asked}: set RAY_AUTH_MODE and RAY_AUTH_TOKEN as for Ray itself"
            ) from error
        try:
            self._begin(made=True)
        except BaseException:
            ray.shutdown()
            raise


class SharedCluster(_GivenCluster):
    """The connection that this process already had, as a worker of Ray Train or from a script's ``ray.init``.

    It may also be the connection of another plane of this process. It stays open, because other code of this process
    uses it.
    """

    def __init__(self, address: str, namespace: str | None = None) -> None:
        """Use the connection.

        Args:
            address: Address of the wanted Ray.
            namespace: Namespace of a plane that another process has opened. By default, a new namespace whose actors
                all end with this process.

        Raises:
            StateError: The process is connected to another Ray, or to a Ray that a plane started for itself.
        """
        require_not_owned()
        require_same(address)
        super().__init__(namespace)
        self._begin(made=False)


def given_cluster(address: str, namespace: str | None = None) -> AttachedCluster | SharedCluster:
    """Return this process's connection to a running Ray: the existing one, or else a new one."""
    with in_turn(f"connects to the Ray at {address}"):
        if ray.is_initialized():
            return SharedCluster(address, namespace)
        return AttachedCluster(address, namespace)


def code_of_job() -> dict[str, str]:
    """Return the code that this process's job brought into Ray, each part under a name that identifies its content."""
    brought: Mapping[str, Any] = ray.get_runtime_context().runtime_env
    return {f"{key} of the job": str(brought[key]) for key in _CODE if brought.get(key)}


def _end_actors_in(namespace: str) -> None:
    """End all actors of a namespace; actors without a name there end with their owners."""
    with suppress(RayError, ConnectionError):  # the Ray is lost, and its actors too
        named: Any = ray.util.list_named_actors(all_namespaces=True)
        for each in named:
            if each["namespace"] == namespace:
                with suppress(ValueError, RayError):  # the actor has just ended
                    ray.kill(ray.get_actor(each["name"], namespace=namespace), no_restart=True)

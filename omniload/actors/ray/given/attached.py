"""A Ray that runs already: joined for a plane, or shared with whatever connected this process before."""

import socket
from collections.abc import Mapping
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any

from typing_extensions import override

from omniload.actors.lifeline import answers
from omniload.actors.ray.answers import ask_head, wait_for_future
from omniload.actors.ray.cluster import Cluster, connect
from omniload.actors.ray.environment import RayError, ray
from omniload.actors.ray.given.namespaces import (
    in_turn,
    new_namespace,
    require_not_owned,
    require_unconnected,
    use_connection,
)
from omniload.actors.ray.tokens import use_given_token
from omniload.actors.reaper import PlaneFolder, Reaper
from omniload.base.errors import ConfigError, StateError, UnavailableError
from omniload.base.log import get_logger

__all__ = ["AttachedCluster", "SharedCluster", "code_of_job", "given_cluster", "require_same"]

_LOG = get_logger(__name__)
_CODE = ("working_dir", "py_modules")
"""Of a ``runtime_env``; Ray names them by what is in them."""
_REACHED_S = 5.0
"""How long the head at another address may take to say which Ray it is of."""


class _GivenCluster(Cluster):
    """A Ray of somebody else's, of which this process has a folder on its host, maybe beside those of other planes."""

    def __init__(self, namespace: str | None) -> None:
        """Have actors in the namespace of another process's plane, or in a new one, whose actors all end with this."""
        self._is_opener = namespace is None
        # A new one each time: actors are found by name, and two planes in one Ray have the same roles.
        self.namespace = namespace or new_namespace()

    def _begin(self, *, made: bool) -> None:
        """Make the folder; what is connected by now is this process, and was ``made`` so by this plane or not."""
        self.node_address = ""
        self.address = str(ray.get_runtime_context().gcs_address)
        self._folder = PlaneFolder()
        # Before the folder: it is removed, too, where this process is killed with the next line. Ray ends actors.
        self._reaper = Reaper("", self._folder.places)
        self._folder.make()
        self._use_no_more = use_connection(made=made)

    @property
    @override
    def folder(self) -> Path:
        return self._folder.path

    @override
    def close(self, *, is_used: bool = False) -> None:
        """End the actors of this plane; leave the Ray with the last plane where the first one had connected to it."""
        try:
            # To the end of it: a plane that is opened now would be one over a connection that is gone.
            with in_turn(f"leaves the Ray at {self.address}"):
                leaves = self._use_no_more()
                if is_used:
                    return  # Ray ends a process that it leaves under a call
                if leaves:
                    ray.shutdown()  # ends the actors that this process is the owner of
                elif self._is_opener:
                    _end_actors_in(self.namespace)
        finally:
            self._reaper.close()
            self._folder.remove()


class AttachedCluster(_GivenCluster):
    """The connection to a Ray that somebody else started; its actors end with this process.

    Further planes of this process share it, and the last of them leaves it.
    """

    def __init__(self, address: str, namespace: str | None = None) -> None:
        """Connect.

        Args:
            address: Host and port of its head, or ``auto`` for the one that this machine is part of.
            namespace: Of the job's actors; a new one by default.

        Raises:
            ConfigError: No Ray answers there, or not to this token.
            StateError: This process already uses Ray.
            UnavailableError: It does not answer in time.
        """
        require_unconnected()
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
    """The connection that this process had before, as a worker of Ray Train or a script that called ``ray.init``.

    It is left as it is: what else runs in this process uses it. Or that of another plane of this process.
    """

    def __init__(self, address: str, namespace: str | None = None) -> None:
        """Use it.

        Args:
            address: Of the Ray that is meant.
            namespace: Of a plane that another process has opened; a new one by default, of which every actor ends with
                this.

        Raises:
            StateError: It is another Ray, or that of a plane which has started it for itself.
        """
        require_not_owned()
        require_same(address)
        super().__init__(namespace)
        self._begin(made=False)


def given_cluster(address: str, namespace: str | None = None) -> AttachedCluster | SharedCluster:
    """Return this process's way to a Ray that runs already: the connection that it has, or a new one."""
    with in_turn(f"connects to the Ray at {address}"):
        if ray.is_initialized():
            return SharedCluster(address, namespace)
        return AttachedCluster(address, namespace)


def require_same(address: str) -> None:
    """Refuse another Ray than that which this process is connected to: it can be to one at a time.

    Raises:
        StateError: ``address`` names another.
    """
    here = str(ray.get_runtime_context().gcs_address)
    if address == "auto" or _numbers_of(address) == _numbers_of(here):
        return
    if not _leads_here(address):
        raise StateError(
            f"this process is connected to the Ray at {here}, and runtime.address names that at {address}; connect it "
            "to that one (ray.init), give the address that it has, or auto"
        )


def code_of_job() -> dict[str, str]:
    """Return what of its code the job of this process brought, each by a name that tells its content."""
    brought: Mapping[str, Any] = ray.get_runtime_context().runtime_env
    return {f"{key} of the job": str(brought[key]) for key in _CODE if brought.get(key)}


def _numbers_of(address: str) -> tuple[str, str]:
    host, _, port = address.rpartition(":")
    with suppress(OSError):  # of no host that is known here: it is compared as it is written
        host = socket.gethostbyname(host)
    return host, port


def _leads_here(address: str) -> bool:
    """Tell whether an address is one more of the head that this process is connected to: by the number of its Ray."""
    if not answers(address, _REACHED_S):  # else Ray tries for 40 s
        return False
    try:
        own = import_module("ray._private.worker").global_worker.gcs_client.cluster_id
        client = import_module("ray._raylet").GcsClient
        asked = ask_head(lambda: client(address=address).cluster_id)
        return wait_for_future(asked, _REACHED_S, lambda: None) and asked.result() == own
    except (ImportError, AttributeError, RayError) as error:
        _LOG.debug("which Ray is at %s is not known: %s", address, error)
        return False


def _end_actors_in(namespace: str) -> None:
    """End all actors of a namespace: those that have no name there end with whoever holds them."""
    with suppress(RayError, ConnectionError):  # Ray is lost, and they with it
        named: Any = ray.util.list_named_actors(all_namespaces=True)
        for each in named:
            if each["namespace"] == namespace:
                with suppress(ValueError, RayError):  # it has just ended
                    ray.kill(ray.get_actor(each["name"], namespace=namespace), no_restart=True)

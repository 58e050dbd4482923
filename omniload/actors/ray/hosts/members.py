"""A plane's nodes on other hosts: where they are, and how one is started beside the ranks of a host."""

from omniload.actors.address import Head, HostPlace
from omniload.actors.plane import PlaneSpec
from omniload.actors.ray.cluster import PrivateCluster
from omniload.actors.ray.environment import use_token
from omniload.actors.ray.hosts.attached import AttachedCluster
from omniload.actors.ray.hosts.connection import Cluster, Listening, node_here
from omniload.actors.ray.layout import store_bytes
from omniload.base.linux.network import listening_address
from omniload.base.units import parse_ports
from omniload.mix.runtime import RuntimeConfig

__all__ = ["MemberNode", "cluster_of", "listening_of"]


def listening_of(runtime: RuntimeConfig, toward: str | None) -> Listening:
    """Return where a node of this host listens.

    Raises:
        ConfigError: This host has no such address.
    """
    address = listening_address(runtime.bind, setting="runtime.bind", toward=toward)
    return Listening(address=address, ports=parse_ports(runtime.ports))


def cluster_of(
    runtime: RuntimeConfig, listening: Listening, *, bytes_: int, workers: int
) -> Cluster:
    """Return the Ray that a plane is opened in: one of our own, or the one that ``runtime.address`` names."""
    if runtime.address:
        return AttachedCluster(runtime.address)
    return PrivateCluster(object_store_bytes=bytes_, workers=workers, listening=listening)


class MemberNode:
    """The node of a host that is not the opener's, for as long as one rank of that host holds it."""

    def __init__(self, spec: PlaneSpec, head: Head, listening: Listening) -> None:
        """Start the node, and connect this process to it.

        Raises:
            ConfigError: The ports to listen on are too few.
            StateError: This process already uses Ray.
            UnavailableError: Ray did not start, or the head does not answer.
        """
        if head.token is None:
            self._cluster: Cluster = AttachedCluster(head.cluster, head.namespace)
        else:
            use_token(head.token)
            self._cluster = PrivateCluster(
                object_store_bytes=store_bytes(spec.mix),
                workers=1,  # the first data constructor of the host; more are started as they come
                listening=listening,
                join=(head.cluster, head.namespace),
            )
        try:
            board = self._cluster.folder / "board"
            board.mkdir()
            self.place = HostPlace(
                node=node_here(), address=self._cluster.node_address, board=board
            )
        except BaseException:
            self._cluster.close()
            raise

    def close(self) -> None:
        """End it."""
        self._cluster.close()

"""The hosts of a plane: what they need to join it, how each one's node is started, and the addresses they listen on."""

from omniload.actors.address import Head, HostPlace, Hosts, NodeTerms, PlaneAddress
from omniload.actors.lifeline import Lifeline
from omniload.actors.plane import PlaneSpec
from omniload.actors.ray.cluster import (
    Cluster,
    PrivateCluster,
    node_here,
)
from omniload.actors.ray.environment import ray
from omniload.actors.ray.given.attached import given_cluster
from omniload.actors.ray.hosts.node_plan import Listening
from omniload.actors.ray.layout import (
    constructors_by_host,
    dp_ranks_of_constructors,
    home_roles,
    store_bytes,
)
from omniload.actors.ray.processes import Process
from omniload.actors.ray.tokens import token, use_token
from omniload.base.linux.cores import cores_here
from omniload.base.linux.network import LOOPBACK, free_ports, host_id, listening_address
from omniload.base.log import logs_folder
from omniload.base.units import parse_ports
from omniload.mix.runtime import RuntimeConfig

__all__ = [
    "MemberNode",
    "address_of",
    "cluster_of",
    "head_of",
    "lifeline_of",
    "listening_of",
    "terms_of",
]


def listening_of(bind: str, ports: str, toward: str | None) -> Listening:
    """Return where a node on this host listens, according to ``runtime.bind`` and ``runtime.ports``.

    Raises:
        ConfigError: This host has no such address.
    """
    address = listening_address(bind, setting="runtime.bind", toward=toward)
    return Listening(address=address, ports=parse_ports(ports))


def cluster_of(
    runtime: RuntimeConfig, listening: Listening, *, bytes_: int, workers: int
) -> Cluster:
    """Return the Ray that a plane is opened in: one of our own, or the Ray that ``runtime.address`` names."""
    if runtime.address:
        return given_cluster(runtime.address)
    return PrivateCluster(object_store_bytes=bytes_, workers=workers, listening=listening)


class MemberNode:
    """A node on a host other than the opener's. It lives as long as one rank of that host holds it."""

    def __init__(self, head: Head, listening: Listening, *, bytes_: int, workers: int) -> None:
        """Start the node, and connect this process to it.

        Args:
            head: The head that the node joins.
            listening: Where the node listens.
            bytes_: Shared memory, in bytes.
            workers: Number of actor processes; 0 if no actor is to run there.

        Raises:
            ConfigError: The ports to listen on are too few.
            StateError: This process already uses Ray.
            UnavailableError: Ray did not start, or the head does not answer.
        """
        if head.token is None:
            self._cluster: Cluster = given_cluster(head.cluster, head.namespace)
        else:
            use_token(head.token)
            self._cluster = PrivateCluster(
                object_store_bytes=bytes_,
                workers=workers,
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
        """End the node."""
        self._cluster.close()


def head_of(runtime: RuntimeConfig, cluster: Cluster) -> Head:
    """Return the information with which other hosts join a cluster."""
    return Head(
        cluster=cluster.address,
        namespace=cluster.namespace,
        token=None if runtime.address else token(),
    )


def terms_of(spec: PlaneSpec, listening: Listening) -> NodeTerms | None:
    """Return how ranks of other hosts may join later; ``None`` if the ranks are fixed or the plane is on loopback."""
    runtime = spec.mix.runtime
    if not runtime.elastic or not (runtime.address or listening.address != LOOPBACK):
        return None
    return NodeTerms(
        is_given=bool(runtime.address),
        bind=runtime.bind,
        ports=runtime.ports,
        store_bytes=store_bytes(spec.mix),
    )


def lifeline_of(cluster: Cluster, listening: Listening) -> Lifeline:
    """Return a lifeline, to which every rank on another host keeps a connection for as long as this process lives.

    Raises:
        ConfigError: The port reserved for the lifeline is taken.
    """
    # Without an address of ours, as in a user's Ray, this is the address that Ray found, which its other nodes can
    # reach.
    address = cluster.node_address or str(ray.util.get_node_ip_address())  # type: ignore[no-untyped-call]
    # The last port of the range, which ``ports_of`` leaves free.
    ports = None if listening.ports is None else listening.ports[-1:]
    (port,) = free_ports(address, ports, 1, setting="runtime.ports")
    return Lifeline(address, port)


def address_of(
    spec: PlaneSpec,
    cluster: Cluster,
    hosts: Hosts | None,
    lifeline: Lifeline | None,
    terms: NodeTerms | None,
) -> PlaneAddress:
    """Return the address of the plane that this process opens.

    Args:
        spec: The run.
        cluster: The plane's Ray.
        hosts: The hosts of the job; ``None`` if all ranks are on this host.
        lifeline: Shows other hosts that this process lives.
        terms: Terms for ranks that join from other hosts later.
    """
    here, opener = host_id(), Process.own()
    if hosts is None or not hosts.elsewhere:
        placed = {
            name: (here, r) for name, r in dp_ranks_of_constructors(spec, cores_here()).items()
        }
        elsewhere = {}
    else:
        placed = constructors_by_host(spec, hosts.host_of_R)
        elsewhere = hosts.elsewhere
    return PlaneAddress(
        cluster=cluster.address,
        namespace=cluster.namespace,
        dp_ranks_of={name: ranks for name, (_, ranks) in placed.items()},
        cp_size=spec.tree.size_of("cp"),
        steps_at_once=spec.mix.steps_at_once,
        board=cluster.folder / "board",
        node_address=cluster.node_address,
        host=here,
        elsewhere=elsewhere,
        home_roles=home_roles(spec, [n for n, (host, _) in placed.items() if host == here]),
        host_of={name: host for name, (host, _) in placed.items() if host != here},
        lifeline="" if lifeline is None else lifeline.address,
        terms=terms,
        opener=(opener.pid, opener.place),
        logs=None if spec.run_dir is None else logs_folder(spec.run_dir.resolve()),
        ranks_stay=not spec.mix.runtime.elastic,
        batch_timeout_s=spec.mix.runtime.batch_timeout,
    )

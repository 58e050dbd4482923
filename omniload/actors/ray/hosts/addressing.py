"""The address of a plane that is being opened: who is on which host, and where each is reached."""

from omniload.actors.address import Head, Hosts, PlaneAddress
from omniload.actors.lifeline import Lifeline
from omniload.actors.plane import PlaneSpec
from omniload.actors.ray.environment import ray, token
from omniload.actors.ray.hosts.connection import Cluster, Listening
from omniload.actors.ray.layout import constructors_by_host, dp_ranks_of_constructors
from omniload.base.linux.network import free_ports, host_id
from omniload.base.log import logs_folder
from omniload.mix.runtime import RuntimeConfig

__all__ = ["address_of", "head_of", "lifeline_of"]


def head_of(runtime: RuntimeConfig, cluster: Cluster) -> Head:
    """Return what other hosts need to become part of a cluster."""
    return Head(
        cluster=cluster.address,
        namespace=cluster.namespace,
        token=None if runtime.address else token(),
    )


def lifeline_of(cluster: Cluster, listening: Listening) -> Lifeline:
    """Return what holds a connection of every rank on another host, for as long as this process lives.

    Raises:
        ConfigError: The port that is left to it is taken.
    """
    address = cluster.node_address or str(ray.util.get_node_ip_address())  # type: ignore[no-untyped-call]
    ports = None if listening.ports is None else listening.ports[-1:]
    (port,) = free_ports(address, ports, 1, setting="runtime.ports")
    return Lifeline(address, port)


def address_of(
    spec: PlaneSpec, cluster: Cluster, hosts: Hosts | None, lifeline: Lifeline | None
) -> PlaneAddress:
    """Return the address of the plane that this process opens.

    Args:
        spec: The run.
        cluster: The plane's Ray.
        hosts: The hosts of the job; ``None`` where all ranks are on this one.
        lifeline: Tells other hosts that this process lives.
    """
    here = host_id()
    if hosts is None or not hosts.elsewhere:
        placed = {name: (here, r) for name, r in dp_ranks_of_constructors(spec).items()}
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
        host_of={name: host for name, (host, _) in placed.items() if host != here},
        lifeline="" if lifeline is None else lifeline.address,
        logs=None if spec.run_dir is None else logs_folder(spec.run_dir.resolve()),
        batch_timeout_s=spec.mix.runtime.batch_timeout,
    )

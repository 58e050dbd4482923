"""The roles' figures as metrics for Prometheus, and the server for them."""

import os
import time
from collections.abc import Callable, Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from typing_extensions import override

from omniload.actors.heartbeat_board import Board
from omniload.base.errors import ConfigError
from omniload.base.linux.network import listening_address, why_not_bound
from omniload.base.log import get_logger
from omniload.base.metrics import REGISTRY, serve
from omniload.machine.status import status_of
from omniload.mix.config import MixConfig

__all__ = ["FIGURES", "RoleMetrics", "serve_metrics"]

_LOG = get_logger(__name__)
_TOTAL = "_total"
FIGURES = {
    "read_samples_total": "Samples that a source loader has read",
    "read_bytes_total": "Bytes of tokens that a source loader has read",
    "shard_disk_bytes_total": "Bytes of shards that a source loader has read from its shard cache",
    "shard_store_bytes_total": "Bytes of shards that a source loader with a shard cache has read from stores",
    "retries_total": "Reads that a source loader tried again, because a store did not answer",
    "held_bytes": "Bytes of samples that a source loader holds",
    "built_steps_total": "Steps that a data constructor has built",
    "queued_steps": "Steps that a data constructor holds, built and not taken by every rank",
    "planned_step": "First step that is not planned",
    "state_asked_timestamp_seconds": "When a loader state was last asked for, which a checkpoint does",
    "loaders": "Source loaders of the data plane, where runtime.scaling follows their load",
    "loader_changes_total": "Times that sources have moved between source loaders",
    "readers": "Readers of the sources of a source loader, beside it",
    "reader_changes_total": "Times that the number of readers of a source has changed while the job ran",
    "restarts": "Times that the launcher has started the job again",
    "taken_steps_total": "Steps that a rank has taken",
    "wait_seconds_total": "Time that a rank has waited for batches",
}
"""Figures of roles, each a metric ``omniload_<name>`` by ``role``."""


def serve_metrics(mix: MixConfig, board: Board, *, goes_on: bool = False) -> Callable[[], None]:
    """Answer Prometheus from the planner's process, where the mix asks for it.

    Args:
        mix: The mix, which names the port.
        board: The heartbeats.
        goes_on: Whether the run is under way. If so, a failure is only a warning, and the run continues without
        metrics.

    Returns:
        A function that ends it.

    Raises:
        ConfigError: The port is taken, or this host has no such address.
    """
    try:
        return _served(mix, board)
    except ConfigError as error:
        if not goes_on:
            raise
        _LOG.warning("metrics are not served to Prometheus; the run continues: %s", error)
        return _nothing


def _served(mix: MixConfig, board: Board) -> Callable[[], None]:
    port, bind = mix.runtime.metrics_port, mix.runtime.metrics_bind
    if not port:
        return _nothing
    toward = os.environ.get("MASTER_ADDR")
    address = listening_address(bind, setting="runtime.metrics_bind", toward=toward)
    roles = RoleMetrics(board)
    # Before the port is open, so that the first scrape finds the roles.
    REGISTRY.register(roles)
    try:
        end = serve(port, address=address)
    except OSError as error:
        REGISTRY.unregister(roles)
        raise ConfigError(
            f"runtime.metrics_port {port} cannot be used on {address} ({why_not_bound(error, port)}); each job on a "
            "host needs a port of its own: choose another, or 0 for no metrics"
        ) from error

    def close() -> None:
        end()
        REGISTRY.unregister(roles)

    return close


def _nothing() -> None:
    pass


class RoleMetrics(Collector):
    """Reads the heartbeats whenever it is scraped."""

    def __init__(self, board: Board) -> None:
        self._board = board

    @override
    def collect(self) -> Iterator[Metric]:
        # No earlier look is passed, because Prometheus computes rates of totals itself.
        roles = status_of(self._board.read(), {}, time.monotonic())
        age = GaugeMetricFamily(
            "omniload_role_age_seconds", "Since the last heartbeat of a role", labels=["role"]
        )
        task = GaugeMetricFamily(
            "omniload_role_task_seconds",
            "Since a role began with what it does, or waits for",
            labels=["role"],
        )
        for role in roles:
            age.add_metric([role.name], role.age_s)
            task.add_metric([role.name], role.task_s)
        yield from (age, task)
        for name, says in FIGURES.items():
            found = [(role.name, role.figures[name]) for role in roles if name in role.figures]
            family: CounterMetricFamily | GaugeMetricFamily
            if name.endswith(_TOTAL):
                family = CounterMetricFamily(f"omniload_{name}", says, labels=["role"])
            else:
                family = GaugeMetricFamily(f"omniload_{name}", says, labels=["role"])
            for role_name, value in found:
                family.add_metric([role_name], value)
            yield family

"""Heartbeats as metrics: what every role says of itself, for whoever scrapes one of them."""

import time
from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from typing_extensions import override

from omniload.actors.heartbeats import Board
from omniload.machine.status import status_of

__all__ = ["FIGURES", "RoleMetrics"]

_TOTAL = "_total"
FIGURES = {
    "read_samples_total": "Samples that a source loader has read",
    "read_bytes_total": "Bytes of tokens that a source loader has read",
    "retries_total": "Reads that a source loader tried again, because a store did not answer",
    "held_bytes": "Bytes of samples that a source loader holds",
    "built_steps_total": "Steps that a data constructor has built",
    "queued_steps": "Steps that a data constructor holds, built and not taken by every rank",
    "planned_step": "First step that is not planned",
    "state_asked_timestamp_seconds": "When a loader state was last asked for, which a checkpoint does",
    "loaders": "Source loaders of the data plane, where runtime.scaling follows their load",
    "loader_changes_total": "Times that sources have moved between source loaders",
    "restarts": "Times that the launcher has started the job again",
    "taken_steps_total": "Steps that a rank has taken",
    "wait_seconds_total": "Time that a rank has waited for batches",
}
"""Figures of roles, each a metric ``omniload_<name>`` by ``role``."""


class RoleMetrics(Collector):
    """Reads the heartbeats whenever it is scraped."""

    def __init__(self, board: Board) -> None:
        self._board = board

    @override
    def collect(self) -> Iterator[Metric]:
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

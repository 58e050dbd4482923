"""What the planner's shell counts, and who may ask for it."""

import os
from collections.abc import Callable, Sequence
from functools import cache

import numpy as np
from prometheus_client import Counter

from omniload.actors.heartbeats import Board
from omniload.actors.role_metrics import RoleMetrics
from omniload.base.errors import ConfigError
from omniload.base.linux.network import listening_address
from omniload.base.log import get_logger
from omniload.base.metrics import IMBALANCE_RATIO, REGISTRY, SAMPLES_SKIPPED, TOKENS_PLANNED, serve
from omniload.mix.config import MixConfig
from omniload.plan.records import StepPlan

__all__ = ["count_skipped", "measure", "serve_metrics"]

_LOG = get_logger(__name__)


def count_skipped(name: str, skipped: int) -> None:
    """Count records of a source that were skipped by policy."""
    if skipped:
        SAMPLES_SKIPPED.labels(name).inc(skipped)
        _LOG.warning("source %s: skipped %d records that cannot be decoded", name, skipped)


def measure(plans: Sequence[StepPlan], names: Sequence[str]) -> None:
    """Count what plans hold of each source, and how even the last of them is."""
    IMBALANCE_RATIO.set(plans[-1].imbalance)
    tokens_S = np.sum([plan.tokens_S for plan in plans], axis=0)
    for s in np.flatnonzero(tokens_S).tolist():
        _tokens_planned(names[s]).inc(int(tokens_S[s]))


@cache
def _tokens_planned(name: str) -> Counter:
    """Return the counter of a source, which is looked up by its label slowly."""
    return TOKENS_PLANNED.labels(name)


def serve_metrics(mix: MixConfig, board: Board) -> Callable[[], None]:
    """Answer Prometheus from the planner's process, where the mix asks for it.

    Returns:
        A function that ends it.

    Raises:
        ConfigError: The port is taken, or this host has no such address.
    """
    port, bind = mix.runtime.metrics_port, mix.runtime.metrics_bind
    if not port:
        return _nothing
    toward = os.environ.get("MASTER_ADDR")
    address = listening_address(bind, setting="runtime.metrics_bind", toward=toward)
    roles = RoleMetrics(board)
    REGISTRY.register(roles)
    try:
        end = serve(port, address=address)
    except OSError as error:
        REGISTRY.unregister(roles)
        raise ConfigError(
            f"runtime.metrics_port {port} cannot be used on {address} ({error.strerror}); choose another"
        ) from error

    def close() -> None:
        end()
        REGISTRY.unregister(roles)

    return close


def _nothing() -> None:
    pass

"""The metrics registry: prometheus-client, with one registry of our own.

Metric names start with ``omniload_`` and end in their unit. A process that is to be scraped calls ``serve``, which
binds to loopback by default.
"""

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, start_http_server

__all__ = [
    "BATCH_WAIT_SECONDS",
    "GROUPS_JUDGED",
    "IMBALANCE_RATIO",
    "PLAN_SECONDS",
    "REGISTRY",
    "SAMPLES_SKIPPED",
    "TOKENS_PLANNED",
    "serve",
]

# Not the library's own registry: a trainer may serve that one, and its other metrics are not ours to show.
REGISTRY = CollectorRegistry()
"""Registry of this project's metrics only."""

TOKENS_PLANNED = Counter(
    "omniload_tokens_planned",
    "Tokens of steps that every rank has taken",
    ["source"],
    registry=REGISTRY,
)
SAMPLES_SKIPPED = Counter(
    "omniload_samples_skipped",
    "Records that could not be read and were skipped, in steps that every rank has taken",
    ["source"],
    registry=REGISTRY,
)
IMBALANCE_RATIO = Gauge(
    "omniload_imbalance_ratio",
    "Heaviest rank over the mean, by cost, of the last plan",
    registry=REGISTRY,
)
PLAN_SECONDS = Histogram(
    "omniload_plan_seconds",
    "Time to plan one step",
    registry=REGISTRY,
    buckets=(0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0),
)
BATCH_WAIT_SECONDS = Histogram(
    "omniload_batch_wait_seconds",
    "Time a rank waited for its batch",
    registry=REGISTRY,
    buckets=(0.0001, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0),
)
GROUPS_JUDGED = Counter(
    "omniload_groups",
    "Groups of answers that dynamic sampling judged, counted by the first rank",
    ["source", "verdict"],
    registry=REGISTRY,
)


def serve(port: int, *, address: str = "127.0.0.1") -> Callable[[], None]:
    """Answer scrapes of the registry at ``http://address:port/metrics`` from a daemon thread.

    Returns:
        A function that stops the server and frees the port.
    """
    server, thread = start_http_server(port, addr=address, registry=REGISTRY)

    def close() -> None:
        server.shutdown()
        # Otherwise the port stays taken, and a process could not open a second plane with it.
        server.server_close()
        thread.join()

    return close

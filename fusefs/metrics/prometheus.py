"""Numbers of fusefs for scrapes of the metrics registry: all views of stores in this process together."""

import threading
from collections.abc import Iterator
from itertools import accumulate
from typing import Protocol
from weakref import WeakSet

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector
from typing_extensions import override

from fusefs.metrics.counters import LATENCY_BOUNDS_S, Numbers
from omniload.base.metrics import REGISTRY

__all__ = ["Counted", "FilesCollector", "families", "retire", "watch"]


class Counted(Protocol):
    """Something that has numbers."""

    def numbers(self) -> Numbers:
        """Return counts since the start and levels of now."""
        ...


class FilesCollector(Collector):
    """Adds up what is watched, when it is asked. Counts of what was closed are kept, so none ever falls."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._watched: WeakSet[Counted] = WeakSet()
        self._gone = Numbers()

    def watch(self, counted: Counted) -> None:
        """Include something from now on."""
        with self._lock:
            self._watched.add(counted)

    def retire(self, counted: Counted) -> None:
        """Keep the counts of something that is closed; its levels are gone."""
        with self._lock:
            if counted in self._watched:
                self._watched.discard(counted)
                self._gone.add(counted.numbers().without_levels())

    def total(self) -> Numbers:
        """Return the sum."""
        with self._lock:
            found = Numbers()
            found.add(self._gone)
            for counted in list(self._watched):
                found.add(counted.numbers())
        return found

    @override
    def collect(self) -> Iterator[Metric]:
        return families(self.total())


def families(numbers: Numbers) -> Iterator[Metric]:
    """Yield the metrics that show ``numbers``, named ``omniload_fusefs_...``."""
    requests = CounterMetricFamily("omniload_fusefs_requests", "Reads that were asked of files")
    requests.add_metric([], numbers.requests)
    yield requests
    for name, words in (
        ("read_bytes", "Bytes read by where they came from"),
        ("hits", "Units found, and ranged reads that the store answered"),
        ("misses", "Units not found"),
        ("evictions", "Blocks and local copies dropped to make room"),
        ("errors", "Reads and writes that failed or gave damaged bytes"),
    ):
        family = CounterMetricFamily(f"omniload_fusefs_{name}", words, labels=["tier"])
        for tier, counts in numbers.tiers.items():
            family.add_metric([tier], getattr(counts, name))
        yield family
    retries = CounterMetricFamily(
        "omniload_fusefs_retries", "Calls of the store repeated after an outage"
    )
    retries.add_metric([], numbers.retries)
    yield retries
    abandoned = CounterMetricFamily(
        "omniload_fusefs_abandoned_calls", "Calls of stores that hung and were abandoned"
    )
    abandoned.add_metric([], numbers.abandoned)
    yield abandoned
    hanging = GaugeMetricFamily(
        "omniload_fusefs_hanging_calls", "Abandoned calls of stores that have not returned"
    )
    hanging.add_metric([], numbers.hanging)
    yield hanging
    calls = CounterMetricFamily("omniload_fusefs_store_calls", "Calls of stores", labels=["call"])
    for call, count in sorted(numbers.store_calls.items()):
        calls.add_metric([call], count)
    yield calls
    held = GaugeMetricFamily("omniload_fusefs_cache_bytes", "Bytes held", labels=["tier"])
    for tier, size_bytes in numbers.cache_bytes.items():
        held.add_metric([tier], size_bytes)
    yield held
    window = GaugeMetricFamily(
        "omniload_fusefs_window_bytes", "Bytes of full units on their way to stores"
    )
    window.add_metric([], numbers.window_bytes)
    yield window
    yield _latencies(numbers)


def _latencies(numbers: Numbers) -> Metric:
    bounds = [str(bound) for bound in LATENCY_BOUNDS_S] + ["+Inf"]
    cumulated = [float(count) for count in accumulate(numbers.store_reads_by_latency)]
    family = HistogramMetricFamily(
        "omniload_fusefs_store_read_seconds", "Time of ranged reads of stores, retries included"
    )
    family.add_metric(
        [], buckets=list(zip(bounds, cumulated, strict=True)), sum_value=numbers.store_read_s
    )
    return family


_COLLECTOR = FilesCollector()
REGISTRY.register(_COLLECTOR)
watch = _COLLECTOR.watch
retire = _COLLECTOR.retire

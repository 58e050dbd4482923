"""Counts of the traffic through one view of a store, kept in one place for ``stats.json`` and scrapes."""

import threading
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Literal, Protocol, get_args
from weakref import WeakSet

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector
from typing_extensions import override

from omniload.base.metrics import REGISTRY

__all__ = [
    "LATENCY_BOUNDS_S",
    "TIERS",
    "Counted",
    "FilesCollector",
    "Numbers",
    "Tier",
    "TierNumbers",
    "Traffic",
    "families",
    "retire",
    "watch",
]

Tier = Literal["memory", "disk", "store"]
"""Place that bytes of a file came from; each tier is asked when the one before did not have them."""
TIERS: tuple[Tier, ...] = get_args(Tier)
LATENCY_BOUNDS_S = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0)
"""Upper bounds of the histogram of store reads, in seconds; one more bucket holds slower reads."""


@dataclass(slots=True)
class TierNumbers:
    """Counts of one tier. A hit or miss is of one unit; the store is asked by ranged reads."""

    read_bytes: int = 0
    hits: int = 0
    misses: int = 0
    evictions: int = 0
    errors: int = 0

    def add(self, other: "TierNumbers") -> None:
        """Add the counts of ``other``."""
        self.read_bytes += other.read_bytes
        self.hits += other.hits
        self.misses += other.misses
        self.evictions += other.evictions
        self.errors += other.errors


@dataclass(slots=True, kw_only=True)
class Numbers:
    """Counts since the start, and present levels."""

    requests: int = 0
    """Number of reads of files."""
    retries: int = 0
    """Calls of the store that were repeated after an outage."""
    abandoned: int = 0
    """Calls of the store that hung and were abandoned."""
    hanging: int = 0
    """Abandoned calls that still hang now."""
    tiers: dict[Tier, TierNumbers] = field(
        default_factory=lambda: {tier: TierNumbers() for tier in TIERS}
    )
    store_reads_by_latency: list[int] = field(
        default_factory=lambda: [0] * (len(LATENCY_BOUNDS_S) + 1)
    )
    """Store reads per bucket of ``LATENCY_BOUNDS_S``, not cumulated."""
    store_read_s: float = 0.0
    """Seconds of all store reads together."""
    store_calls: dict[str, int] = field(default_factory=dict)
    """Calls of the store by name, retries included."""
    cache_bytes: dict[Tier, int] = field(default_factory=lambda: {"memory": 0, "disk": 0})
    """Bytes in memory and on the disk now."""
    window_bytes: int = 0
    """Bytes of full units that are on their way to the store now."""

    def add(self, other: "Numbers") -> None:
        """Add counts and levels of ``other``."""
        self.requests += other.requests
        self.retries += other.retries
        self.abandoned += other.abandoned
        self.hanging += other.hanging
        for tier, numbers in other.tiers.items():
            self.tiers[tier].add(numbers)
        for bucket, count in enumerate(other.store_reads_by_latency):
            self.store_reads_by_latency[bucket] += count
        self.store_read_s += other.store_read_s
        for name, count in other.store_calls.items():
            self.store_calls[name] = self.store_calls.get(name, 0) + count
        for tier, size_bytes in other.cache_bytes.items():
            self.cache_bytes[tier] += size_bytes
        self.window_bytes += other.window_bytes

    def without_levels(self) -> "Numbers":
        """Return only the counts, which stay when the counted object is gone."""
        found = Numbers()
        found.add(self)
        found.cache_bytes = {"memory": 0, "disk": 0}
        found.window_bytes = 0
        found.hanging = 0
        return found


class Traffic:
    """Counts reads. Safe in threads; every call is a few additions under a lock."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._numbers = Numbers()

    def asked(self) -> None:
        """Count a read of a file."""
        with self._lock:
            self._numbers.requests += 1

    def answered(self, num_units: int, size_bytes: int) -> None:
        """Count a read of a file that memory answered whole."""
        with self._lock:
            self._numbers.requests += 1
            memory = self._numbers.tiers["memory"]
            memory.hits += num_units
            memory.read_bytes += size_bytes

    def hit(self, tier: Tier, num_units: int, size_bytes: int) -> None:
        """Count units that a tier had."""
        with self._lock:
            numbers = self._numbers.tiers[tier]
            numbers.hits += num_units
            numbers.read_bytes += size_bytes

    def missed(self, tier: Tier, num_units: int) -> None:
        """Count units that a tier did not have."""
        with self._lock:
            self._numbers.tiers[tier].misses += num_units

    def evicted(self, tier: Tier, num_evicted: int) -> None:
        """Count evictions: blocks of memory, copies on the disk."""
        with self._lock:
            self._numbers.tiers[tier].evictions += num_evicted

    def failed(self, tier: Tier) -> None:
        """Count a failed read or write of a tier, or damaged bytes from it."""
        with self._lock:
            self._numbers.tiers[tier].errors += 1

    def store_read(self, size_bytes: int, elapsed_s: float) -> None:
        """Count a ranged read that the store answered, including its retries."""
        with self._lock:
            store = self._numbers.tiers["store"]
            store.hits += 1
            store.read_bytes += size_bytes
            # From the left, because in Prometheus a bound belongs to the bucket below it.
            self._numbers.store_reads_by_latency[bisect_left(LATENCY_BOUNDS_S, elapsed_s)] += 1
            self._numbers.store_read_s += elapsed_s

    def numbers(self) -> Numbers:
        """Return a copy of all counts so far; levels are zero."""
        with self._lock:
            return self._numbers.without_levels()


class Counted(Protocol):
    """An object that has counts and levels."""

    def numbers(self) -> Numbers:
        """Return counts since the start and present levels."""
        ...


class FilesCollector(Collector):
    """Sums up all watched objects on request. Counts of closed objects are kept, so that no sum ever falls."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # Weak: a view of a store that is dropped without a close must not stay only for its counts.
        self._watched: WeakSet[Counted] = WeakSet()
        self._gone = Numbers()

    def watch(self, counted: Counted) -> None:
        """Include an object from now on."""
        with self._lock:
            self._watched.add(counted)

    def retire(self, counted: Counted) -> None:
        """Keep the counts of a closed object; its levels are gone."""
        with self._lock:
            # A second close must not count again.
            if counted in self._watched:
                self._watched.discard(counted)
                self._gone.add(counted.numbers().without_levels())

    def total(self) -> Numbers:
        """Return the sum."""
        # Under the lock: an object that closes in between would count twice, or not at all.
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
    # Each bucket includes all lower ones, as Prometheus demands.
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

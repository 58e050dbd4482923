"""Numbers: counted once, shown in statistics and in scrapes."""

import orjson
import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from fusefs.metrics.counters import LATENCY_BOUNDS_S, FilesCollector, Numbers, Traffic
from fusefs.stores.memory import MemoryStore
from fusefs.stores.retry import RetryingStore
from fusefs.tools.statistics import Statistics, drop_cached, drop_json, layout_json, layout_of
from omniload.base.metrics import REGISTRY
from tests.support.fusefs.builders import some_files, tiny_files
from tests.support.fusefs.faulty_store import FaultyStore, Outage

DATA = bytes(range(256)) * 160  # 10 units of 4096


def a_counted(**changes):
    class Counted:
        def numbers(self):
            found = Numbers(requests=3, retries=1, store_calls={"read": 2}, window_bytes=7)
            found.cache_bytes["memory"] = 5
            return found

    return Counted()


def samples(collector):
    registry = CollectorRegistry()
    registry.register(collector)
    text = generate_latest(registry).decode()
    return {
        (sample.name, *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_every_read_is_counted_by_where_its_bytes_came_from():
    with some_files(read_ahead=0) as files:
        files.write_file("f", DATA)
        with files.open("f") as file:
            file.reader.read(0, 10_000)
            file.reader.read(100, 10)
            assert file.reader.try_read(0, 8192) is not None
            assert file.reader.try_read(20_000, 10) is None

        found = files.numbers()

    assert found.requests == 3
    assert (found.tiers["memory"].hits, found.tiers["memory"].misses) == (3, 3)
    assert found.tiers["memory"].read_bytes == 10 + 8192
    assert found.tiers["store"].read_bytes == 3 * 4096
    assert found.tiers["store"].hits == sum(found.store_reads_by_latency) == 3
    assert found.cache_bytes == {"memory": 3 * 4096, "disk": 0}


def test_outages_are_counted_and_so_are_the_retries():
    faulty = FaultyStore(MemoryStore(), {("read", 2): Outage, ("read", 3): Outage})
    with some_files(RetryingStore(faulty, sleep=lambda _: None), read_ahead=0) as files:
        files.write_file("f", DATA)
        with files.open("f") as file:
            file.reader.read(0, 10)

        found = files.numbers()

    faulty.assert_all_faults_fired()
    assert found.retries == 2
    assert found.store_calls["read"] == 4
    assert found.tiers["store"].errors == 0


def test_a_read_that_failed_in_the_end_is_an_error_of_the_store():
    faulty = FaultyStore(MemoryStore(), {("read", 2): Outage})
    with some_files(faulty, read_ahead=0) as files:
        files.write_file("f", DATA)
        with files.open("f") as file, pytest.raises(Exception, match="outage"):
            file.reader.read(0, 10)

        assert files.numbers().tiers["store"].errors == 1


def test_a_latency_falls_into_the_first_bucket_that_holds_it():
    traffic = Traffic()
    for elapsed_s in (0.0005, 0.001, 0.002, 31.0):
        traffic.store_read(10, elapsed_s)

    counts = traffic.numbers().store_reads_by_latency
    assert (counts[0], counts[1], counts[-1], sum(counts)) == (2, 1, 1, 4)
    assert traffic.numbers().store_read_s == pytest.approx(31.0035)


def test_statistics_tell_the_same_numbers_in_a_view_of_one_size():
    with some_files() as files:
        statistics = Statistics(files)
        before = statistics.as_json()
        files.write_file("f", DATA)
        with files.open("f") as file:
            file.reader.read(0, len(DATA))
        view = statistics.as_json()
        found, numbers = orjson.loads(view), files.numbers()

    assert len(before) == len(view) == 8192
    assert found["tiers"]["store"]["read_bytes"] == numbers.tiers["store"].read_bytes == len(DATA)
    assert found["cache"]["used_bytes"] == numbers.cache_bytes["memory"] == len(DATA)
    assert found["disk_cache"] is None
    assert sum(found["store_reads"]["by_seconds"].values()) == numbers.tiers["store"].hits


def test_a_scrape_adds_up_what_is_watched():
    collector = FilesCollector()
    counted = [a_counted(), a_counted()]
    for each in counted:
        collector.watch(each)

    found = samples(collector)

    assert found["omniload_fusefs_requests_total",] == 6
    assert found["omniload_fusefs_retries_total",] == 2
    assert found["omniload_fusefs_store_calls_total", "read"] == 4
    assert found["omniload_fusefs_cache_bytes", "memory"] == 10
    assert found["omniload_fusefs_window_bytes",] == 14


def test_counts_of_what_was_closed_stay_and_its_levels_go():
    collector = FilesCollector()
    kept, closed = a_counted(), a_counted()
    collector.watch(kept)
    collector.watch(closed)

    collector.retire(closed)
    collector.retire(closed)

    found = samples(collector)
    assert found["omniload_fusefs_requests_total",] == 6
    assert found["omniload_fusefs_cache_bytes", "memory"] == 5


def test_the_histogram_is_cumulated_and_ends_in_all_reads():
    traffic = Traffic()
    for elapsed_s in (0.0005, 0.002, 0.2, 31.0):
        traffic.store_read(10, elapsed_s)
    collector = FilesCollector()
    collector.watch(traffic)

    found = samples(collector)

    name = "omniload_fusefs_store_read_seconds"
    assert [found[f"{name}_bucket", str(b)] for b in LATENCY_BOUNDS_S[:3]] == [1, 2, 2]
    assert found[f"{name}_bucket", "+Inf"] == found[f"{name}_count",] == 4
    assert found[f"{name}_sum",] == pytest.approx(31.2025)


def test_files_show_in_the_registry_of_the_process():
    def requests():
        return REGISTRY.get_sample_value("omniload_fusefs_requests_total")

    before = requests()
    with some_files() as files:
        files.write_file("f", DATA)
        with files.open("f") as file:
            file.reader.read(0, 10)
        assert requests() == before + 1

    assert requests() == before + 1


def test_the_layout_of_a_file_tells_what_is_cached_of_it_and_dropping_it_empties_that():
    with some_files(read_ahead=0) as files:
        files.write_file("f", DATA)
        with files.open("f") as file:
            file.reader.read(0, 5000)

        shown = orjson.loads(layout_json(files, "f"))["cached"]
        dropped = orjson.loads(drop_json(files, "f"))

        assert shown == {"memory_bytes": 8192, "disk_bytes": None}
        assert dropped == {"memory_bytes": 8192, "disk_bytes": 0}
        assert orjson.loads(layout_json(files, "f"))["cached"]["memory_bytes"] == 0


def test_a_header_that_was_remembered_is_read_anew_once_it_is_forgotten():
    store = MemoryStore()
    with some_files(store) as files:
        files.write_file("d/f", DATA)
        store.mtimes_ns["d/f"] -= 10**10
        reads = []
        read = store.read
        store.read = lambda *a: (reads.append(a), read(*a))[1]
        files.stat("d/f")
        files.stat("d/f")
        assert len(reads) == 1

        drop_cached(files, "")
        reads.clear()
        files.catalog.forget("d")
        files.stat("d/f")

    assert len(reads) == 1


def test_the_layout_of_a_file_of_many_segments_fits_an_extended_attribute():
    with tiny_files(unit=8, count=3) as files:
        writer = files.writers.file("f")
        for _ in range(400):
            writer.write(bytes(8))
            content = writer.sync()
        files.publish("f", content)

        text = layout_json(files, "f")

        shown, whole = orjson.loads(text), layout_of(files, "f")["segments"]
        assert len(text) <= 60 << 10
        assert shown["num_segments"] == len(whole) > 390
        assert 10 < len(shown["segments"]) < len(whole)
        assert shown["segments"][0] == whole[0]

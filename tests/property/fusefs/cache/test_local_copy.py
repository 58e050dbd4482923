"""Local copies of files of any shape (whole segments, ranges of them, plain files) in any order of reads."""

import os
import tempfile
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from fusefs.config import DiskCacheConfig
from fusefs.format.attributes import encoded
from fusefs.format.manifest import Manifest
from fusefs.format.manifest_header import MAGIC
from fusefs.stores.memory import MemoryStore
from tests.support.fusefs.builders import tiny_files

CONTENT = bytes(range(256))

ranges = st.tuples(st.integers(0, 199), st.integers(1, 56))
reads = st.lists(st.tuples(st.integers(0, 300), st.integers(1, 80)), max_size=6)


def write_spliced(store, parts, *, unit, count):
    """Write a file that shows ranges of one segment, one after another."""
    with tiny_files(store, unit=unit, count=count) as files:
        writer = files.writers.file("source")
        writer.write(CONTENT)
        (segment,) = writer.finish()
    segments = tuple(segment.part(start, size) for start, size in parts)
    store.publish("f", encoded(Manifest(mtime_ns=1, segments=segments), "f"))
    return b"".join(CONTENT[start : start + size] for start, size in parts)


def cached(store, directory):
    chosen = DiskCacheConfig(directory=str(directory), capacity=1 << 20)
    return tiny_files(store, disk_cache=chosen, read_ahead=16)


@given(
    st.lists(ranges, min_size=1, max_size=4),
    st.sampled_from([4, 8, 24]),
    st.integers(1, 3),
    reads,
)
def test_a_file_of_any_ranges_reads_the_same_from_store_disk_and_copy(parts, unit, count, steps):
    store = MemoryStore()
    model = write_spliced(store, parts, unit=unit, count=count)
    with tempfile.TemporaryDirectory() as base:
        for whole in (False, True, True):
            with cached(store, Path(base) / "disk") as files, files.open("f") as file:
                reader = file.reader
                for offset, size in steps:
                    assert reader.read(offset, size) == model[offset : offset + size]
                if whole:
                    reader.cached.keep(0, len(model))
                    _, disk = reader.cached.held_bytes()
                    assert disk == len(model)
                    with os.fdopen(file.local_copy(), "rb") as copy:
                        assert copy.read() == model
                buffer = bytearray(len(model))
                for future in reader.start_into([(0, memoryview(buffer))]):
                    future.result()
                assert buffer == model


plain = st.binary(min_size=1, max_size=100).filter(lambda data: not data.startswith(MAGIC))


@given(plain, st.integers(1, 10**9), reads)
def test_a_plain_file_is_copied_under_its_time_stamp(data, fraction_ns, steps):
    store = MemoryStore()
    store.publish("f", data)
    store.mtimes_ns["f"] = 10**18 + fraction_ns
    with tempfile.TemporaryDirectory() as base:
        for life in range(2):
            with cached(store, Path(base) / "disk") as files, files.open("f") as file:
                for offset, size in steps:
                    assert file.reader.read(offset, size) == data[offset : offset + size]
                file.reader.cached.keep(0, len(data))
                has_copy = file.reader.cached.held_bytes()[1] == len(data)
                assert has_copy == (fraction_ns != 10**9)
                if life and has_copy:
                    assert files.numbers().tiers["store"].read_bytes == 0

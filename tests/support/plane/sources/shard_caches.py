"""Shards in a store in memory that counts its reads, and shard caches over them."""

import os
import time
import uuid
from pathlib import Path

import fsspec
from fsspec.implementations.memory import MemoryFileSystem

from fusefs.cache.disk_format import COPIES, footprint, num_units_of
from omniload.base.clock import FakeClock
from omniload.source.files import remote_file
from omniload.source.stores.shard_cache import ShardCache
from omniload.source.stores.shared_directory import SharedDirectory


class CountingStore(MemoryFileSystem):
    """A store in memory whose files have tags."""

    protocol = "counting"

    def info(self, path, **kwargs):
        entry = super().info(path, **kwargs)
        if entry["type"] == "file":
            entry["ETag"] = self.store[self._strip_protocol(path)].tag
        return entry

    def cat_ranges(self, paths, starts, ends, **kwargs):
        self.gave.extend(zip(paths, starts, ends, strict=True))
        return super().cat_ranges(paths, starts, ends, **kwargs)

    def given_bytes(self):
        return sum(stop - start for _, start, stop in self.gave)


class Shards:
    """Files of a store of their own."""

    def __init__(self, folder=""):
        fsspec.register_implementation("counting", CountingStore, clobber=True)
        self.store = CountingStore(skip_instance_cache=True)
        self.store.gave = []  # path, start and stop of each range
        self.folder = folder or f"/{uuid.uuid4().hex}"

    def put(self, name, data, tag=None):
        path = f"{self.folder}/{name}"
        self.store.pipe_file(path, data)
        self.store.store[path].tag = tag or uuid.uuid4().hex
        return path

    def found(self, name):
        return remote_file(self.store, f"{self.folder}/{name}")

    def through(self, cache, name):
        (file,) = cache.through([self.found(name)])
        return file


def a_cache(folder, limit=64 << 20, clock=None, **said):
    """Return the cache that another process would open there."""
    clock = clock or FakeClock()
    cache = ShardCache(SharedDirectory(folder, limit, clock), clock, **said)
    cache.prepare()
    return cache


def taken_bytes(folder):
    """Return the disk space of copies, as measured on the disk."""
    total = 0
    for place, _, names in os.walk(folder / COPIES):
        for name in names:
            status = Path(place, name).stat()
            total += (
                status.st_blocks * 512
                if name.endswith(".data")
                else footprint(num_units_of(status.st_size))
            )
    return total


def an_hour_later():
    return time.time() + 3600

"""Disk caches for tests: versions with known bytes, and directories that tests inspect and damage."""

import contextlib
import os
import random

from fusefs.cache.copy_state import Span
from fusefs.cache.disk_cache import DiskCache
from fusefs.cache.disk_format import CopyVersion

UNIT = 4096


def a_version(number, num_units, short=0):
    """Return version ``number`` of some file; its last unit lacks ``short`` bytes."""
    return CopyVersion(f"version {number}", num_units * UNIT - short, num_units)


def span_of(version, unit):
    return Span(unit, unit * UNIT, min(UNIT, version.size_bytes - unit * UNIT))


def bytes_of(version, unit):
    size = span_of(version, unit).size_bytes
    return random.Random(f"{version.key} {unit}").randbytes(size)


def all_bytes_of(version):
    return b"".join(bytes_of(version, unit) for unit in range(version.num_units))


def fill(copy, version, units=None):
    """Store units, all of them by default; return the units that the copy now has."""
    chosen = range(version.num_units) if units is None else units
    return [u for u in chosen if copy.store(span_of(version, u), bytes_of(version, u))]


def read(copy, version, unit):
    found = copy.read([span_of(version, unit)])
    return bytes(found[unit]) if found else None


@contextlib.contextmanager
def a_cache(directory, capacity=1 << 20, traffic=None):
    cache = DiskCache(str(directory), capacity, traffic)
    try:
        yield cache
    finally:
        cache.close()


def abandon(cache):
    """Leave a cache as a killed process does: the kernel closes the descriptors, and nothing is reported or tidied."""
    for copy in cache._table.copies.values():
        if copy.files is not None:
            os.close(copy.files._data)
            os.close(copy.files._table)
    os.close(cache._table.directory._marker)


def bytes_on_disk(directory):
    """Return the disk space of all copies, as the file system counts it."""
    folders = [directory / "copies", directory / "leaving"]
    return sum(p.stat().st_blocks * 512 for f in folders for p in f.rglob("*") if p.is_file())


def files_in(directory, suffix):
    return sorted((directory / "copies").rglob(f"*{suffix}"))


def flip(path, at, bit=0):
    data = bytearray(path.read_bytes())
    data[at] ^= 1 << bit
    with path.open("r+b") as file:
        file.write(data)

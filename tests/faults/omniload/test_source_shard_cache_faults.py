"""Processes that share a shard cache and are killed at any moment: no byte is wrong, and the cap holds."""

import hashlib
import os
import random
import signal
import subprocess
import sys
from dataclasses import replace

import fsspec
import numpy as np
import pytest

from omniload.base.clock import FakeClock
from omniload.source.files import remote_file
from omniload.source.stores.blocks import BLOCK_BYTES
from tests.support.plane.sources.shard_caches import a_cache, taken_bytes

B = BLOCK_BYTES
SHARDS, SIZE = 4, 3 * B + 11
READER = """
import hashlib, random, sys
from pathlib import Path
import fsspec
from omniload.source.files import remote_file
from tests.support.plane.sources.shard_caches import a_cache

folder, limit, seed = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
store, chance = fsspec.filesystem("file"), random.Random(seed)
files = a_cache(folder / "cache", limit).through(
    remote_file(store, str(path)) for path in sorted(folder.glob("*.bin"))
)
while True:
    number = chance.randrange(len(files))
    start = chance.randrange(files[number].size_bytes)
    stop = chance.randrange(start, files[number].size_bytes)
    data = files[number].read_range(start, stop)
    print(number, start, stop, hashlib.sha256(data).hexdigest(), flush=True)
"""


@pytest.fixture
def contents(tmp_path):
    made = []
    for number in range(SHARDS):
        data = np.random.default_rng(number).integers(0, 256, SIZE, dtype=np.uint8).tobytes()
        path = tmp_path / f"{number}.bin"
        path.write_bytes(data)
        # Written long ago: a time of writing tells versions apart once it is past.
        os.utime(path, (1_000_000_000, 1_000_000_000))
        made.append(data)
    return made


def through(folder, cache):
    store = fsspec.filesystem("file")
    return cache.through(remote_file(store, str(path)) for path in sorted(folder.glob("*.bin")))


def a_reader(folder, limit, seed):
    return subprocess.Popen(
        [sys.executable, "-c", READER, str(folder), str(limit), str(seed)],
        stdout=subprocess.PIPE,
        text=True,
    )


def require_right(line, contents):
    number, start, stop, digest = line.split()
    wanted = contents[int(number)][int(start) : int(stop)]
    assert hashlib.sha256(wanted).hexdigest() == digest, line


@pytest.mark.scripts_start_warm
@pytest.mark.parametrize("limit", [5 * B, 64 * B])
def test_readers_that_are_killed_leave_a_cache_that_is_right_and_under_its_cap(
    tmp_path, contents, limit
):
    chance, folder = random.Random(limit), tmp_path / "cache"
    readers = [a_reader(tmp_path, limit, seed) for seed in range(2)]
    try:
        for kill in range(6):
            at = kill % 2
            # So many reads of its own, then at once: somewhere in the next one.
            for _ in range(chance.randrange(1, 40)):
                require_right(readers[at].stdout.readline(), contents)
            os.kill(readers[at].pid, signal.SIGKILL)
            for line in readers[at].communicate()[0].splitlines():
                if len(line.split()) == 4 and len(line.split()[3]) == 64:
                    require_right(line, contents)
            assert taken_bytes(folder) <= limit
            readers[at] = a_reader(tmp_path, limit, 10 + kill)
    finally:
        for reader in readers:
            reader.kill()
            reader.communicate()

    cache = a_cache(folder, limit)
    for file, data in zip(through(tmp_path, cache), contents, strict=True):
        assert file.read_range(0, SIZE) == data
    assert taken_bytes(folder) <= cache.directory.held_bytes() <= limit
    # What dead ones used makes room, and what they had begun is completed.
    if limit > SHARDS * SIZE:
        later = a_cache(folder, limit)
        assert [file.read_range(0, SIZE) for file in through(tmp_path, later)] == contents
        assert later.traffic.store_bytes == 0


def test_what_a_process_used_stays_while_one_lives_that_it_forked(tmp_path, contents):
    folder, limit, clock = tmp_path / "cache", 5 * B, FakeClock()
    cache = a_cache(folder, limit)
    first, second = through(tmp_path, cache)[:2]
    first.read_range(0, SIZE)
    kept = first.kept.version
    wait, go = os.pipe()
    if not (child := os.fork()):
        os.close(go)
        os.read(wait, 1)
        os._exit(0)
    del cache, first

    other = a_cache(folder, limit, clock)
    (second,) = other.through([replace(second, kept=None)])
    try:
        assert second.read_range(0, SIZE) == contents[1]
        assert other.directory.bytes_of(kept) >= SIZE
    finally:
        os.close(wait)
        os.close(go)
        os.waitpid(child, 0)

    clock.advance(61)
    assert second.read_range(0, SIZE) == contents[1]
    assert other.directory.bytes_of(kept) == 0
    assert other.directory.bytes_of(second.kept.version) >= SIZE

"""Prefetching and dropping: what is kept, what did not fit, what is said."""

import json
import os
import re

import click.testing
import pytest

from fusefs.cli import command
from fusefs.config import DiskCacheConfig, FilesConfig, Striping
from fusefs.mounts.options import mount_config
from fusefs.stores.local.store import LocalStore
from fusefs.stores.memory import MemoryStore
from fusefs.tools.prefetch import (
    Kept,
    prefetch_from_store,
    settled,
    store_files,
    with_disk_cache,
)
from omniload.base.clock import FakeClock
from omniload.base.errors import ConfigError, StateError
from tests.support.fusefs.builders import some_files

MiB = 1 << 20
BIG = bytes(range(256)) * 4096 * 3  # 3 MiB


@pytest.fixture
def store():
    made = MemoryStore()
    with some_files(made) as files:
        for name in ("d/one", "d/e/two"):
            files.write_file(name, BIG)
        files.write_file("d/empty", b"")
        files.names.make_link("d/link", "one")
    return made


def cached(store, directory, capacity=16 * MiB):
    return some_files(
        store, disk_cache=DiskCacheConfig(directory=str(directory), capacity=capacity)
    )


def store_bytes(files):
    return files.numbers().tiers["store"].read_bytes


def test_a_directory_is_kept_whole_on_the_disk_and_read_from_there_afterwards(store, tmp_path):
    told = []
    with cached(store, tmp_path / "disk") as files:
        found = list(store_files(files, ["d"]))
        kept = prefetch_from_store(files, found, told.append)

        assert [(k.path, k.left_out_bytes) for k in kept] == [
            ("d/e/two", 0),
            ("d/empty", 0),
            ("d/one", 0),
        ]
        assert sum(told) == 2 * len(BIG)
        assert store_bytes(files) == 2 * len(BIG)
    with cached(store, tmp_path / "disk") as files, files.open("d/one") as file:
        assert file.reader.read(0, len(BIG)) == BIG
        assert store_bytes(files) == 0


def test_prefetching_again_reads_the_store_no_more_and_compares_what_is_there(store, tmp_path):
    with cached(store, tmp_path / "disk") as files:
        prefetch_from_store(files, store_files(files, ["d/one"]))
    with cached(store, tmp_path / "disk") as files:
        prefetch_from_store(files, store_files(files, ["d/one"]))

        assert store_bytes(files) == 0
        with files.open("d/one") as file:
            descriptor = file.local_copy()
    assert descriptor is not None
    with os.fdopen(descriptor, "rb") as copy:
        assert copy.read() == BIG


def test_what_does_not_fit_on_the_disk_is_said(store, tmp_path):
    with cached(store, tmp_path / "disk", capacity=4 * MiB) as files:
        kept = {k.path: k for k in prefetch_from_store(files, store_files(files, ["d"]))}

    assert kept["d/e/two"].left_out_bytes == len(BIG)  # made room for the one after it
    assert kept["d/one"].left_out_bytes == 0


def test_without_a_disk_cache_memory_keeps_what_fits_into_it():
    memory = MemoryStore()
    with some_files(memory, cache=8 * MiB, striping=Striping(unit=MiB, count=2)) as files:
        files.write_file("f", BIG * 4)
        (kept,) = prefetch_from_store(files, store_files(files, ["f"]))

    assert kept.disk_bytes is None
    assert 0 < kept.memory_bytes <= 8 * MiB
    assert kept.left_out_bytes == len(BIG) * 4 - kept.memory_bytes


def test_what_is_not_there_is_said(store):
    with some_files(store) as files, pytest.raises(StateError, match="'nothing' is not in memory"):
        list(store_files(files, ["nothing"]))


def test_a_file_without_a_copy_is_measured_by_memory():
    kept = Kept(path="f", size_bytes=10, memory_bytes=6, disk_bytes=None)

    assert kept.left_out_bytes == 4
    assert kept.as_dict()["left_out_bytes"] == 4


def test_a_disk_cache_is_named_in_a_file_or_beside_it(tmp_path):
    known = FilesConfig(disk_cache={"directory": "/a", "capacity": "2GiB"})

    assert with_disk_cache(known, None, None) is known
    assert with_disk_cache(known, "/b", None).disk_cache.capacity == 2 << 30
    assert with_disk_cache(FilesConfig(), "/b", "3GiB").disk_cache.capacity == 3 << 30
    with pytest.raises(ConfigError, match="would be gone"):
        with_disk_cache(FilesConfig(), None, None)
    with pytest.raises(ConfigError, match="capacity '1KiB'"):
        with_disk_cache(FilesConfig(), "/b", "1KiB")


def cli(*arguments):
    return click.testing.CliRunner().invoke(command, [str(a) for a in arguments])


@pytest.fixture
def place(tmp_path):
    (tmp_path / "store").mkdir()
    with some_files(LocalStore(tmp_path / "store")) as files:
        files.write_file("d/one", BIG)
    return tmp_path


def test_the_command_fills_a_disk_cache_from_a_store_and_drop_empties_it(place):
    cache = ("--store", place / "store", "--disk-cache", place / "disk")

    prefetched = cli("prefetch", "d", *cache, "--json")
    shown = json.loads(prefetched.output)
    assert (shown["size_bytes"], shown["disk_bytes"], shown["left_out_bytes"]) == (
        len(BIG),
        len(BIG),
        0,
    )
    assert "1 file, 3 MiB: 3 MiB on the disk" in cli("prefetch", "d/one", *cache).output
    assert re.match(r"d: 0 B of memory, 3\S* MiB of the disk", cli("drop", "d", *cache).output)
    assert not list((place / "disk/copies").rglob("*.data"))


def test_the_command_says_what_did_not_fit(place):
    output = cli(
        "prefetch", "d", "--store", place / "store", "--disk-cache", place / "disk",
        "--capacity", "2MiB",
    ).output  # fmt: skip

    assert "d/one: no room for" in output


def test_the_command_wants_a_disk_cache_for_a_store_and_a_mount_otherwise(place):
    assert isinstance(cli("prefetch", "d", "--store", place / "store").exception, ConfigError)
    assert isinstance(cli("prefetch", place / "store").exception, StateError)
    assert isinstance(cli("prefetch", place / "nowhere").exception, StateError)
    assert isinstance(cli("drop", place / "store").exception, StateError)


def test_a_mount_is_given_a_disk_cache_by_options():
    config = mount_config("s", "/m", ("disk_cache=/nvme/a,disk_cache_capacity=2GiB",))

    assert config.files.disk_cache == DiskCacheConfig(directory="/nvme/a", capacity=2 << 30)
    with pytest.raises(ConfigError, match="capacity"):
        mount_config("s", "/m", ("disk_cache=/nvme/a",))


def growing(steps):
    """Look at files whose bytes on the disk grow to the last of their steps, one at each look."""
    left = {path: list(sizes) for path, sizes in steps.items()}

    def look(path):
        sizes = left[path]
        disk_bytes = sizes.pop(0) if len(sizes) > 1 else sizes[0]
        return Kept(path=path, size_bytes=100, memory_bytes=0, disk_bytes=disk_bytes)

    return look


def test_files_are_counted_once_the_disk_has_them():
    clock = FakeClock()

    kept = settled(["a", "b"], growing({"a": [0, 50, 100], "b": [100]}), clock)

    assert [file.disk_bytes for file in kept] == [100, 100]
    assert len(clock.slept_s) == 2


def test_many_files_without_room_are_waited_for_together():
    clock = FakeClock()
    names = [str(number) for number in range(500)]

    kept = settled(names, growing({name: [0] for name in names}), clock)

    assert {file.left_out_bytes for file in kept} == {100}
    assert clock.now_s() < 2


def test_slow_growth_is_waited_for_and_no_copy_is_not():
    clock = FakeClock()
    slow = [step for step in range(101) for _ in range(15)]  # a byte in 0.75 s

    kept = settled(["slow", "none"], growing({"slow": slow, "none": [None]}), clock)

    assert [file.disk_bytes for file in kept] == [100, None]
    assert clock.now_s() > 60

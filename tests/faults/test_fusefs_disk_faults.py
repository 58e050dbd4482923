"""The disk cache under files: a flipped bit, a full disk, a killed process, too little room. Never other bytes."""

import errno
import logging
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from fusefs.cache.disk_directory import CopyFiles, DiskDirectory
from fusefs.config import DiskCacheConfig
from fusefs.stores.local.store import LocalStore
from fusefs.stores.memory import MemoryStore
from fusefs.tools.statistics import drop_cached
from omniload.base.errors import UnavailableError
from tests.support.fusefs.builders import contents, some_files
from tests.support.fusefs.disk import bytes_on_disk, files_in, flip
from tests.support.fusefs.faulty_store import FaultyStore, Outage

DATA = bytes(range(256)) * 400  # 25 units of 4096


@pytest.fixture
def directory(tmp_path):
    return tmp_path / "disk"


def cached(store, directory, capacity=4 << 20, **changes):
    chosen = DiskCacheConfig(directory=str(directory), capacity=capacity)
    return some_files(store, disk_cache=chosen, **changes)


@pytest.fixture
def store():
    made = MemoryStore()
    with some_files(made) as files:
        files.write_file("f", DATA)
    return made


def warmed(store, directory):
    with cached(store, directory) as files:
        assert contents(files, "f") == DATA


def kept(files, path):
    """Read a file and wait until the disk has what it takes of it."""
    with files.open(path) as file:
        file.reader.cached.keep(0, file.reader.size_bytes)
        return bytes(file.reader.read(0, file.reader.size_bytes))


def store_bytes(files):
    return files.numbers().tiers["store"].read_bytes


def test_what_was_read_once_needs_no_store_after_a_restart(store, directory):
    warmed(store, directory)

    with cached(store, directory) as files:
        assert contents(files, "f") == DATA
        assert store_bytes(files) == 0
        assert files.numbers().tiers["disk"].read_bytes == len(DATA)


def test_what_lies_on_the_disk_is_read_through_an_outage_of_the_store(store, directory):
    warmed(store, directory)
    faulty = FaultyStore(store, {("read", 2): Outage})  # after the manifest

    with cached(faulty, directory) as files, files.open("f") as file:
        assert file.reader.read(0, len(DATA)) == DATA
        file.reader.cached.forget()
        files.disk.drop(file.reader.cached.copy.version)
        with pytest.raises(UnavailableError):
            file.reader.read(0, 10)
    faulty.assert_all_faults_fired()


@pytest.mark.parametrize("at", [0, 5000, len(DATA) - 1])
def test_a_flipped_bit_is_never_returned_and_its_unit_is_fetched_again(store, directory, at):
    warmed(store, directory)
    flip(files_in(directory, ".data")[0], at, bit=3)

    with cached(store, directory) as files:
        assert contents(files, "f") == DATA
        assert 0 < store_bytes(files) <= 4096
        assert files.numbers().tiers["disk"].errors == 1
    with cached(store, directory) as files:
        assert contents(files, "f") == DATA
        assert store_bytes(files) == 0


def test_a_flipped_bit_of_a_checksum_costs_its_unit_and_one_of_the_header_the_copy(
    store, directory
):
    for at, cost in ((64 + 8 * 3, 4096), (20, len(DATA)), (30, len(DATA))):
        warmed(store, directory)
        flip(files_in(directory, ".map")[0], at)

        with cached(store, directory) as files:
            assert contents(files, "f") == DATA
            assert store_bytes(files) == cost


def test_a_flipped_bit_keeps_the_copy_from_being_handed_out_until_it_is_mended(store, directory):
    warmed(store, directory)
    flip(files_in(directory, ".data")[0], 70_000)

    with cached(store, directory) as files, files.open("f") as file:
        assert file.local_copy() is None
        files._local_readers.submit(int).result()
        file.reader.cached.copy.verify()
        assert file.local_copy() is None
        file.reader.cached.keep(0, len(DATA))

        with os.fdopen(file.local_copy(), "rb") as copy:
            assert copy.read() == DATA
        assert store_bytes(files) == 4096


def test_a_copy_is_compared_in_the_background_and_then_handed_out(store, directory):
    warmed(store, directory)

    with cached(store, directory) as files, files.open("f") as file:
        assert file.local_copy() is None
        for _ in range(4):  # one per thread of the pool, so that the comparing has ended
            files._local_readers.submit(int).result()
        file.reader.cached.copy.verify()

        with os.fdopen(file.local_copy(), "rb") as copy:
            drop_cached(files, "")
            assert copy.read() == DATA


def test_a_file_larger_than_the_disk_cache_is_read_whole(tmp_path, directory):
    big = os.urandom(3 << 20)
    with cached(MemoryStore(), directory, capacity=1 << 20) as files:
        files.write_file("big", big)
        assert kept(files, "big") == big

        assert bytes_on_disk(directory) <= files.disk.used_bytes <= 1 << 20
        with files.open("big") as file:
            memory, disk = file.reader.cached.held_bytes()
            assert (memory, file.local_copy()) == (len(big), None)
            assert (1 << 20) * 0.9 < disk < 1 << 20
    with cached(files.store, directory, capacity=1 << 20) as files:
        assert contents(files, "big") == big
        assert store_bytes(files) == len(big) - disk


def refusing(monkeypatch, owner, name, number):
    """Make the disk refuse a step from its ``number``-th call on."""
    step, calls = getattr(owner, name), []

    def refuse(*arguments):
        calls.append(name)
        if len(calls) >= number:
            raise OSError(errno.ENOSPC, "No space left on device")
        return step(*arguments)

    monkeypatch.setattr(owner, name, refuse)


@pytest.mark.parametrize("number", [1, 7])
@pytest.mark.parametrize(
    ("owner", "name"), [(CopyFiles, "write"), (CopyFiles, "mark"), (DiskDirectory, "make")]
)
def test_a_full_disk_costs_the_cache_and_no_read(
    store, directory, monkeypatch, caplog, owner, name, number
):
    refusing(monkeypatch, owner, name, number if name != "make" else 1)
    monkeypatch.setattr(logging.getLogger("omniload"), "propagate", True)

    with cached(store, directory) as files, caplog.at_level("WARNING", "omniload"):
        assert kept(files, "f") == DATA
        assert kept(files, "f") == DATA
        assert not files.disk.is_writable

    assert len([r for r in caplog.records if "refuses to be written" in r.message]) == 1
    monkeypatch.undo()
    with cached(store, directory) as files:
        assert contents(files, "f") == DATA


@pytest.mark.skipif(os.geteuid() != 0, reason="A FULL DISK NOT TESTED: mounting a tmpfs needs root")
def test_a_disk_that_really_is_full_costs_the_cache_and_no_read(store, tmp_path):
    directory = tmp_path / "small"
    directory.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64k,mode=700", "tmpfs", directory],
        capture_output=True,
        check=False,
    )
    if done.returncode:
        pytest.skip("A FULL DISK NOT TESTED: no tmpfs can be mounted here")
    try:
        with cached(store, directory) as files:
            assert kept(files, "f") == DATA
            assert not files.disk.is_writable
            with files.open("f") as file:
                assert 0 < file.reader.cached.held_bytes()[1] < len(DATA)
        with cached(store, directory) as files:
            assert contents(files, "f") == DATA
            assert 0 < store_bytes(files) < len(DATA)
    finally:
        subprocess.run(["umount", directory], check=True)


def test_a_plain_file_is_kept_on_the_disk_only_under_a_version_the_store_vouches_for(tmp_path):
    disk, root = tmp_path / "disk", tmp_path / "store"
    root.mkdir()
    for name, mtime_ns in (
        ("settled", 1_700_000_000_123_000_000),
        ("seconds", 1_700_000_000_000_000_000),
        # So that it stays young, however long a busy machine takes to look at it.
        ("young", time.time_ns() + 3_600 * 10**9),
    ):
        (root / name).write_bytes(DATA)
        os.utime(root / name, ns=(mtime_ns, mtime_ns))

    with cached(LocalStore(root), disk) as files:
        for name in ("settled", "seconds", "young"):
            assert kept(files, name) == DATA
            with files.open(name) as file:
                assert (file.local_copy() is not None) == (name == "settled"), name


def test_a_plain_file_that_is_replaced_is_read_anew(tmp_path):
    root = tmp_path / "store"
    root.mkdir()
    for content, mtime_ns in ((DATA, 10**18 + 1), (DATA[::-1], 10**18 + 2)):
        (root / "f").write_bytes(content)
        os.utime(root / "f", ns=(mtime_ns, mtime_ns))
        with cached(LocalStore(root), tmp_path / "disk") as files:
            assert contents(files, "f") == content


def test_what_a_time_stamp_hides_is_seen_once_it_is_dropped(tmp_path):
    root = tmp_path / "store"
    root.mkdir()
    (root / "d").mkdir()
    (root / "d/f").write_bytes(DATA)
    os.utime(root / "d/f", ns=(10**18 + 1, 10**18 + 1))
    with cached(LocalStore(root), tmp_path / "disk") as files:
        kept(files, "d/f")
        (root / "d/f").write_bytes(DATA[::-1])
        os.utime(root / "d/f", ns=(10**18 + 1, 10**18 + 1))
        assert kept(files, "d/f") == DATA

        memory, disk = drop_cached(files, "d")

        assert memory == len(DATA)
        assert disk >= len(DATA)
        assert contents(files, "d/f") == DATA[::-1]


FILLER = """
import sys
from tests.support.fusefs.builders import contents, some_files
from tests.faults.test_fusefs_disk_faults import cached
from fusefs.stores.local.store import LocalStore
with cached(LocalStore(sys.argv[1]), sys.argv[2], capacity=4 << 20) as files:
    print("open", flush=True)
    while True:
        for number in range(8):
            contents(files, f"f{number}")
"""


@pytest.mark.scripts_start_warm
def test_a_process_killed_while_it_fills_leaves_nothing_that_is_believed_wrongly():
    shm = Path("/dev/shm")
    base = Path(tempfile.mkdtemp(dir=shm if shm.is_dir() else None))
    try:
        (base / "store").mkdir()
        datas = {f"f{number}": os.urandom(1 << 20) for number in range(8)}
        with some_files(LocalStore(base / "store")) as files:
            for name, data in datas.items():
                files.write_file(name, data)
        for life in range(3):
            process = subprocess.Popen(
                [sys.executable, "-c", FILLER, base / "store", base / "disk"],
                stdout=subprocess.PIPE,
                cwd=Path(__file__).parents[2],
            )
            assert process.stdout.readline() == b"open\n"
            # Killed while it stores: at another point of its work each time.
            while bytes_on_disk(base / "disk") < (life * 4 + 1) << 18:
                assert process.poll() is None
            process.kill()
            assert process.wait() == -signal.SIGKILL
            process.stdout.close()

            with cached(LocalStore(base / "store"), base / "disk") as files:
                assert bytes_on_disk(base / "disk") <= files.disk.used_bytes <= 4 << 20
                for name, data in datas.items():
                    assert contents(files, name) == data
                assert files.numbers().tiers["disk"].errors == 0
    finally:
        shutil.rmtree(base)

"""Caches of a real mount: filled by prefetch, found again after a kill, dropped by hand, scraped."""

import fcntl
import mmap
import os
import shutil
import urllib.request

import click.testing
import orjson
import pytest
from prometheus_client.parser import text_string_to_metric_families

from fusefs.cli import command
from fusefs.mounts.lifecycle import MountConfig, mount, start
from omniload.base.errors import StateError
from tests.support.fusefs.model import TINY, fast_directory
from tests.support.ports import free_port

pytestmark = [
    pytest.mark.fuse,
    pytest.mark.skipif(
        not os.access("/dev/fuse", os.R_OK | os.W_OK) or shutil.which("fusermount3") is None,
        reason="MOUNT NOT TESTED: no /dev/fuse or fusermount3",
    ),
]
DATA = os.urandom(3 << 20)


@pytest.fixture
def place():
    base = fast_directory("fusefs-caches-")
    for name in ("store", "mount", "other"):
        (base / name).mkdir()
    yield base
    shutil.rmtree(base)


def cached(place, capacity=16 << 20):
    return {**TINY, "disk_cache": {"directory": str(place / "disk"), "capacity": capacity}}


def cli(*arguments):
    done = click.testing.CliRunner().invoke(command, [str(a) for a in arguments])
    assert done.exit_code == 0, done.output
    return done.output


def numbers(root):
    return orjson.loads((root / ".omnifs/stats.json").read_bytes())


def from_store(root):
    return numbers(root)["tiers"]["store"]["read_bytes"]


def in_memory(root):
    return numbers(root)["cache"]["used_bytes"]


def read_past_the_page_cache_of_before(path):
    """Read a file of which the kernel holds nothing any more."""
    with path.open("rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        return file.read()


def test_what_was_prefetched_outlives_a_killed_daemon_and_needs_no_store(place):
    config = MountConfig(
        store=str(place / "store"), mountpoint=str(place / "mount"), files=cached(place)
    )
    daemon = start(config, log_path=os.devnull)
    (place / "mount/d").mkdir()
    for name in ("one", "two"):
        (place / "mount/d" / name).write_bytes(DATA)
    shown = orjson.loads(cli("prefetch", place / "mount/d", "--json"))
    assert shown["disk_bytes"] == shown["size_bytes"] == 2 * len(DATA)
    assert shown["left_out_bytes"] == 0
    daemon.kill()
    daemon.wait()

    with mount(str(place / "store"), place / "mount", {"files": cached(place)}) as root:
        for name in ("one", "two"):
            assert (root / "d" / name).read_bytes() == DATA
        found = numbers(root)

    assert found["tiers"]["store"]["read_bytes"] == 0
    assert found["tiers"]["disk"]["read_bytes"] >= 2 * len(DATA)
    assert found["disk_cache"]["used_bytes"] >= 2 * len(DATA)


def test_prefetch_says_what_did_not_fit(place):
    with mount(str(place / "store"), place / "mount", {"files": cached(place, 2 << 20)}) as root:
        (root / "f").write_bytes(DATA)

        output = cli("prefetch", root / "f")

    assert "no room for" in output


def test_without_a_disk_cache_a_prefetched_file_lies_in_memory(place):
    with mount(str(place / "store"), place / "mount", {"files": TINY}) as root:
        (root / "f").write_bytes(DATA)

        shown = orjson.loads(cli("prefetch", root / "f", "--json"))

        assert (shown["memory_bytes"], shown["left_out_bytes"]) == (len(DATA), 0)
        before = from_store(root)
        assert (root / "f").read_bytes() == DATA
        assert from_store(root) == before


def test_what_was_prefetched_into_memory_is_dropped_by_hand(place):
    with mount(str(place / "store"), place / "mount", {"files": TINY}) as root:
        (root / "f").write_bytes(DATA)
        cli("prefetch", root / "f")

        # The name that drops is no attribute that a copying program would meet.
        assert os.listxattr(root / "f") == []
        with pytest.raises(OSError, match="not supported"):
            os.setxattr(root / "f", "user.omnifs.drop", b"1")
        assert "3 MiB of memory" in cli("drop", root / "f")


def test_what_the_kernel_holds_lies_in_memory_once_until_it_turns_out_that_it_drops_it(place):
    with mount(str(place / "store"), place / "mount", {"files": TINY}) as root:
        (root / "f").write_bytes(DATA)
        before = from_store(root)

        assert (root / "f").read_bytes() == DATA
        assert (in_memory(root), from_store(root) - before) == (0, len(DATA))
        assert (root / "f").read_bytes() == DATA
        assert from_store(root) - before == len(DATA)

        for _ in range(3):
            assert read_past_the_page_cache_of_before(root / "f") == DATA
            assert (in_memory(root), from_store(root) - before) == (len(DATA), 2 * len(DATA))


def test_what_is_read_past_the_page_cache_stays_in_memory(place):
    with mount(str(place / "store"), place / "mount", {"files": TINY}) as root:
        (root / "f").write_bytes(DATA)
        before = from_store(root)

        for _ in range(2):
            with mmap.mmap(-1, len(DATA)) as buffer:
                file = os.open(root / "f", os.O_RDONLY | os.O_DIRECT)
                while os.readv(file, [buffer]) < len(DATA):
                    os.lseek(file, 0, os.SEEK_SET)
                os.close(file)
                assert buffer[:] == DATA
            assert (in_memory(root), from_store(root) - before) == (len(DATA), len(DATA))


def test_a_change_that_size_and_time_stamp_hide_shows_once_it_is_dropped(place):
    plain = place / "store/d/plain"
    plain.parent.mkdir()
    plain.write_bytes(DATA)
    os.utime(plain, ns=(10**18 + 1, 10**18 + 1))
    settings = {"files": cached(place), "read_only": True}
    with mount(str(place / "store"), place / "mount", settings) as root:
        cli("prefetch", root / "d")
        assert (root / "d/plain").read_bytes() == DATA
        with plain.open("r+b") as file:
            file.write(DATA[::-1])
        os.utime(plain, ns=(10**18 + 1, 10**18 + 1))
        assert (root / "d/plain").read_bytes() == DATA

        output = cli("drop", root / "d")

        assert "of the disk" in output
        assert (root / "d/plain").read_bytes() == DATA[::-1]


def test_a_second_mount_on_the_same_disk_cache_is_refused_clearly(place):
    settings = {"files": cached(place)}
    with (
        mount(str(place / "store"), place / "mount", settings),
        pytest.raises(StateError, match="directory of its own"),
        mount(str(place / "store"), place / "other", settings),
    ):
        pass


def test_the_numbers_of_a_mount_are_scraped_and_equal_its_statistics(place):
    settings = {"files": cached(place), "metrics_port": free_port()}
    with mount(str(place / "store"), place / "mount", settings) as root:
        (root / "f").write_bytes(DATA)
        assert (root / "f").read_bytes() == DATA
        url = f"http://127.0.0.1:{settings['metrics_port']}/metrics"
        with urllib.request.urlopen(url) as answer:
            families = {f.name: f for f in text_string_to_metric_families(answer.read().decode())}
        found = numbers(root)

    read = {s.labels["tier"]: s.value for s in families["omniload_fusefs_read_bytes"].samples}
    assert read == {tier: counts["read_bytes"] for tier, counts in found["tiers"].items()}
    assert read["store"] >= len(DATA)
    assert families["omniload_fusefs_store_read_seconds"].samples[-1].value > 0


ROOT_ALONE = pytest.mark.skipif(os.geteuid() != 0, reason="NOT TESTED: passthrough needs root")


@ROOT_ALONE
@pytest.mark.parametrize(
    ("settings", "is_passed"),
    [
        ({}, False),
        ({"read_only": True}, True),
        ({"passthrough": True}, True),
        ({"read_only": True, "passthrough": False}, False),
    ],
)
def test_the_kernel_reads_copies_by_itself_where_nobody_writes_or_where_it_is_told(
    place, settings, is_passed
):
    store, files = str(place / "store"), cached(place)
    with mount(store, place / "mount", {"files": files}) as root:
        (root / "passed").write_bytes(DATA)
    with mount(store, place / "mount", {"bridge": "device", "files": files, **settings}) as root:
        cli("prefetch", root / "passed")
        assert read_past_the_page_cache_of_before(root / "passed") == DATA
        with (root / "passed").open("rb") as file:
            before = numbers(root)["requests"]
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            assert file.read() == DATA
            asked = numbers(root)["requests"] - before

    assert (asked == 0) == is_passed


@ROOT_ALONE
def test_who_reads_what_lies_on_the_disk_sees_writes_and_locks_of_others_on_the_mount(place):
    settings = {"bridge": "device", "files": cached(place)}
    with mount(str(place / "store"), place / "mount", settings) as root:
        path = root / "followed"
        path.write_bytes(DATA)
        cli("prefetch", path)
        for _ in range(3):
            assert path.read_bytes() == DATA
        with path.open("rb") as reader, path.open("rb+") as writer:
            fcntl.flock(reader, fcntl.LOCK_SH)
            with pytest.raises(BlockingIOError):
                fcntl.flock(writer, fcntl.LOCK_EX | fcntl.LOCK_NB)
            writer.seek(0, os.SEEK_END)
            writer.write(b"one more line")
            writer.flush()
            reader.seek(len(DATA))
            assert reader.read() == b"one more line"
            os.fchmod(reader.fileno(), 0o600)
        assert path.stat().st_mode & 0o777 == 0o600

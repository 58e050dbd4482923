"""The disk cache: what is kept, what is handed out, and what goes first."""

import os
from pathlib import Path

import pytest

from fusefs.cache.disk_cache import DiskCache, disk_cache_of
from fusefs.cache.disk_format import (
    CopyVersion,
    check_marker,
    decode_map,
    encode_marker,
    footprint,
    header_of,
    size_in_map,
)
from fusefs.config import DiskCacheConfig, FilesConfig
from fusefs.metrics.counters import Traffic
from omniload.base.errors import ConfigError, StateError
from tests.support.fusefs.disk import (
    UNIT,
    a_cache,
    a_version,
    all_bytes_of,
    bytes_of,
    bytes_on_disk,
    files_in,
    fill,
    flip,
    read,
    span_of,
)

ONE = a_version(1, 4, short=7)
TWO = a_version(2, 4)
ROOM_FOR_ONE = footprint(4) + 4 * (UNIT + 8)


@pytest.fixture
def directory(tmp_path):
    return tmp_path / "cache"


def test_a_unit_that_was_stored_is_read_back(directory):
    with a_cache(directory) as cache:
        copy = cache.open(ONE)

        assert fill(copy, ONE, [1, 3]) == [1, 3]
        assert [copy.has(unit) for unit in range(4)] == [False, True, False, True]
        assert read(copy, ONE, 3) == bytes_of(ONE, 3)
        assert read(copy, ONE, 0) is None


def test_adjacent_units_come_from_one_read(directory):
    with a_cache(directory) as cache:
        copy = cache.open(ONE)
        fill(copy, ONE)

        found = copy.read([span_of(ONE, unit) for unit in range(4)])

        assert b"".join(found[unit] for unit in range(4)) == all_bytes_of(ONE)


def test_what_one_process_cached_the_next_finds(directory):
    with a_cache(directory) as cache:
        fill(cache.open(ONE), ONE)
    with a_cache(directory) as cache:
        copy = cache.open(ONE)

        assert copy.is_whole
        assert not copy.is_verified(0)
        assert read(copy, ONE, 0) == bytes_of(ONE, 0)
        assert copy.is_verified(0)
        assert cache.used_bytes >= bytes_on_disk(directory) > ONE.size_bytes - UNIT


def test_a_copy_that_is_whole_is_the_file_itself(directory):
    with a_cache(directory) as cache:
        copy = cache.open(ONE)
        fill(copy, ONE, [0, 1, 2])
        assert copy.descriptor() is None
        fill(copy, ONE, [3])

        descriptor = copy.descriptor()

        with os.fdopen(descriptor, "rb") as file:
            assert file.read() == all_bytes_of(ONE)
            with pytest.raises(OSError, match="Bad file descriptor"):
                os.write(file.fileno(), b"x")


def test_a_copy_is_handed_out_only_after_this_process_compared_all_of_it(directory):
    with a_cache(directory) as cache:
        fill(cache.open(ONE), ONE)
    with a_cache(directory) as cache:
        copy = cache.open(ONE)
        assert copy.descriptor() is None
        for unit in range(3):
            read(copy, ONE, unit)
        assert copy.descriptor() is None
        read(copy, ONE, 3)

        descriptor = copy.descriptor()

        assert os.pread(descriptor, 10, 0) == all_bytes_of(ONE)[:10]
        os.close(descriptor)


def test_a_copy_compared_once_needs_no_comparing_when_it_is_opened_again(directory):
    with a_cache(directory) as cache:
        copy = cache.open(ONE)
        fill(copy, ONE)
        copy.close()

        again = cache.open(ONE)

        assert again.is_verified(2)
        os.close(again.descriptor())


def test_a_copy_that_somebody_wrote_to_is_not_handed_out(directory):
    with a_cache(directory) as cache:
        copy = cache.open(ONE)
        fill(copy, ONE)
        path = files_in(directory, ".data")[0]
        with path.open("r+b") as file:
            file.write(b"other")
        os.utime(path, ns=(0, 0))

        assert copy.descriptor() is None
        assert read(copy, ONE, 0) is None
        assert [copy.has(unit) for unit in range(4)] == [False, True, True, True]


def test_the_copy_least_recently_used_goes_first(directory):
    traffic = Traffic()
    with a_cache(directory, 2 * ROOM_FOR_ONE, traffic) as cache:
        copies = {version.key: cache.open(version) for version in (ONE, TWO)}
        for version in (ONE, TWO):
            fill(copies[version.key], version)
        read(copies[ONE.key], ONE, 0)

        three = a_version(3, 4)
        assert fill(cache.open(three), three) == [0, 1, 2, 3]

        assert copies[ONE.key].is_whole
        assert not copies[TWO.key].has(0)
        assert traffic.numbers().tiers["disk"].evictions == 1
        assert len(files_in(directory, ".data")) == 2
        assert bytes_on_disk(directory) <= cache.used_bytes <= cache.capacity_bytes


def test_recency_outlives_the_process(directory):
    with a_cache(directory) as cache:
        for version in (ONE, TWO):
            fill(cache.open(version), version)
    for number, path in enumerate(files_in(directory, ".map")):
        os.utime(path, ns=(number, number))
    oldest = files_in(directory, ".map")[0].stem

    with a_cache(directory, 2 * ROOM_FOR_ONE) as cache:
        fill(cache.open(a_version(3, 4)), a_version(3, 4))

    assert oldest not in {path.stem for path in files_in(directory, ".map")}
    assert len(files_in(directory, ".map")) == 2


def test_a_file_larger_than_the_capacity_is_kept_as_far_as_it_fits(directory):
    large = a_version(9, 40)
    with a_cache(directory, 10 * UNIT) as cache:
        copy = cache.open(large)

        kept = fill(copy, large)

        assert kept == [0, 1, 2, 3, 4, 5, 6]
        assert [read(copy, large, unit) == bytes_of(large, unit) for unit in kept] == [True] * 7
        assert copy.descriptor() is None
        assert cache.used_bytes <= 10 * UNIT


def test_a_copy_in_use_by_descriptor_is_not_evicted_before_it_is_closed(directory):
    with a_cache(directory, ROOM_FOR_ONE) as cache:
        copy = cache.open(ONE)
        fill(copy, ONE)
        descriptor = copy.descriptor()
        other = cache.open(TWO)

        assert fill(other, TWO) == []
        copy.close()
        assert fill(other, TWO) == [0, 1, 2, 3]

        assert os.pread(descriptor, ONE.size_bytes, 0) == all_bytes_of(ONE)
        os.close(descriptor)


def test_a_copy_that_is_open_and_not_handed_out_is_evicted_and_filled_anew(directory):
    with a_cache(directory, ROOM_FOR_ONE) as cache:
        one, two = cache.open(ONE), cache.open(TWO)
        fill(one, ONE)
        fill(two, TWO)

        assert not one.has(0)
        assert read(one, ONE, 0) is None
        assert fill(one, ONE) == [0, 1, 2, 3]
        assert read(one, ONE, 3) == bytes_of(ONE, 3)
        assert not two.has(0)


def test_what_is_dropped_is_gone_and_stays_with_who_holds_it(directory):
    with a_cache(directory) as cache:
        copy = cache.open(ONE)
        fill(copy, ONE)
        descriptor = copy.descriptor()

        assert cache.drop(ONE) >= ONE.size_bytes
        assert cache.drop(TWO) == 0

        assert cache.used_bytes == 0
        assert not copy.has(0)
        assert os.pread(descriptor, ONE.size_bytes, 0) == all_bytes_of(ONE)
        os.close(descriptor)
        assert fill(copy, ONE, [2]) == [2]


def test_a_view_that_is_closed_stores_nothing_and_a_task_that_holds_it_does(directory):
    with a_cache(directory) as cache:
        copy = cache.open(ONE)
        copy.acquire()
        copy.close()
        assert fill(copy, ONE, [0]) == [0]
        copy.release()

        assert fill(copy, ONE, [1]) == []
        assert cache.open(ONE).has(0)


def test_a_cache_that_is_closed_reads_and_stores_nothing(directory):
    cache = DiskCache(str(directory), 1 << 20)
    copy = cache.open(ONE)
    fill(copy, ONE)
    cache.close()

    assert read(copy, ONE, 0) is None
    assert fill(copy, ONE, [0]) == []
    copy.close()


def test_a_smaller_capacity_is_kept_from_the_start(directory):
    with a_cache(directory) as cache:
        for version in (ONE, TWO):
            fill(cache.open(version), version)
    with a_cache(directory, ROOM_FOR_ONE + UNIT) as cache:
        assert cache.used_bytes <= cache.capacity_bytes
        assert len(files_in(directory, ".data")) == 1


@pytest.mark.parametrize("suffix", [".data", ".map"])
def test_half_a_copy_is_removed_at_the_start_and_takes_no_room(directory, suffix):
    with a_cache(directory) as cache:
        fill(cache.open(ONE), ONE)
    os.truncate(files_in(directory, suffix)[0], 10)

    with a_cache(directory) as cache:
        assert cache.used_bytes == 0
        assert files_in(directory, ".*") == []


def test_a_second_user_of_the_directory_is_refused(directory):
    with a_cache(directory), pytest.raises(StateError, match="a directory of its own"):
        DiskCache(str(directory), 1 << 20)
    with a_cache(directory):
        pass


def test_a_directory_that_holds_something_else_is_refused_and_left_alone(tmp_path):
    (tmp_path / "thesis.tex").write_text("years of work")

    with pytest.raises(ConfigError, match="empty or new"):
        DiskCache(str(tmp_path), 1 << 20)

    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def test_a_path_that_is_a_file_is_refused(tmp_path):
    (tmp_path / "file").write_text("")

    with pytest.raises(ConfigError, match="file"):
        DiskCache(str(tmp_path / "file"), 1 << 20)


def test_a_directory_of_another_version_is_refused(directory):
    directory.mkdir()
    (directory / "omnifs-disk-cache.json").write_bytes(b'{"omnifs_disk_cache": 2}')

    with pytest.raises(StateError, match="version 2, this code knows 1"):
        DiskCache(str(directory), 1 << 20)
    with pytest.raises(StateError, match="version None"):
        check_marker(b"[1]", "d")
    check_marker(encode_marker(), "d")


def test_the_configuration_decides_whether_there_is_one(directory):
    assert disk_cache_of(FilesConfig(), Traffic()) is None
    chosen = DiskCacheConfig(directory=str(directory), capacity="2MiB")

    cache = disk_cache_of(FilesConfig(disk_cache=chosen), Traffic())

    assert cache.capacity_bytes == 2 << 20
    cache.close()


def test_mending_a_damaged_unit_takes_no_more_room(directory):
    with a_cache(directory) as cache:
        copy = cache.open(ONE)
        fill(copy, ONE)
        before = cache.used_bytes
        flip(files_in(directory, ".data")[0], 0)

        assert read(copy, ONE, 0) is None
        assert cache.used_bytes == before
        fill(copy, ONE, [0])

        assert cache.used_bytes == before
        assert read(copy, ONE, 0) == bytes_of(ONE, 0)


# The format


def test_a_map_is_believed_for_its_version_only():
    checksums = bytes(range(32))
    whole = header_of(ONE) + checksums

    assert decode_map(whole, ONE).tobytes() == checksums
    assert decode_map(whole, TWO) is None
    assert decode_map(whole[:-1], ONE) is None
    assert (
        decode_map(header_of(CopyVersion(ONE.key, ONE.size_bytes + 1, 4)) + checksums, ONE) is None
    )
    assert size_in_map(whole, len(whole), ONE.name) == ONE.size_bytes
    assert size_in_map(whole, len(whole), TWO.name) is None
    assert size_in_map(whole[:40], len(whole[:40]), ONE.name) is None
    assert size_in_map(whole + b"x", len(whole + b"x"), ONE.name) is None


def test_a_flipped_bit_of_a_header_is_seen():
    whole = bytearray(header_of(ONE) + bytes(32))
    for at in range(64):
        whole[at] ^= 4
        assert size_in_map(bytes(whole), len(bytes(whole)), ONE.name) is None
        whole[at] ^= 4

    assert size_in_map(bytes(whole), len(bytes(whole)), ONE.name) == ONE.size_bytes


def test_the_format_is_the_one_that_is_written_down():
    header = header_of(CopyVersion("key", 10, 2))

    assert len(header) == 64
    assert header[:20] == b"omnifs-copy\n\0\0\0\0\x01\0\0\0"
    assert header[24:40] == (10).to_bytes(8, "little") + (2).to_bytes(8, "little")
    assert header[40:56].hex() == CopyVersion("key", 10, 2).name


def test_one_copy_is_compared_at_a_time(directory):
    with a_cache(directory) as cache:
        one, two = cache.open(ONE), cache.open(TWO)

        assert one.comparing.acquire(blocking=False)
        assert not two.comparing.acquire(blocking=False)
        one.comparing.release()
        assert two.comparing.acquire(blocking=False)


def test_a_copy_that_cannot_be_removed_fails_no_read(directory, monkeypatch, caplog):
    unlink = Path.unlink

    def fails(path, **named):
        if path.parent.name == "leaving":
            raise PermissionError(1, "no")
        unlink(path, **named)

    caplog.set_level("INFO")
    with a_cache(directory, capacity=ROOM_FOR_ONE) as cache:
        fill(cache.open(ONE), ONE)
        monkeypatch.setattr(Path, "unlink", fails)

        assert fill(cache.open(TWO), TWO) == [0, 1, 2, 3]

    assert "stays until the next start" in caplog.text


def test_a_map_that_the_disk_does_not_give_costs_the_copy_and_not_the_open(directory, monkeypatch):
    with a_cache(directory) as cache:
        copy = cache.open(ONE)
        fill(copy, ONE)
        copy.close()

        def fails(*_):
            raise OSError(5, "Input/output error")

        monkeypatch.setattr(os, "pread", fails)
        copy = cache.open(ONE)

        assert not any(copy.has(unit) for unit in range(4))


def test_what_is_no_folder_of_copies_is_left_alone(directory):
    with a_cache(directory) as cache:
        fill(cache.open(ONE), ONE)
    stray = directory / "copies" / ".nfs0001"
    stray.touch()

    with a_cache(directory) as cache:
        assert cache.open(ONE).is_whole

    assert stray.exists()


def test_a_directory_that_cannot_be_read_is_let_go_and_said(directory, monkeypatch):
    with a_cache(directory) as cache:
        fill(cache.open(ONE), ONE)

    def fails(_):
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patched:
        patched.setattr("os.scandir", fails)
        with pytest.raises(
            ConfigError, match=r"cannot be read: .*Input/output error; give another"
        ):
            DiskCache(str(directory), 1 << 20)

    with a_cache(directory) as cache:
        assert cache.open(ONE).is_whole

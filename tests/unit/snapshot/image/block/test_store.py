"""Blocks on disk: kept, dropped, shared, and never wrong."""

import errno
import fcntl
import logging
import os
from pathlib import Path

import pytest

from omniload.base.errors import ConfigError, StateError
from snapshot.image.block.store import BlockStore
from snapshot.oci.digest import digest_of


def data_of(number, size=100):
    return bytes([number]) * size


def keep(store, number, size=100):
    data = data_of(number, size)
    return digest_of(data) in store.put_all({digest_of(data): data})


def held(store, numbers, size=100):
    return [n for n in numbers if store.has(digest_of(data_of(n, size)))]


@pytest.fixture
def store(tmp_path):
    return BlockStore(tmp_path / "blocks", 1000)


def path_of(tmp_path, data):
    value = digest_of(data)[7:]
    return tmp_path / "blocks" / value[:2] / value


def test_a_block_reads_back_and_one_that_was_never_put_is_a_miss(store):
    assert keep(store, 1)

    assert store.get(digest_of(data_of(1))) == data_of(1)
    assert store.get(digest_of(b"never")) is None
    assert store.used_bytes == 100


def test_a_block_is_kept_once_however_often_it_is_put(store, tmp_path):
    assert keep(store, 1)
    assert keep(BlockStore(tmp_path / "blocks", 1000), 1)

    assert store.used_bytes == 100


def test_the_cap_is_never_passed_and_what_was_used_last_stays(store, tmp_path):
    for number in range(10):
        keep(store, number)
        os.utime(path_of(tmp_path, data_of(number)), (number, number))
    store.get(digest_of(data_of(0)))

    assert keep(store, 10)

    assert store.used_bytes <= 1000
    assert held(store, range(11)) == [0, 3, 4, 5, 6, 7, 8, 9, 10]


def test_a_block_larger_than_the_cap_is_not_kept_and_drops_nothing(store):
    keep(store, 1)

    assert not keep(store, 2, size=1001)
    assert held(store, [1]) == [1]


@pytest.mark.parametrize("damage", [b"", data_of(1)[:50], b"x" * 100])
def test_a_block_that_was_torn_or_altered_is_a_miss_and_is_removed(store, tmp_path, damage, caplog):
    keep(store, 1)
    path_of(tmp_path, data_of(1)).write_bytes(damage)

    with caplog.at_level(logging.WARNING, "omniload"):
        assert store.get(digest_of(data_of(1))) is None

    assert "it is removed and fetched again" in caplog.text
    assert not path_of(tmp_path, data_of(1)).exists()
    assert keep(store, 1)
    assert store.get(digest_of(data_of(1))) == data_of(1)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EIO])
def test_a_full_disk_keeps_nothing_says_so_once_and_goes_on(store, monkeypatch, caplog, code):
    keep(store, 1)

    def full(self, *_args, **_kwargs):
        raise OSError(code, os.strerror(code))

    with monkeypatch.context() as patched, caplog.at_level(logging.WARNING, "omniload"):
        patched.setattr(Path, "replace", full)
        assert not keep(store, 2)
        assert not keep(store, 3)

    assert caplog.text.count("keeps nothing for now") == 1
    assert store.get(digest_of(data_of(1))) == data_of(1)
    assert store.used_bytes == 100
    assert keep(store, 2)


def test_where_locks_are_refused_nothing_is_kept_and_the_start_goes_on(store, monkeypatch, caplog):
    def flock(*_):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", flock)
    with caplog.at_level(logging.WARNING, "omniload"):
        assert not keep(store, 1)

    assert "its file system gives no locks" in caplog.text


def test_what_a_crash_left_half_written_goes_at_the_next_start(store, tmp_path):
    (tmp_path / "blocks/new/half").write_bytes(b"half")

    BlockStore(tmp_path / "blocks", 1000)

    assert list((tmp_path / "blocks/new").iterdir()) == []


@pytest.mark.parametrize("counter", [b"", b"garbage", b"%020d" % 999, b"%020d" % 10**15])
def test_a_counter_that_a_crash_left_wrong_is_put_right(store, tmp_path, counter):
    for number in range(5):
        keep(store, number)
    (tmp_path / "blocks/lock").write_bytes(counter)

    assert keep(store, 5)
    assert held(store, range(6)) == [0, 1, 2, 3, 4, 5]
    assert keep(store, 6)


def test_another_folder_or_version_is_refused(tmp_path, store):
    (tmp_path / "other").mkdir()
    (tmp_path / "other/file").write_text("mine")
    with pytest.raises(ConfigError, match="is no block store"):
        BlockStore(tmp_path / "other", 1000)

    (tmp_path / "blocks/version").write_text("omniload block store 2\n")
    with pytest.raises(StateError, match="store 2"):
        BlockStore(tmp_path / "blocks", 1000)


def test_a_digest_cannot_leave_the_folder(store):
    with pytest.raises(ValueError, match="digest"):
        store.get("sha256:../../../../etc/passwd")


@pytest.mark.parametrize("text", [b"9" * 32, b"9" * 20 + b"x", b"12", b"\xd9\xa1" * 10, b" " * 20])
def test_a_counter_that_was_not_written_so_is_counted_anew(tmp_path, store, text):
    assert keep(store, 1)
    (tmp_path / "blocks" / "lock").write_bytes(text)

    assert keep(store, 2)

    assert held(store, [1, 2]) == [1, 2]
    assert (tmp_path / "blocks" / "lock").read_bytes() == b"%020d" % 200

"""A cache of shards: its answers, its copies, and the space that it makes for others."""

import fcntl
import io
import logging
import os
import shutil

import fsspec
import numpy as np
import pytest

from fusefs.cache.disk_format import CopyVersion
from omniload.base.clock import FakeClock
from omniload.base.errors import IntegrityError
from omniload.mix.runtime import ShardCacheConfig
from omniload.source.files import local_file, remote_file
from omniload.source.stores import accounts
from omniload.source.stores.blocks import BLOCK_BYTES
from omniload.source.stores.shard_cache import open_shard_cache, shard_cache_of
from omniload.source.stores.shared_directory import SharedDirectory
from tests.support.plane.sources.shard_caches import (
    CountingStore,
    Shards,
    a_cache,
    an_hour_later,
    taken_bytes,
)

B = BLOCK_BYTES
DATA = np.random.default_rng(1).integers(0, 256, 5 * B + 100, dtype=np.uint8).tobytes()
OTHER = DATA[::-1]


@pytest.fixture
def shards():
    shards = Shards()
    shards.put("a", DATA)
    return shards


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "cache"


def whole(file):
    return file.read_range(0, file.size_bytes)


def test_what_was_read_is_not_asked_of_the_store_again_by_another_process(shards, folder):
    cache = a_cache(folder)
    assert whole(shards.through(cache, "a")) == DATA
    assert shards.store.given_bytes() == len(DATA) == cache.traffic.store_bytes
    shards.store.gave.clear()

    later = a_cache(folder)
    file = shards.through(later, "a")

    assert whole(file) == DATA
    assert file.read_ranges([(0, 7), (B - 1, B + 1), (9 * B, 10 * B)]) == [
        DATA[:7],
        DATA[B - 1 : B + 1],
        b"",
    ]
    assert not shards.store.gave
    assert later.figures()["shard_store_bytes_total"] == 0
    assert later.figures()["shard_disk_bytes_total"] > len(DATA)


def test_whole_blocks_are_asked_for_and_those_side_by_side_in_one_request(shards, folder):
    file = shards.through(a_cache(folder), "a")

    file.read_ranges([(B + 5, B + 6), (3 * B + 1, 4 * B + 1)])

    assert [(start, stop) for _, start, stop in shards.store.gave] == [(B, 2 * B), (3 * B, 5 * B)]


def test_a_file_is_read_on_from_copy_and_store_alike(shards, folder):
    shards.through(a_cache(folder), "a").read_range(2 * B, 3 * B)

    with shards.through(a_cache(folder), "a").open() as file:
        assert file.size() == len(DATA)
        file.seek(2 * B - 3)
        assert file.read(10) == DATA[2 * B - 3 : 2 * B + 7]
        assert file.read(B) == DATA[2 * B + 7 : 3 * B + 7]
        file.seek(-5, io.SEEK_END)
        assert file.read(100) == DATA[-5:]
        assert file.read(1) == b""
        file.seek(0)
        assert file.read() == DATA


def test_a_shard_that_was_written_anew_is_not_answered_from_the_old_copy(shards, folder):
    whole(shards.through(a_cache(folder), "a"))
    shards.put("a", OTHER)

    assert whole(shards.through(a_cache(folder), "a")) == OTHER


def test_bytes_of_a_shard_that_changes_while_it_is_read_are_not_kept_under_its_old_name(
    shards, folder
):
    path = shards.put("a", DATA, tag="first")
    file = shards.through(a_cache(folder), "a")
    shards.put("a", OTHER, tag="second")
    with pytest.raises(IntegrityError, match="changed since the source was opened"):
        whole(file)
    shards.put("a", DATA, tag="first")  # put back, as it was
    assert path == file.path

    assert whole(shards.through(a_cache(folder), "a")) == DATA


class ListingStore(CountingStore):
    """A store whose client answers from its first listing, as that of S3 does."""

    protocol = "listing"

    def info(self, path, **kwargs):
        if not self.storage_options.get("use_listings_cache", True):
            return super().info(path, **kwargs)
        if path not in self.dircache:
            self.dircache[path] = super().info(path, **kwargs)
        return self.dircache[path]


@pytest.mark.parametrize("limit", [64 << 20, 2 * B + (B >> 1)], ids=["room", "full"])
def test_two_versions_of_a_shard_are_not_read_as_one_where_a_client_keeps_its_listing(
    folder, limit
):
    shards = Shards()
    shards.store = ListingStore(skip_instance_cache=True)
    shards.store.gave, shards.store.dircache = [], {}
    shards.put("a", DATA, tag='"first"')
    cache = a_cache(folder, limit=limit)
    file = shards.through(cache, "a")
    assert file.read_range(0, 3 * B) == DATA[: 3 * B]
    assert file.read_range(2 * B, 3 * B) == DATA[2 * B : 3 * B]
    assert cache.is_open() == (limit > 3 * B)
    shards.put("a", OTHER, tag='"second"')
    file.require_unchanged()  # as the client has it

    with pytest.raises(IntegrityError, match="changed since the source was opened"):
        file.read_range(2 * B, 4 * B)
    with file.open() as opened:
        opened.seek(3 * B)
        with pytest.raises(IntegrityError, match="changed since"):
            opened.read(B)


def test_what_a_store_does_not_vouch_for_is_not_kept_and_said_once(shards, folder, caplog):
    file = shards.through(a_cache(folder), "a")
    shards.store.info = lambda path, **_: (_ for _ in ()).throw(PermissionError(13, "no HEAD"))

    assert whole(file) == whole(file) == DATA

    assert taken_bytes(folder) == 0
    assert caplog.text.count("is not kept: its store does not say what it is now") == 1
    assert "no HEAD" in caplog.text


def test_a_tag_with_and_without_its_quotes_is_one_version(shards, folder):
    shards.put("a", DATA, tag='"first"')
    file = shards.through(a_cache(folder), "a")
    shards.put("a", DATA, tag="first")

    assert whole(file) == DATA


def test_one_path_in_two_stores_is_two_shards(folder):
    one, two = Shards(), Shards()
    two.folder = one.folder
    one.put("a", DATA, tag="x")
    cache = a_cache(folder)
    first = cache.shard(one.store, "a", 5, "x", "x")
    other = type(one.store)(endpoint="elsewhere", skip_instance_cache=True)
    secret = type(one.store)(secret="s", token="t", skip_instance_cache=True)

    assert cache.shard(other, "a", 5, "x", "x").version != first.version
    assert cache.shard(secret, "a", 5, "x", "x").version == first.version  # keys may change


def test_files_of_this_machine_and_versions_that_cannot_be_told_apart_are_read_as_they_are(
    tmp_path, folder
):
    (tmp_path / "a").write_bytes(DATA)
    store = fsspec.filesystem("memory")
    store.pipe("/fresh", DATA)
    cache = a_cache(folder)

    local, fresh = cache.through([local_file(str(tmp_path / "a")), remote_file(store, "/fresh")])

    assert local.kept is None
    assert fresh.kept is None  # bears a time alone, of this very second
    assert whole(local) == whole(fresh) == DATA
    later = a_cache(folder, wall_s=an_hour_later)
    (old,) = later.through([remote_file(store, "/fresh")])
    assert old.kept is not None
    assert whole(old) == DATA


def damaged(file, at):
    held = bytearray(file.read_bytes())
    held[at] ^= 1
    file.write_bytes(held)


@pytest.mark.parametrize("suffix", ["data", "map"])
def test_a_block_that_is_damaged_is_read_anew_and_mended(shards, folder, suffix, caplog):
    whole(shards.through(a_cache(folder), "a"))
    (file,) = folder.glob(f"copies/*/*.{suffix}")
    damaged(file, 70)
    shards.store.gave.clear()

    assert whole(shards.through(a_cache(folder), "a")) == DATA

    assert shards.store.gave == [(f"{shards.folder}/a", 0, B)]
    assert "damaged" in caplog.text
    shards.store.gave.clear()
    assert whole(shards.through(a_cache(folder), "a")) == DATA
    assert not shards.store.gave


@pytest.mark.parametrize("damage", ["header", "longer", "shorter", "data shorter", "data gone"])
def test_a_copy_that_is_no_copy_any_more_is_made_anew(shards, folder, damage):
    cache = a_cache(folder)
    whole(shards.through(cache, "a"))
    (table,) = folder.glob("copies/*/*.map")
    data = table.with_suffix(".data")
    if damage == "header":
        damaged(table, 30)
    elif damage == "data gone":
        data.unlink()
    else:
        file = data if "data" in damage else table
        os.truncate(file, file.stat().st_size + (8 if damage == "longer" else -8))
    shards.store.gave.clear()

    assert whole(shards.through(cache, "a")) == DATA
    assert shards.store.given_bytes() == len(DATA)
    shards.store.gave.clear()
    assert whole(shards.through(a_cache(folder), "a")) == DATA
    assert not shards.store.gave


def test_a_full_cache_serves_what_it_holds_and_asks_for_no_byte_around_the_rest(
    shards, folder, caplog
):
    limit = 3 * B + 64 * 1024
    cache = a_cache(folder, limit)
    assert whole(shards.through(cache, "a")) == DATA
    assert 2 * B < taken_bytes(folder) <= limit
    shards.store.gave.clear()
    file = shards.through(cache, "a")

    for _ in range(3):
        assert file.read_range(B + 5, 4 * B + 7) == DATA[B + 5 : 4 * B + 7]

    # The first of the three finds it full.
    assert shards.store.gave[-1] == (file.path, 3 * B, 4 * B + 7)
    assert taken_bytes(folder) <= limit
    (said,) = [line for line in caplog.messages if "is full at" in line]
    assert "raise loader.shard_cache.limit" in said


def test_a_shard_that_a_living_process_uses_makes_no_room_and_one_of_a_dead_does(shards, folder):
    limit = 7 * B
    shards.put("b", OTHER)
    first = a_cache(folder, limit)
    whole(shards.through(first, "a"))
    second = a_cache(folder, limit)
    assert whole(shards.through(second, "b")) == OTHER
    shards.store.gave.clear()
    whole(shards.through(first, "a"))
    assert not shards.store.gave, "the first process uses it"

    del first
    third = a_cache(folder, limit)
    assert whole(shards.through(third, "b")) == OTHER
    shards.store.gave.clear()
    assert whole(shards.through(third, "b")) == OTHER
    assert not shards.store.gave
    assert taken_bytes(folder) <= limit


def test_what_was_used_last_stays(shards, folder):
    limit = 13 * B
    for name, data in (("b", OTHER), ("c", OTHER)):
        shards.put(name, data)
    for at_s, name in ((100, "a"), (200, "b")):
        file = shards.through(a_cache(folder, limit), name)
        whole(file)
        (table,) = folder.glob(f"copies/*/{file.kept.version.name}.map")
        os.utime(table, (at_s, at_s))

    whole(shards.through(a_cache(folder, limit), "c"))

    shards.store.gave.clear()
    whole(shards.through(a_cache(folder, limit), "b"))
    assert not shards.store.gave
    whole(shards.through(a_cache(folder, limit), "a"))
    assert shards.store.given_bytes() == len(DATA)


def test_a_lower_limit_holds_from_the_next_opening_on(shards, folder):
    whole(shards.through(a_cache(folder), "a"))

    smaller = a_cache(folder, 2 * B)

    assert taken_bytes(folder) == smaller.directory.held_bytes() == 0
    assert whole(shards.through(smaller, "a")) == DATA
    assert 0 < taken_bytes(folder) <= 2 * B


def test_a_lower_limit_takes_no_copy_of_a_living_process(shards, folder):
    file = shards.through(a_cache(folder), "a")
    whole(file)

    smaller = a_cache(folder, 2 * B)

    shards.store.gave.clear()
    assert whole(shards.through(smaller, "a")) == whole(file) == DATA
    assert not shards.store.gave
    del file
    assert taken_bytes(folder) > 2 * B
    a_cache(folder, 2 * B)
    assert taken_bytes(folder) > 2 * B, "the second process uses it as well"
    del smaller
    a_cache(folder, 2 * B)
    assert taken_bytes(folder) == 0


@pytest.fixture
def looks(monkeypatch):
    """Note of each look at all copies of a directory whether others could take the lock meanwhile."""
    made, look = [], SharedDirectory._look

    def noted(directory):
        with (directory.root / "account").open("rb") as account:
            try:
                fcntl.flock(account, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                made.append("locked")
            else:
                made.append("free")
        return look(directory)

    monkeypatch.setattr(SharedDirectory, "_look", noted)
    return made


A_COPY = B + 2 * 4096
"""Disk space of a copy of a one-block shard."""


def filled(folder, shards, copies, more):
    """Fill a directory with copies that nothing uses; return another process's view of it."""
    for number in range(copies + more):
        shards.put(str(number), bytes([number]) * B)
    first = a_cache(folder, copies * A_COPY)
    for number in range(copies):
        whole(shards.through(first, str(number)))
    assert taken_bytes(folder) == copies * A_COPY
    del first
    return a_cache(folder, copies * A_COPY)


def test_a_full_directory_is_looked_at_once_for_all_that_leave_and_without_its_lock(folder, looks):
    shards = Shards()
    cache = filled(folder, shards, 60, 57)
    looks.clear()

    for number in range(60, 117):
        whole(shards.through(cache, str(number)))

    # Three copies are 5 %: room was made nineteen times from the findings of one look.
    assert looks == ["free"]
    assert taken_bytes(folder) == cache.directory.held_bytes() == 60 * A_COPY


def test_a_copy_that_is_used_after_the_look_does_not_leave_by_what_it_found(folder, looks):
    shards = Shards()
    cache = filled(folder, shards, 60, 9)
    whole(shards.through(cache, "60"))
    assert looks[-1] == "free"
    names = {
        n: shards.through(a_cache(folder, 60 * A_COPY), str(n)).kept.version.name for n in range(9)
    }
    (table,) = folder.glob(f"copies/*/{names[4]}.map")
    os.utime(table)
    looks.clear()

    for number in range(61, 65):
        whole(shards.through(cache, str(number)))

    left = {path.stem for path in folder.glob("copies/*/*.map")}
    assert [n for n in range(9) if names[n] in left] == [4, 7, 8]
    assert not looks


def test_an_account_that_says_too_much_is_put_right_by_the_next_look(folder, looks):
    shards = Shards()
    cache = filled(folder, shards, 20, 1)
    with (folder / "account").open("r+b") as account:
        # As left by a process that was killed after its reservation and before the use of all of it.
        accounts.note(account.fileno(), 31 * A_COPY)

    whole(shards.through(cache, "20"))

    assert looks[-1] == "free"
    assert cache.directory.held_bytes() == taken_bytes(folder) <= 20 * A_COPY


def test_an_account_that_is_counted_anew_during_a_look_is_not_lowered_by_it(folder, monkeypatch):
    shards = Shards()
    cache = filled(folder, shards, 20, 1)
    with (folder / "account").open("r+b") as account:
        accounts.note(account.fileno(), 31 * A_COPY)
    look = SharedDirectory._look

    def meanwhile(directory):
        monkeypatch.setattr(SharedDirectory, "_look", look)
        found = list(look(directory))
        # Another process finds it of another machine, and counts.
        (folder / "account").write_bytes(b"nonsense")
        a_cache(folder, 20 * A_COPY)
        return found

    monkeypatch.setattr(SharedDirectory, "_look", meanwhile)
    whole(shards.through(cache, "20"))

    assert cache.directory.held_bytes() == taken_bytes(folder) <= 20 * A_COPY


def test_nobody_waits_for_a_look_that_another_process_takes(folder, looks):
    shards = Shards()
    cache = filled(folder, shards, 20, 1)
    looks.clear()
    with (folder / "order").open("wb") as order:
        fcntl.flock(order, fcntl.LOCK_EX)
        assert whole(shards.through(cache, "20")) == bytes([20]) * B

    assert not looks
    assert taken_bytes(folder) == cache.directory.held_bytes() == 20 * A_COPY


def test_an_account_is_believed_until_the_machine_starts_anew_or_it_lies_elsewhere(
    shards, folder, looks, monkeypatch, tmp_path
):
    whole(shards.through(a_cache(folder), "a"))
    said = (folder / "account").read_bytes()
    looks.clear()
    a_cache(folder)
    assert not looks

    # After a power cut, the account may be too low.
    (folder / "account").write_bytes(bytes(8) + b"\xff" * 8 + said[16:])
    (tmp_path / "boot").write_text("another")
    monkeypatch.setattr("omniload.source.stores.accounts._BOOT", tmp_path / "boot")
    assert a_cache(folder).directory.held_bytes() == taken_bytes(folder) > 0
    looks.clear()
    a_cache(folder)
    assert not looks

    shutil.copytree(folder, tmp_path / "copied")
    a_cache(tmp_path / "copied")
    assert looks
    monkeypatch.setattr("omniload.source.stores.accounts._BOOT", tmp_path / "none")
    looks.clear()
    a_cache(folder)
    assert looks, "where nothing tells, it is counted"


def test_a_directory_that_could_not_be_prepared_is_asked_again_after_a_minute(
    shards, folder, caplog
):
    clock = FakeClock()
    a_cache(folder)
    with (folder / "account").open("rb") as stopped:
        fcntl.flock(stopped, fcntl.LOCK_EX)
        cache = a_cache(folder, clock=clock)
        file = shards.through(cache, "a")
        waited_s = sum(clock.slept_s)
        assert whole(file) == DATA
        assert sum(clock.slept_s) == waited_s, "nobody waits for it again and again"
    assert whole(file) == DATA
    assert taken_bytes(folder) == 0, "a minute is not over"
    assert "locked by another process" in caplog.text

    clock.advance(61)
    assert whole(file) == DATA
    shards.store.gave.clear()
    assert whole(file) == DATA
    assert not shards.store.gave
    # The use is reported then.
    shards.put("b", OTHER)
    other = a_cache(folder, 7 * B)
    whole(shards.through(other, "b"))
    assert whole(file) == DATA
    assert all(path.endswith("b") for path, *_ in shards.store.gave)


def test_a_folder_that_is_emptied_is_prepared_after_a_minute(shards, folder):
    clock = FakeClock()
    folder.mkdir(mode=0o700)
    (folder / "thesis.tex").write_text("years of work")
    file = shards.through(a_cache(folder, clock=clock), "a")
    assert whole(file) == DATA
    (folder / "thesis.tex").unlink()
    whole(file)
    assert not list(folder.iterdir())

    clock.advance(61)
    whole(file)
    assert taken_bytes(folder) > len(DATA)


def require_stays(shards, folder, file):
    """Require that a copy leaves for no other: another process with room for one comes."""
    shards.put("other", OTHER)
    whole(shards.through(a_cache(folder, 7 * B), "other"))
    shards.store.gave.clear()
    assert whole(file) == DATA
    assert not shards.store.gave


def test_what_was_in_use_while_the_lock_was_held_is_said_later(shards, folder):
    whole(shards.through(a_cache(folder), "a"))
    clock = FakeClock()
    cache = a_cache(folder, clock=clock)
    with (folder / "account").open("rb") as stopped:
        fcntl.flock(stopped, fcntl.LOCK_EX)
        file = shards.through(cache, "a")

    clock.advance(61)
    whole(file)
    require_stays(shards, folder, file)


def test_what_is_in_use_is_said_once_and_behind_what_a_full_disk_cut_short(shards, folder):
    shards.put("b", OTHER)
    cache = a_cache(folder)
    whole(shards.through(cache, "b"))
    (user,) = (folder / "users").iterdir()
    with user.open("ab") as torn:
        torn.write(b"12345")

    for _ in range(2):
        file = shards.through(cache, "a")
        whole(file)

    assert user.stat().st_size == 32
    require_stays(shards, folder, file)


def test_what_is_in_use_is_said_anew_in_a_directory_that_was_made_anew(shards, folder):
    clock = FakeClock()
    cache = a_cache(folder, clock=clock)
    file = shards.through(cache, "a")
    whole(file)
    shutil.rmtree(folder)
    a_cache(folder)

    whole(file)
    require_stays(shards, folder, file)


def test_the_cap_holds_on_a_disk_that_gives_no_room_ahead(folder, monkeypatch):
    monkeypatch.setattr("os.posix_fallocate", lambda *_: None)
    limit, shards = 7 * B, Shards()
    one, other = a_cache(folder, limit), a_cache(folder, limit)
    version = CopyVersion("taken", 3 * B, 3)
    one.directory.use([version.name])
    files, fitting = one.directory.take_up(version, [0, 1, 2])  # and not written yet
    (folder / "account").write_bytes(b"")
    for number in range(8):
        shards.put(str(number), DATA)
        assert whole(shards.through(other, str(number))) == DATA
    for block in fitting:
        files.write(block * B, DATA[:B])
        files.mark(block, 5)
    files.release()

    assert len(fitting) == 3
    assert 3 * B < taken_bytes(folder) <= other.directory.held_bytes() <= limit


def test_what_a_disk_gave_before_it_refused_is_counted(shards, folder, monkeypatch):
    cache, take = a_cache(folder), os.posix_fallocate

    def half(descriptor, start, size):
        take(descriptor, start, size // 2)
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patched:
        patched.setattr("os.posix_fallocate", half)
        assert whole(shards.through(cache, "a")) == DATA

    assert cache.directory.held_bytes() == taken_bytes(folder) > 2 * B
    (folder / "account").unlink()
    assert a_cache(folder).directory.held_bytes() == taken_bytes(folder), "nothing is claimed"


@pytest.mark.parametrize(
    "call", ["posix_fallocate", "ftruncate"]
)  # for a file that grows, and for one that is made
def test_what_nobody_uses_gives_way_on_a_disk_that_others_have_filled(
    shards, folder, monkeypatch, call
):
    shards.put("b", OTHER)
    whole(shards.through(a_cache(folder), "b"))
    living = shards.through(a_cache(folder), "a")
    whole(living)
    held, clock = taken_bytes(folder), FakeClock()
    cache = a_cache(folder, clock=clock)
    shards.put("c", DATA)

    def full(*_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(f"os.{call}", full)
        assert whole(shards.through(cache, "c")) == DATA

    assert held / 2 <= taken_bytes(folder) == cache.directory.held_bytes() < held / 2 + 3 * 8192
    clock.advance(61)
    assert whole(shards.through(cache, "c")) == DATA
    shards.store.gave.clear()
    assert whole(shards.through(cache, "c")) == whole(living) == DATA
    assert not shards.store.gave


def test_an_account_that_says_nonsense_is_counted_anew(shards, folder):
    whole(shards.through(a_cache(folder), "a"))
    for nonsense in (b"", b"x" * 16, (1 << 60).to_bytes(8, "little") + b"\0" * 8):
        (folder / "account").write_bytes(nonsense)
        cache = a_cache(folder)
        (folder / "account").write_bytes(nonsense)
        shards.put("b", OTHER)
        whole(shards.through(cache, "b"))
        assert cache.directory.held_bytes() == taken_bytes(folder) > 0


def test_a_lock_that_another_process_keeps_costs_a_copy_and_not_the_read(shards, folder, caplog):
    clock = FakeClock()
    cache = a_cache(folder, clock=clock)
    file = shards.through(cache, "a")
    with (folder / "account").open("rb") as stopped:
        fcntl.flock(stopped, fcntl.LOCK_EX)
        assert whole(file) == DATA
    assert sum(clock.slept_s) >= 2
    assert "locked by another process" in caplog.text

    clock.advance(61)
    whole(file)
    shards.store.gave.clear()
    assert whole(file) == DATA
    assert not shards.store.gave


def test_a_disk_that_is_full_or_gone_costs_a_line_and_is_asked_again(
    shards, folder, caplog, monkeypatch
):
    clock = FakeClock()
    cache = a_cache(folder, clock=clock)
    file = shards.through(cache, "a")

    def full(*_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr("os.posix_fallocate", full)
        for _ in range(3):
            assert whole(file) == DATA
    assert caplog.text.count("No space left") == 1
    assert f"{folder}: No space left on device, " in caplog.text
    assert "are free there; make room, or lower loader.shard_cache.limit" in caplog.text

    clock.advance(61)
    whole(file)
    shutil.rmtree(folder)
    for _ in range(3):
        assert whole(file) == DATA
    assert not folder.exists(), "what was unmounted is not made below its mount point"


@pytest.mark.parametrize("what", ["something else", "a file", "others may write", "version"])
def test_a_directory_that_is_not_ours_is_left_alone_and_costs_a_line(shards, folder, what, caplog):
    folder.mkdir(mode=0o700)
    if what == "something else":
        (folder / "thesis.tex").write_text("years of work")
    elif what == "a file":
        folder.rmdir()
        folder.write_text("a file")
    elif what == "others may write":
        folder.chmod(0o777)
    else:
        (folder / "omniload-shard-cache.json").write_text('{"omniload_shard_cache":2}\n')
    before = sorted(folder.rglob("*"))

    file = shards.through(a_cache(folder), "a")

    assert whole(file) == whole(file) == DATA
    assert shards.store.given_bytes() == 2 * len(DATA), "nor is it read from"
    assert sorted(folder.rglob("*")) == before
    assert caplog.text.count("reads continue from the store") == 1


def test_copies_that_another_user_could_have_written_are_not_read(shards, folder):
    whole(shards.through(a_cache(folder), "a"))
    folder.chmod(0o770)
    shards.store.gave.clear()

    assert whole(shards.through(a_cache(folder), "a")) == DATA
    assert shards.store.given_bytes() == len(DATA)


def test_what_a_mix_names_is_opened_beside_it_and_looked_at_without_being_made(tmp_path, caplog):
    config = ShardCacheConfig(path="near", limit="1MiB")
    assert shard_cache_of(None, tmp_path) is None is open_shard_cache(None, tmp_path)

    assert shard_cache_of(config, tmp_path).directory.held_bytes() == 0
    assert not (tmp_path / "near").exists()

    with caplog.at_level(logging.WARNING):
        open_shard_cache(config, tmp_path)
    assert (tmp_path / "near").stat().st_mode & 0o777 == 0o700
    assert not caplog.messages


def test_a_directory_of_users_is_cleared_of_the_dead(folder):
    first = a_cache(folder)
    del first
    living = a_cache(folder)
    assert len(list((folder / "users").iterdir())) == 1
    later = a_cache(folder)
    assert len(list((folder / "users").iterdir())) == 2, "the living, and whoever came"
    del later

    # A process that needs space looks for living processes.
    living.directory.limit_bytes = B
    living.directory.take_up(CopyVersion("a", 2 * B, 2), [0, 1])

    assert len(list((folder / "users").iterdir())) == 1


def test_a_store_is_a_place_of_its_own_and_no_folder_of_the_node():
    with pytest.raises(ValueError, match="found 's3://b/x', a store; shards are kept on a disk"):
        ShardCacheConfig(path="s3://b/x", limit="1GB")


def test_a_directory_whose_maker_was_killed_or_lost_its_power_is_taken_up(shards, folder):
    folder.mkdir(mode=0o700)
    (folder / ".omniload-shard-cache.json.0f").write_bytes(b"{")
    whole(shards.through(a_cache(folder), "a"))
    (folder / "omniload-shard-cache.json").write_bytes(b"")
    shards.store.gave.clear()

    assert whole(shards.through(a_cache(folder), "a")) == DATA

    assert not shards.store.gave
    assert (folder / "omniload-shard-cache.json").stat().st_size


def test_a_folder_of_another_with_names_like_those_of_a_cache_is_left_alone(shards, folder):
    (folder / "users").mkdir(mode=0o700, parents=True)
    folder.chmod(0o700)
    (folder / "users" / "alice.json").write_text("x")

    assert whole(shards.through(a_cache(folder, limit=B), "a")) == DATA

    assert [path.name for path in folder.rglob("*")] == ["users", "alice.json"]


def test_a_file_among_users_that_is_none_stays(shards, folder):
    cache = a_cache(folder, limit=B)
    (folder / "users" / "alice.json").write_text("x")

    whole(shards.through(cache, "a"))

    assert (folder / "users" / "alice.json").exists()

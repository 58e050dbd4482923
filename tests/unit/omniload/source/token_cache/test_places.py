"""Who may read entries of a folder, which entries are read, and the limit of the folder."""

import os
import stat
import time

import pytest
from pydantic import ValidationError

from omniload.base.errors import IntegrityError
from omniload.mix.runtime import TokenCacheConfig
from omniload.source.token_cache.places import LocalPlace, StorePlace

MIB = 1 << 20
FOLDER, OLD, NEW = (f"{letter * 32}.plain" for letter in "abc")


def mode_of(path):
    return stat.S_IMODE(path.stat().st_mode)


@pytest.fixture
def umask():
    """Let others read a user's files, and the group write them."""
    before = os.umask(0o002)
    yield
    os.umask(before)


@pytest.mark.usefixtures("umask")
def test_entries_without_a_key_are_for_their_owner_alone(tmp_path):
    LocalPlace(tmp_path / "cache").write("folder/unit", b"tokens")

    assert mode_of(tmp_path / "cache/folder/unit") == 0o600
    assert mode_of(tmp_path / "cache/folder") == 0o700


@pytest.mark.usefixtures("umask")
def test_entries_with_a_key_are_shared_as_the_umask_says_and_written_by_nobody_else(tmp_path):
    LocalPlace(tmp_path, shared=True).write("folder/unit", b"tokens")

    assert mode_of(tmp_path / "folder/unit") == 0o644


def test_an_entry_that_others_may_write_is_not_believed(tmp_path):
    place = LocalPlace(tmp_path)
    place.write("folder/unit", b"tokens")
    (tmp_path / "folder/unit").chmod(0o620)

    with pytest.raises(IntegrityError, match="another user could"):
        place.read("folder/unit")


@pytest.mark.parametrize("shared", [False, True])
def test_in_a_folder_that_others_may_write_entries_are_named_that_may_be_believed(tmp_path, shared):
    place = LocalPlace(tmp_path, shared=shared)
    for name in ("ours", "of_somebody"):
        place.write(f"folder/{name}", b"tokens")
    (tmp_path / "folder/of_somebody").chmod(0o620)
    (tmp_path / "folder").chmod(0o770)

    assert place.names("folder") == {"ours", *(["of_somebody"] if shared else [])}


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_an_entry_of_another_user_is_believed_with_a_key_alone(tmp_path):
    place = LocalPlace(tmp_path)
    place.write("folder/unit", b"tokens")
    os.chown(tmp_path / "folder/unit", 12345, -1)

    with pytest.raises(IntegrityError, match="belongs to user 12345"):
        place.read("folder/unit")
    assert LocalPlace(tmp_path, shared=True).read("folder/unit") == b"tokens"


def test_a_link_in_place_of_an_entry_is_not_followed(tmp_path):
    (tmp_path / "elsewhere").write_bytes(b"tokens")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder/unit").symlink_to(tmp_path / "elsewhere")

    with pytest.raises(OSError, match="symbolic link"):
        LocalPlace(tmp_path).read("folder/unit")


def test_a_pipe_in_place_of_an_entry_is_not_waited_for(tmp_path):
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "folder/unit")

    with pytest.raises(IntegrityError, match="no file"):
        LocalPlace(tmp_path).read("folder/unit")


def test_a_full_folder_takes_no_more_and_gives_what_it_has(tmp_path):
    place = LocalPlace(tmp_path, limit_bytes=MIB)

    taken = [place.write(f"{FOLDER}/{i}", bytes(MIB // 4)) for i in range(8)]

    assert taken == [True] * 4 + [False] * 4
    assert place.read(f"{FOLDER}/0") == bytes(MIB // 4)


def test_a_folder_that_nobody_used_for_a_day_makes_room(tmp_path):
    LocalPlace(tmp_path).write(f"{OLD}/unit", bytes(MIB))
    LocalPlace(tmp_path).write(f"{FOLDER}/unit", bytes(MIB))
    days_ago = time.time() - 3 * 86_400
    os.utime(tmp_path / OLD, (days_ago, days_ago))

    assert LocalPlace(tmp_path, limit_bytes=2 * MIB).write(f"{NEW}/unit", bytes(MIB))

    assert not (tmp_path / OLD).exists()
    assert (tmp_path / f"{FOLDER}/unit").exists()


def test_what_somebody_else_keeps_there_is_neither_removed_nor_counted(tmp_path):
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos/cat.png").write_bytes(bytes(2 * MIB))
    (tmp_path / "photos/.hidden").touch()
    (tmp_path / f"{OLD}.bak").mkdir()
    long_ago = time.time() - 30 * 86_400
    for path in (*tmp_path.glob("*/.hidden"), *tmp_path.glob("*")):
        os.utime(path, (long_ago, long_ago))

    assert LocalPlace(tmp_path, limit_bytes=MIB).write(f"{NEW}/unit", bytes(MIB))

    assert sorted(p.name for p in (tmp_path / "photos").iterdir()) == [".hidden", "cat.png"]
    assert (tmp_path / f"{OLD}.bak").exists()


def test_what_a_killed_writer_left_goes_after_an_hour(tmp_path):
    (tmp_path / FOLDER).mkdir()
    for name, age_s in ((".unit.old", 7200), (".unit.new", 60)):
        (tmp_path / FOLDER / name).write_bytes(b"half")
        os.utime(tmp_path / FOLDER / name, (time.time() - age_s,) * 2)

    LocalPlace(tmp_path, limit_bytes=MIB).write(f"{FOLDER}/unit", b"tokens")

    assert sorted(p.name for p in (tmp_path / FOLDER).iterdir()) == [".unit.new", "unit"]
    assert LocalPlace(tmp_path).names(FOLDER) == {"unit"}


def test_a_store_holds_entries_as_a_folder_does(tmp_path):
    place = StorePlace(f"fsspec+memory://{tmp_path.name}")

    assert place.read("folder/unit") is None
    assert place.names("folder") == set()
    place.write("folder/unit", b"tokens")

    assert place.read("folder/unit") == b"tokens"
    assert place.names("folder") == {"unit"}


def test_a_limit_of_a_store_is_refused_as_nothing_would_keep_it():
    with pytest.raises(ValidationError, match="leave limit out"):
        TokenCacheConfig(path="s3://bucket/tokens", limit="1GiB")

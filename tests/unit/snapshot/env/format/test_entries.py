"""What differs between two scans, and what a scan sees."""

import os
import socket

import pytest

from omniload.base.errors import ConfigError
from snapshot.env.format.entries import Kind, Seen, Target, difference, parents_of
from snapshot.env.target.environment import scan, targets_of


def seen(kind=Kind.FILE, **changes):
    fields = {"mode": 0o644, "size_bytes": 1, "mtime_ns": 1, "inode": 1, "ctime_ns": 1}
    return Seen(kind, **{**fields, **changes})


FOLDER = seen(Kind.DIRECTORY, mode=0o755, size_bytes=0)


def test_nothing_differs_between_equal_scans():
    places = {(0, ""): FOLDER, (0, "a"): seen()}

    assert difference(places, dict(places)) == ((), ())


@pytest.mark.parametrize(
    "change",
    [{"mode": 0o600}, {"size_bytes": 2}, {"mtime_ns": 2}, {"inode": 2}, {"ctime_ns": 2}],
    ids=lambda change: next(iter(change)),
)
def test_whatever_an_lstat_shows_is_a_change(change):
    before = {(0, ""): FOLDER, (0, "a"): seen()}
    after = {**before, (0, "a"): seen(**change)}

    assert difference(before, after).changed == ((0, ""), (0, "a"))


def test_what_lies_above_a_change_comes_with_it():
    before = {(0, ""): FOLDER, (0, "a"): FOLDER, (0, "a/b"): FOLDER, (0, "c"): FOLDER}
    after = {**before, (0, "a/b/f"): seen()}

    assert difference(before, after).changed == ((0, ""), (0, "a"), (0, "a/b"), (0, "a/b/f"))


def test_what_lies_above_a_deletion_comes_with_it_to_hold_it():
    before = {(0, ""): FOLDER, (0, "a"): FOLDER, (0, "a/f"): seen(), (0, "c"): FOLDER}
    after = {place: each for place, each in before.items() if place != (0, "a/f")}

    assert difference(before, after) == (((0, ""), (0, "a")), ((0, "a/f"),))


def test_a_deleted_directory_is_named_once():
    before = {(0, ""): FOLDER, (0, "a"): FOLDER, (0, "a/f"): seen(), (0, "a/b"): FOLDER}

    assert difference(before, {(0, ""): FOLDER}).deleted == ((0, "a"),)


def test_a_directory_that_became_a_file_is_a_change_and_no_deletion():
    before = {(0, ""): FOLDER, (0, "a"): FOLDER, (0, "a/f"): seen()}
    after = {(0, ""): FOLDER, (0, "a"): seen()}

    assert difference(before, after) == (((0, ""), (0, "a")), ())


def test_targets_are_told_apart():
    before = {(0, ""): FOLDER, (1, ""): FOLDER, (0, "a"): seen()}
    after = {(0, ""): FOLDER, (1, ""): FOLDER, (1, "a"): seen()}

    assert difference(before, after) == (((0, ""), (1, ""), (1, "a")), ((0, "a"),))


def test_parents_lead_up_to_the_target():
    assert parents_of("a/b/c") == ["a/b", "a", ""]
    assert parents_of("a") == [""]
    assert parents_of("") == []


def test_a_scan_sees_files_directories_and_links_and_names_what_it_cannot_hold(tmp_path):
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "f").write_text("abc")
    (tmp_path / "l").symlink_to("d/f")
    os.mkfifo(tmp_path / "pipe")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(tmp_path / "s"))
    (tmp_path / ".omniload-env").mkdir()

    found = scan([Target("t", str(tmp_path))])

    assert {place: each.kind for place, each in found.items()} == {
        (0, ""): Kind.DIRECTORY,
        (0, "d"): Kind.DIRECTORY,
        (0, "d/f"): Kind.FILE,
        (0, "l"): Kind.LINK,
    }
    assert found[0, "d/f"].size_bytes == 3
    assert sorted(found.special) == [str(tmp_path / "pipe"), str(tmp_path / "s")]


def test_a_target_that_is_not_there_holds_nothing(tmp_path):
    assert scan([Target("t", str(tmp_path / "no"))]) == {}


def test_targets_are_named_by_their_place_in_the_prefix(tmp_path):
    (tmp_path / "env" / "lib").mkdir(parents=True)

    named = targets_of(
        str(tmp_path / "env"), [str(tmp_path / "env" / "lib"), str(tmp_path / "opt")]
    )

    assert named == (
        Target(str(tmp_path / "opt"), str(tmp_path / "opt")),
        Target("lib", str(tmp_path / "env" / "lib")),
    )


def test_a_target_inside_another_is_part_of_it(tmp_path):
    paths = [str(tmp_path / "lib" / "x"), str(tmp_path / "lib"), str(tmp_path / "lib")]

    assert [target.name for target in targets_of(str(tmp_path), paths)] == ["lib"]


def test_a_target_that_holds_the_prefix_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="holds the whole prefix"):
        targets_of(str(tmp_path / "env"), [str(tmp_path)])


def test_a_target_that_only_begins_like_the_prefix_is_not_above_it(tmp_path):
    assert targets_of(str(tmp_path / "env"), [str(tmp_path / "en")])[0].path.endswith("/en")

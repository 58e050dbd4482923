"""Matches of globs, and links that lead in circles."""

import glob
import os

import pytest

from omniload.base.errors import ConfigError
from omniload.base.linux import folders
from omniload.base.linux.folders import held_in, matches_of, working_folder
from omniload.front.spec import kept_in

TREE = (
    *("a.jsonl", "b.txt", ".h.jsonl", "x/a.jsonl", "x/y/a.jsonl", "x/y/z[1].jsonl"),
    *("x/.git/a.jsonl", "_tmp/a.jsonl", "new\nline/ü.jsonl"),
)
PATTERNS = (
    *(
        "*",
        "*.jsonl",
        "*/*.jsonl",
        "**",
        "**/*.jsonl",
        "**/y/*.jsonl",
        "x/**/a.*",
        "x/**/**/a.jsonl",
    ),
    *(
        "./x/*/a.jsonl",
        "x//y/?.jsonl",
        "x/../*.txt",
        "none/*.jsonl",
        "a.jsonl/*",
        ".*",
        "**/.git/*",
        "x/y/z[[]1].jsonl",
    ),
)


@pytest.fixture
def tree(tmp_path):
    for name in TREE:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("")
    return tmp_path


@pytest.mark.parametrize("pattern", PATTERNS)
def test_a_glob_matches_the_files_that_pythons_own_matches(tree, pattern):
    def files(names):
        return sorted({str(tree / name) for name in names if (tree / name).is_file()})

    matched = files(matches_of(pattern, tree))

    assert matched == files(glob.glob(pattern, root_dir=tree, recursive=True))  # noqa: PTH207
    assert matched == files(matches_of(f"{tree}/{pattern}", tree / "x"))


def test_links_in_a_circle_are_followed_once_and_told_of(tree, caplog):
    outside = tree / "_tmp"
    for at, to in (("x/self", "."), ("x/y/up", "../.."), ("x/out", outside)):
        (tree / at).symlink_to(to)

    found = matches_of("x/**/*.jsonl", tree)

    assert sorted(found) == ["x/a.jsonl", "x/out/a.jsonl", "x/y/a.jsonl", "x/y/z[1].jsonl"]
    for link in ("x/self/", "x/y/up/"):
        assert f"'{link}' leads back into a folder that it lies in" in caplog.text


@pytest.mark.parametrize("reverse", [False, True])
def test_folders_that_are_all_linked_to_each_other_are_taken_once(
    tmp_path, monkeypatch, caplog, reverse
):
    real = os.scandir
    monkeypatch.setattr(
        folders, "_inside", lambda at: sorted(real(at), key=lambda each: each.name, reverse=reverse)
    )
    names = "abcdefg"
    for name in names:
        (tmp_path / "data" / name).mkdir(parents=True)
        (tmp_path / "data" / name / "0.jsonl").write_text("")
        for other in set(names) - {name}:
            (tmp_path / "data" / name / f"to-{other}").symlink_to(tmp_path / "data" / other)
    each = [f"data/{name}/0.jsonl" for name in names]

    assert sorted(matches_of("data/**/*.jsonl", tmp_path)) == each
    assert "42 links lead to folders that are read by another name already" in caplog.text
    assert sorted(matches_of("data/*/**/*.jsonl", tmp_path)) == each
    # Nothing but links leads there: the first of them by name, whatever the order of the listing.
    assert sorted(matches_of("data/a/**/*.jsonl", tmp_path)) == [
        "data/a/0.jsonl",
        *(f"data/a/to-{other}/0.jsonl" for other in names[1:]),
    ]
    # A pattern may name such a folder itself.
    assert len(matches_of("data/*/*/*.jsonl", tmp_path)) == 42


def test_folders_without_links_are_all_taken_where_a_file_system_numbers_none(tree, monkeypatch):
    monkeypatch.setattr(folders, "_itself", lambda folder: (0, 0))

    assert sorted(matches_of("x/**/a.jsonl", tree)) == ["x/a.jsonl", "x/y/a.jsonl"]


@pytest.mark.parametrize(
    ("pattern", "found"),
    [
        ("x/*.jsonl", ["x/a.jsonl"]),
        ("x/**/a.jsonl", ["x/a.jsonl", "x/y/a.jsonl"]),
        ("x/*/a.jsonl", ["x/y/a.jsonl"]),
        ("x/l*/**/*", []),
        ("x/loop/**/*.jsonl", []),
        ("x/gone/**/*.jsonl", []),
        ("x/loo*", ["x/loop"]),
    ],
)
def test_a_link_that_leads_nowhere_or_to_itself_is_no_folder_and_stops_no_glob(
    tree, pattern, found
):
    (tree / "x/loop").symlink_to("loop")
    (tree / "x/gone").symlink_to("/nowhere/at/all")

    assert sorted(matches_of(pattern, tree)) == found


def test_where_a_link_leads_that_a_glob_does_not_match_is_not_looked_at(tree, monkeypatch):
    looked, real = [], folders._is_folder
    monkeypatch.setattr(
        folders, "_is_folder", lambda entry: looked.append(entry.name) or real(entry)
    )

    assert sorted(matches_of("[x_]*/a.jsonl", tree)) == ["_tmp/a.jsonl", "x/a.jsonl"]
    assert sorted(looked) == ["_tmp", "x"]


def test_a_folder_that_may_not_be_read_is_an_error_and_not_left_out(tree, monkeypatch):
    real = os.scandir

    def scandir(path):
        if str(path).rstrip("/").endswith("x/y"):
            raise PermissionError(13, "Permission denied", str(path))
        return real(path)

    monkeypatch.setattr(os, "scandir", scandir)

    for pattern in ("**/*.jsonl", "x/*/*.jsonl"):
        with pytest.raises(PermissionError):
            matches_of(pattern, tree)
    with pytest.raises(PermissionError):
        held_in(str(tree))
    assert sorted(matches_of("*/a.jsonl", tree)) == ["_tmp/a.jsonl", "x/a.jsonl"]  # not asked there


def test_of_a_folder_links_to_others_are_told_apart(tree):
    (tree / "x/out").symlink_to(tree / "_tmp")
    (tree / "x/y/a.link").symlink_to(tree / "a.jsonl")

    held, links = held_in(str(tree / "x"))

    assert f"{tree}/x/y/a.link" in held
    assert links == [f"{tree}/x/out"]


def test_a_process_whose_folder_was_removed_is_told_so_where_a_relative_path_is_to_start_at_it(
    tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    assert working_folder() == tmp_path
    gone = tmp_path / "scratch"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()

    with pytest.raises(ConfigError, match=rf"started in \({gone}\) is gone; .*os.chdir"):
        working_folder()
    with pytest.raises(ConfigError, match="is gone"):
        kept_in("run", {}, None)

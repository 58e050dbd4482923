"""A tree: its head, which reads back or is refused, what it lists of entries, and what it finds changed."""

import json
import os

import pytest

from omniload.base.errors import StateError
from snapshot.env.format.entries import Entry, Kind
from snapshot.env.key.keys import key_of
from snapshot.env.node.tree import TreeHead, changed_in, decode_head, encode_head, listing_of
from tests.support.snapshot.env_builders import a_file, a_folder, a_link

DOCUMENT = {"version": 1, "command": ["true"]}
HEAD = TreeHead(key_of(DOCUMENT), DOCUMENT, ["modules", "scripts"], [0, 1], 7)


def test_a_head_reads_back():
    assert decode_head(encode_head(HEAD)) == HEAD


@pytest.mark.parametrize("place", range(0, len(encode_head(HEAD)), 7))
def test_a_head_that_was_altered_is_refused(place):
    data = bytearray(encode_head(HEAD))
    data[place] ^= 1

    with pytest.raises(StateError, match="head of a tree"):
        decode_head(bytes(data))


@pytest.mark.parametrize("text", [b"", b"{}", json.dumps(HEAD._asdict()).encode(), b"\n" * 9])
def test_what_is_no_head_is_refused(text):
    with pytest.raises(StateError, match="head of a tree"):
        decode_head(text)


ENTRIES = (
    a_folder(""),
    a_file("top.py", mode=0o600, mtime_ns=7, size_bytes=9),
    a_folder("p", mode=0o700),
    a_file("p/a"),
    a_link("p/l", "a"),
    Entry(0, "p/old", Kind.DELETED),
    a_folder("p/q"),
    a_folder("", 1),
)


def test_files_and_links_are_listed_in_their_folder_and_deletions_apart():
    found = listing_of(ENTRIES)

    names = {folder.place: folder.names for folder in found.folders}
    assert names == {(0, ""): ["top.py"], (0, "p"): ["a", "l"], (0, "p/q"): [], (1, ""): []}
    assert [e.path for f in found.folders for e in f.entries] == ["top.py", "p/a", "p/l"]
    assert found.deleted == [(0, "p/old")]


@pytest.fixture
def layer(tmp_path):
    """A target of two files and a link on the disk, and its listing."""
    (tmp_path / "p").mkdir()
    for name, data in {"p/a": b"abc", "p/b": b"abc"}.items():
        (tmp_path / name).write_bytes(data)
        (tmp_path / name).chmod(0o644)
        os.utime(tmp_path / name, ns=(1, 1))
    (tmp_path / "p" / "l").symlink_to("a")
    os.utime(tmp_path / "p" / "l", ns=(1, 1), follow_symlinks=False)
    (tmp_path / "p").chmod(0o755)
    return tmp_path, listing_of(
        [a_folder(""), a_folder("p"), *map(a_file, ("p/a", "p/b")), a_link("p/l", "a")]
    ).folders[1]


def test_a_folder_that_is_as_it_was_has_no_changes(layer):
    path, folder = layer

    assert changed_in(str(path), folder) == []


@pytest.mark.parametrize(
    "change",
    [
        lambda path: path.unlink(),
        lambda path: path.write_bytes(b"abcd") and os.utime(path, ns=(1, 1)),
        lambda path: os.utime(path, ns=(2, 2)),
        lambda path: path.chmod(0o755),
        lambda path: path.unlink() or path.symlink_to("b"),
        lambda path: path.unlink() or path.mkdir(),
    ],
    ids=["gone", "size", "time", "mode", "a link", "a folder"],
)
def test_whatever_changed_of_a_file_is_seen(layer, change):
    path, folder = layer
    change(path / "p" / "a")

    assert changed_in(str(path), folder) == ["p/a"]


def test_a_link_that_was_made_anew_is_seen(layer):
    path, folder = layer
    (path / "p" / "l").unlink()
    (path / "p" / "l").symlink_to("b")

    assert changed_in(str(path), folder) == ["p/l"]


def test_another_mode_of_a_folder_is_seen(layer):
    path, folder = layer
    (path / "p").chmod(0o700)

    assert changed_in(str(path), folder) == ["p"]


def test_a_link_that_became_a_file_is_seen(layer):
    path, folder = layer
    (path / "p" / "l").unlink()
    (path / "p" / "l").write_text("a")

    assert changed_in(str(path), folder) == ["p/l"]


def test_all_of_a_folder_that_is_gone_is_changed(layer):
    path, folder = layer
    (path / "p").rename(path / "moved")

    everything = ["p", "p/a", "p/b", "p/l"]
    assert changed_in(str(path), folder) == everything
    (path / "p").write_text("a file now")
    assert changed_in(str(path), folder) == everything
    (path / "p").unlink()
    (path / "p").symlink_to("moved")
    assert changed_in(str(path), folder) == everything

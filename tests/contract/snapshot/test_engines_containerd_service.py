"""The snapshots service over a real socket, spoken to as containerd speaks: answers, codes, what is left on disk."""

import os
import socket
import sqlite3
import stat as stat_bits
import threading
from contextlib import closing
from pathlib import Path

import pytest

from omniload.base.errors import ConfigError, IntegrityError, StateError, UnavailableError
from snapshot.engines.containerd.chain import chain_ids
from snapshot.engines.containerd.server import code_of, message, reader, start_server
from snapshot.engines.containerd.snapshotter import Snapshotter
from snapshot.engines.containerd.store import SnapshotStore
from tests.support.snapshot.snapshotter_builders import (
    REFERENCE,
    Calls,
    FakeImages,
    FakeViews,
    a_kept_image,
    labels_of,
)

KEPT = a_kept_image(3)
CHAIN = chain_ids(KEPT.image().config.rootfs.diff_ids)
VIEW, ACTIVE, COMMITTED = 1, 2, 3


@pytest.fixture
def made(tmp_path):
    """A snapshotter on its socket; the parts can be reached, and it can be started again."""
    return Made(tmp_path, FakeImages(KEPT))


class Made:
    def __init__(self, folder, images):
        self.folder, self.images = folder, images
        self.views = FakeViews(folder)
        self.socket = folder / "s.sock"
        self.now_ns = 1_700_000_000_000_000_000
        self.begin()

    def begin(self):
        self.snapshotter = Snapshotter(
            self.folder / "root", self.images, self.views, lambda: self.now_ns
        )
        self.server = start_server(self.snapshotter, self.socket)
        self.calls = Calls(self.socket)

    def end(self):
        self.calls.close()
        self.server.stop(grace=None).wait()
        self.snapshotter.close()

    def pull(self, layers=3):
        """Ask for the layers as a client does: lowest first, none of them downloaded."""
        for place in range(layers):
            code, _ = self.calls.refusal(
                "Prepare",
                key=f"default/{place}/extract {CHAIN[place]}",
                parent=CHAIN[place - 1] if place else "",
                labels=labels_of(KEPT, place),
            )
            assert code == "ALREADY_EXISTS"


@pytest.fixture(autouse=True)
def ended(made):
    yield
    made.end()


def options_of(answer):
    (entry,) = answer.mounts
    return entry.type, entry.source, list(entry.options)


def folders(made):
    return sorted(path.name for path in (made.folder / "root/snapshots").iterdir())


def test_a_place_to_write_is_bound_committed_and_lain_upon(made):
    kind, source, options = options_of(made.calls("Prepare", key="a", labels={"x": "1"}))
    assert (kind, options) == ("bind", ["rw", "rbind"])
    (Path(source) / "file").write_text("hello")

    made.calls("Commit", name="layer", key="a")
    kind, _, options = options_of(made.calls("Prepare", key="b", parent="layer"))

    assert kind == "overlay"
    assert options[-1] == f"lowerdir={source}"
    assert options_of(made.calls("Mounts", key="b"))[2] == options
    upper = dict(option.split("=") for option in options)["upperdir"]
    assert list(Path(upper).iterdir()) == []


def test_layers_that_are_read_lazily_need_not_be_unpacked(made):
    made.pull()

    listed = [info for page in made.calls("List") for info in page.info]

    assert [(info.name, info.parent, info.kind) for info in listed] == [
        (CHAIN[0], "", COMMITTED),
        (CHAIN[1], CHAIN[0], COMMITTED),
        (CHAIN[2], CHAIN[1], COMMITTED),
    ]
    assert folders(made) == []
    assert made.views.done == []


def test_a_container_on_lazy_layers_has_one_view_of_them_all(made):
    made.pull()

    _, _, options = options_of(made.calls("Prepare", key="default/9/box", parent=CHAIN[2]))

    assert options[-1] == f"lowerdir={made.views.path(3)}"
    assert made.views.done == [("show", 3, REFERENCE, 3)]
    upper = dict(option.split("=") for option in options)["upperdir"]
    assert stat_bits.S_IMODE(Path(upper).stat().st_mode) == 0o750, "as the root of the image"


def test_the_filter_by_which_containerd_looks_for_a_lazy_layer_finds_it(made):
    made.pull(2)
    for place, parent in ((0, ""), (1, CHAIN[0])):
        text = f'labels."containerd.io/snapshot.ref"=={CHAIN[place]},parent=="{parent}"'

        (page,) = made.calls("List", filters=[text])

        assert [info.name for info in page.info] == [CHAIN[place]]


def test_a_second_client_finds_the_layers_without_the_registry_being_asked(made):
    made.pull()
    asked = len(made.images.asked)

    made.pull()

    assert len(made.images.asked) == asked


def test_a_layer_that_cannot_be_read_lazily_is_unpacked_and_all_above_it(made):
    layers = KEPT.image().layers
    made.images.unreadable = {layers[1].digest}
    made.pull(1)

    _, _, options = options_of(
        made.calls("Prepare", key="e1", parent=CHAIN[0], labels=labels_of(KEPT, 1))
    )
    made.calls("Commit", name="default/5/one", key="e1")
    _, _, above = options_of(
        made.calls("Prepare", key="e2", parent="default/5/one", labels=labels_of(KEPT, 2))
    )

    assert options[-1] == f"lowerdir={made.views.path(1)}"
    own = dict(option.split("=") for option in options)["upperdir"]
    assert above[-1] == f"lowerdir={own}:{made.views.path(1)}"
    assert made.images.asked == [layers[0].digest, layers[1].digest], "the third is not asked for"


def test_a_tag_that_moved_is_unpacked_not_shown_as_what_it_is_not(made):
    other = a_kept_image(3, name="other")

    kind, _, _ = options_of(made.calls("Prepare", key="e", labels=labels_of(other, 0)))

    assert kind == "bind"


@pytest.mark.parametrize(
    "error", [FileNotFoundError("blob"), OSError(28, "full"), UnavailableError("down")]
)
def test_a_registry_or_disk_that_fails_costs_laziness_not_the_pull(made, monkeypatch, error):
    def find(*_):
        raise error

    monkeypatch.setattr(made.images, "find", find)

    kind, _, options = options_of(made.calls("Prepare", key="e", labels=labels_of(KEPT, 0)))

    assert (kind, options) == ("bind", ["rw", "rbind"])


def test_a_view_never_becomes_a_lazy_layer(made):
    kind, _, options = options_of(made.calls("View", key="v", labels=labels_of(KEPT, 0)))

    assert (kind, options) == ("bind", ["ro", "rbind"])
    assert made.calls("Stat", key="v").info.kind == VIEW


def test_what_cannot_be_shown_leaves_nothing_behind(made):
    made.pull()
    made.views.error = UnavailableError("no registry")

    code, text = made.calls.refusal("Prepare", key="box", parent=CHAIN[2])

    assert (code, text) == ("UNAVAILABLE", "no registry")
    assert made.calls.refusal("Stat", key="box")[0] == "NOT_FOUND"
    assert folders(made) == []


@pytest.mark.parametrize(
    ("name", "fields", "code"),
    [
        ("Prepare", {"key": "box"}, "ALREADY_EXISTS"),
        ("Prepare", {"key": "new", "parent": "none"}, "NOT_FOUND"),
        ("Prepare", {"key": "new", "parent": "box"}, "INVALID_ARGUMENT"),
        ("Prepare", {"key": ""}, "INVALID_ARGUMENT"),
        ("View", {"key": "new", "parent": "none"}, "NOT_FOUND"),
        ("Mounts", {"key": "none"}, "NOT_FOUND"),
        ("Mounts", {"key": "layer"}, "FAILED_PRECONDITION"),
        ("Commit", {"name": "x", "key": "none"}, "NOT_FOUND"),
        ("Commit", {"name": "layer", "key": "box"}, "ALREADY_EXISTS"),
        ("Commit", {"name": "x", "key": "layer"}, "FAILED_PRECONDITION"),
        ("Remove", {"key": "none"}, "NOT_FOUND"),
        ("Remove", {"key": "layer"}, "FAILED_PRECONDITION"),
        ("Stat", {"key": "none"}, "NOT_FOUND"),
        ("Usage", {"key": "none"}, "NOT_FOUND"),
        ("List", {"filters": ["a b c"]}, "INVALID_ARGUMENT"),
    ],
)
def test_a_refusal_has_the_code_that_containerd_acts_on(made, name, fields, code):
    made.calls("Prepare", key="new-layer")
    made.calls("Commit", name="layer", key="new-layer")
    made.calls("Prepare", key="box", parent="layer")
    before = folders(made)

    found, text = made.calls.refusal(name, **fields)

    assert found == code
    assert text
    assert folders(made) == before


def test_what_is_removed_is_gone_and_its_view_with_it(made):
    made.pull()
    made.calls("Prepare", key="box", parent=CHAIN[2])
    assert folders(made) == ["4"]

    made.calls("Remove", key="box")
    assert folders(made) == []
    for name in reversed(CHAIN):
        made.calls("Remove", key=name)

    assert [done for done in made.views.done if done[0] == "drop"] == [
        ("drop", 3),
        ("drop", 2),
        ("drop", 1),
    ]
    assert made.calls("List") == []


def test_labels_and_times_are_told_as_they_are(made):
    made.calls("Prepare", key="a", labels={"x": "1", "y": "2"})
    made.now_ns += 5_000_000_001
    info = message("Info", name="a", labels={"x": "3"})
    mask = message("FieldMask", paths=["labels.x"])

    changed = made.calls("Update", info=info, update_mask=mask).info

    assert dict(changed.labels) == {"x": "3", "y": "2"}
    assert (changed.created_at.seconds, changed.created_at.nanos) == (1_700_000_000, 0)
    assert (changed.updated_at.seconds, changed.updated_at.nanos) == (1_700_000_005, 1)
    assert made.calls("Stat", key="a").info == changed
    mask = message("FieldMask", paths=["parent"])
    assert made.calls.refusal("Update", info=info, update_mask=mask)[0] == "INVALID_ARGUMENT"


def test_a_long_list_comes_in_pages(made):
    for number in range(201):
        made.calls("Prepare", key=f"k{number}")

    pages = made.calls("List")

    assert [len(page.info) for page in pages] == [100, 100, 1]
    assert len({info.name for page in pages for info in page.info}) == 201


def test_usage_counts_what_a_snapshot_itself_holds(made):
    _, source, _ = options_of(made.calls("Prepare", key="a"))
    (Path(source) / "file").write_bytes(bytes(100_000))
    os.link(f"{source}/file", f"{source}/again")

    active = made.calls("Usage", key="a")
    made.calls("Commit", name="layer", key="a")
    committed = made.calls("Usage", key="layer")

    assert active.inodes == 2, "the folder and one file with two names"
    assert 100_000 <= active.size < 200_000
    assert committed == active
    made.pull(1)
    assert made.calls("Usage", key=CHAIN[0]).size == 0


def test_everything_is_there_again_after_a_new_start(made):
    made.pull()
    made.calls("Prepare", key="box", parent=CHAIN[2], labels={"x": "1"})
    before = made.calls("List"), made.calls("Mounts", key="box")
    made.end()
    made.images.images = ()  # no registry is needed

    made.begin()
    made.views.done.clear()
    made.snapshotter.restore()

    assert made.views.done == [("show", 3, REFERENCE, 3)]
    assert (made.calls("List"), made.calls("Mounts", key="box")) == before


def test_a_view_that_cannot_be_restored_does_not_keep_the_service_from_starting(made):
    made.pull()
    made.calls("Prepare", key="box", parent=CHAIN[2])
    made.views.error = UnavailableError("no registry")

    made.snapshotter.restore()

    assert made.calls("Stat", key="box").info.kind == ACTIVE


def test_what_has_no_row_is_swept_away(made):
    left = made.folder / "root/snapshots/99/fs"
    left.mkdir(parents=True)
    (made.folder / "root/snapshots/gone-3").mkdir()
    made.calls("Prepare", key="a")

    made.calls("Cleanup")

    assert folders(made) == ["1"]


def test_many_who_ask_for_one_layer_at_once_all_hear_that_it_is_there(made):
    answers = []

    def ask(number):
        answers.append(
            made.calls.refusal("Prepare", key=f"e{number}", labels=labels_of(KEPT, 0))[0]
        )

    threads = [threading.Thread(target=ask, args=(n,)) for n in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert answers == ["ALREADY_EXISTS"] * 12
    assert [len(page.info) for page in made.calls("List")] == [1]


def test_the_socket_is_for_its_owner_alone_and_one_folder_has_one_server(made, tmp_path):
    mode = stat_bits.S_IMODE(made.socket.stat().st_mode)
    assert mode == 0o600
    assert stat_bits.S_IMODE((made.folder / "root").stat().st_mode) == 0o700
    with pytest.raises(StateError, match="served by process"):
        Snapshotter(made.folder / "root", made.images, made.views)
    with pytest.raises(StateError, match="another process answers"):
        start_server(made.snapshotter, made.socket)
    assert made.calls("List") == []


def test_a_socket_that_nobody_answers_on_is_replaced(made):
    old = made.folder / "old.sock"
    with socket.socket(socket.AF_UNIX) as gone:
        gone.bind(str(old))

    server = start_server(made.snapshotter, old)
    calls = Calls(old)
    found = calls("List")
    calls.close()
    server.stop(grace=None).wait()

    assert found == []


def test_a_socket_whose_process_is_too_busy_to_answer_is_left_to_it(made):
    busy = made.folder / "busy.sock"
    with socket.socket(socket.AF_UNIX) as listening, socket.socket(socket.AF_UNIX) as waiting:
        listening.bind(str(busy))
        listening.listen(0)
        waiting.connect(str(busy))

        with pytest.raises(StateError, match="another process answers"):
            start_server(made.snapshotter, busy)

    assert busy.exists()


@pytest.mark.parametrize("name", ["file", "x" * 200])
def test_a_path_that_cannot_be_a_socket_is_refused(made, name):
    (made.folder / "file").write_text("mine")

    with pytest.raises(ConfigError):
        start_server(made.snapshotter, made.folder / name)

    assert (made.folder / "file").read_text() == "mine"


def test_a_folder_whose_name_would_part_the_options_of_a_mount_is_refused(made, tmp_path):
    with pytest.raises(ConfigError, match="colon"):
        Snapshotter(tmp_path / "a:b", made.images, made.views)


def test_a_state_of_another_version_is_left_alone(made, tmp_path):
    made.end()
    with closing(sqlite3.connect(made.folder / "root/state.sqlite")) as base:
        base.execute("PRAGMA user_version=7")

    with pytest.raises(StateError, match="version 7, this code reads 1"):
        Snapshotter(made.folder / "root", made.images, made.views)

    (made.folder / "root/state.sqlite").unlink()
    made.begin()


def test_a_disk_that_refuses_leaves_machine_and_folders_as_they_were(made, monkeypatch):
    made.calls("Prepare", key="a")

    def full(*_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as changed:
        for name in ("keep", "forget"):
            changed.setattr(SnapshotStore, name, full)
        code, text = made.calls.refusal("Prepare", key="b")
        assert made.calls.refusal("Remove", key="a")[0] == "RESOURCE_EXHAUSTED"

    assert code == "RESOURCE_EXHAUSTED"
    assert "No space left" in text
    assert folders(made) == ["1"]
    made.calls("Prepare", key="b")
    made.calls("Remove", key="a")


def test_every_error_of_ours_has_a_code():
    codes = [
        code_of(kind("x")).name
        for kind in (ConfigError, UnavailableError, StateError, IntegrityError, KeyError)
    ]

    assert codes == [
        "INVALID_ARGUMENT",
        "UNAVAILABLE",
        "FAILED_PRECONDITION",
        "DATA_LOSS",
        "INTERNAL",
    ]


def test_a_message_is_the_bytes_that_the_public_interface_says():
    """By hand: field 2 "k", field 4 a map entry of field 1 "a" and field 2 "b"."""

    data = message("PrepareRequest", key="k", labels={"a": "b"}).SerializeToString()

    assert data == b"\x12\x01k\x22\x06\x0a\x01a\x12\x01b"
    again = reader("PrepareRequest")(data + b"\x7a\x01z")
    assert (again.key, dict(again.labels)) == ("k", {"a": "b"}), "fields of later versions pass"

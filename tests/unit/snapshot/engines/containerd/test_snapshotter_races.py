"""What happens between two steps of the snapshotter: removals, failures of mounts and disk, numbers that come back."""

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest

from omniload.base.errors import ConfigError, StateError, UnavailableError
from snapshot.engines.containerd import snapshotter as module
from snapshot.engines.containerd.chain import chain_ids
from snapshot.engines.containerd.records import SnapshotExistsError, SnapshotMissingError
from snapshot.engines.containerd.snapshotter import Snapshotter
from snapshot.engines.containerd.store import SnapshotStore
from tests.support.snapshot.snapshotter_builders import (
    FakeImages,
    FakeViews,
    a_kept_image,
    labels_of,
)

KEPT = a_kept_image(2)
CHAIN = chain_ids(KEPT.image().config.rootfs.diff_ids)


class Slow(FakeViews):
    """Views during whose mounting something else happens."""

    meanwhile = None

    def show(self, number, image, layers):
        super().show(number, image, layers)
        happens, self.meanwhile = self.meanwhile, None
        if happens is not None:
            happens()


class Made:
    def __init__(self, folder):
        self.folder, self.views, self.images = folder, Slow(folder), FakeImages(KEPT)
        self.begin()

    def begin(self):
        self.snapshotter = Snapshotter(self.folder / "root", self.images, self.views, lambda: 1)

    def again(self):
        self.snapshotter.close()
        self.begin()

    def pull(self):
        for place in (0, 1):
            with suppress(SnapshotExistsError):
                parent = CHAIN[place - 1] if place else ""
                self.snapshotter.prepare(f"e{place}", parent, labels_of(KEPT, place))

    def numbers(self):
        return {snapshot.key: snapshot.number for snapshot in self.snapshotter.listing()}


@pytest.fixture
def made(tmp_path):
    found = Made(tmp_path)
    yield found
    found.snapshotter.close()


def test_a_view_of_layers_that_were_removed_while_it_was_mounted_is_not_left_behind(made):
    made.pull()
    made.views.meanwhile = lambda: made.snapshotter.remove(CHAIN[1])

    with pytest.raises(SnapshotMissingError, match="was removed"):
        made.snapshotter.prepare("box", CHAIN[1], {})

    assert made.views.done[-1] == ("drop", 2)
    assert made.views.numbers() == set()
    assert set(made.numbers()) == {CHAIN[0]}


def test_nor_are_they_by_a_restart_that_is_slow(made):
    made.pull()
    made.snapshotter.prepare("box", CHAIN[1], {})
    made.again()

    def remove():
        made.snapshotter.remove("box")
        made.snapshotter.remove(CHAIN[1])

    made.views.meanwhile = remove
    made.snapshotter.restore()

    assert made.views.numbers() == set()


def test_layers_that_were_removed_and_pulled_again_meanwhile_are_shown_as_they_are_now(made):
    made.pull()
    real = made.views.path

    def path(number):  # asked for to look at the root of what is shown
        made.views.path = real
        made.snapshotter.remove(CHAIN[1])
        made.pull()
        return real(number)

    made.views.path = path

    (entry,) = made.snapshotter.prepare("box", CHAIN[1], {})

    number = made.numbers()[CHAIN[1]]
    assert number != 2
    assert entry.options[-1] == f"lowerdir={made.views.path(number)}"
    assert made.views.numbers() == {number}


def test_a_parent_that_goes_before_its_child_is_kept_is_missing_and_no_defect(made):
    made.pull()
    real = made.views.path

    def path(number):
        made.views.path = real
        made.snapshotter.remove(CHAIN[1])
        return real(number)

    made.views.path = path

    with pytest.raises(SnapshotMissingError):
        made.snapshotter.prepare("box", CHAIN[1], {})

    assert set(made.numbers()) == {CHAIN[0]}


def test_a_view_that_dies_as_it_is_looked_at_can_be_tried_again(made, monkeypatch):
    made.pull()

    def dead(_):
        raise OSError(107, "Transport endpoint is not connected")

    with monkeypatch.context() as changed:
        changed.setattr(module.os, "stat", dead)
        with pytest.raises(UnavailableError, match="try again"):
            made.snapshotter.prepare("box", CHAIN[1], {})

    assert made.snapshotter.prepare("box", CHAIN[1], {})


@pytest.mark.parametrize(
    "error", [StateError("busy"), ConfigError("no fusermount3"), OSError(12, "no memory")]
)
def test_a_view_that_cannot_go_costs_a_warning_and_its_number_never_comes_back(made, error, caplog):
    made.pull()
    made.snapshotter.prepare("box", CHAIN[1], {})
    made.snapshotter.remove("box")
    made.views.stuck = error

    made.snapshotter.remove(CHAIN[1])
    made.again()  # which tries it once more, and starts all the same
    made.pull()

    assert "view 2 stays" in caplog.text
    assert made.numbers()[CHAIN[1]] > 2, "what is still shown as 2 would be taken for it"
    made.views.stuck = None
    made.snapshotter.cleanup()
    assert made.views.numbers() == set()


def test_a_folder_that_cannot_go_keeps_its_number_from_coming_back(made, monkeypatch):
    made.snapshotter.prepare("a", "", {})
    with monkeypatch.context() as changed:
        changed.setattr(module, "take_away", lambda _: None)
        made.snapshotter.remove("a")
        made.again()

        made.snapshotter.prepare("b", "", {})

    assert made.numbers() == {"b": 2}
    made.snapshotter.remove("b")
    assert list((made.folder / "root/snapshots").iterdir()) == [
        made.folder / "root/snapshots/gone-1"
    ]


def test_what_the_disk_refused_was_never_there_even_where_it_cannot_be_read(made, monkeypatch):
    made.snapshotter.prepare("a", "", {})
    before = made.snapshotter.listing()

    def full(*_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as changed:
        for name in ("keep", "forget", "snapshots"):
            changed.setattr(SnapshotStore, name, full)
        with pytest.raises(OSError, match="No space left"):
            made.snapshotter.remove("a")
        with pytest.raises(OSError, match="No space left"):
            made.snapshotter.prepare("b", "", {})

    assert made.snapshotter.listing() == before
    made.snapshotter.prepare("b", "", {})
    assert made.numbers()["b"] == 3, "a number is not used twice"
    made.snapshotter.remove("a")


def test_nobody_waits_while_large_folders_are_removed(made, monkeypatch):
    made.snapshotter.prepare("a", "", {})
    (made.folder / "root/snapshots/gone-7").mkdir()
    seen = []

    def slow(folder):
        with ThreadPoolExecutor(1) as other:  # who would wait for ever, were the lock held
            other.submit(made.snapshotter.listing).result(timeout=60)
        seen.append(folder.name)

    monkeypatch.setattr(module, "take_away", slow)

    made.snapshotter.cleanup()
    made.snapshotter.remove("a")

    assert seen == ["gone-7", "gone-1"]


@pytest.mark.parametrize("error", [UnavailableError("down"), OSError(28, "No space left")])
def test_a_machine_whose_disk_is_full_or_registry_silent_can_start(made, error, caplog):
    made.pull()
    made.snapshotter.prepare("box", CHAIN[1], {})
    made.again()
    made.views.error = error

    made.snapshotter.restore()

    assert "is not shown again" in caplog.text
    made.views.error = None
    assert made.snapshotter.mounts("box")


def test_a_document_that_is_none_costs_laziness_and_not_the_pull(made, monkeypatch):
    def find(*_):
        raise ValueError("not JSON")

    monkeypatch.setattr(made.images, "find", find)

    (entry,) = made.snapshotter.prepare("e0", "", labels_of(KEPT, 0))

    assert entry.type == "bind"


def test_many_who_prepare_and_remove_at_once_leave_what_the_rows_say(made):
    made.pull()
    errors = []

    def work(name):
        for turn in range(12):
            try:
                made.snapshotter.prepare(f"{name}{turn}", CHAIN[1], {})
                made.snapshotter.mounts(f"{name}{turn}")
                made.snapshotter.remove(f"{name}{turn}")
                made.snapshotter.cleanup()
            except Exception as error:  # noqa: BLE001 -- looked at below
                errors.append(error)

    threads = [threading.Thread(target=work, args=(name,)) for name in "abcd"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert errors == []
    assert set(made.numbers()) == set(CHAIN)
    assert list((made.folder / "root/snapshots").iterdir()) == []
    assert made.views.numbers() == {2}

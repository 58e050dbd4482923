"""When a view is mounted, reused, taken away: the mounts themselves are played."""

import json
import subprocess
from types import SimpleNamespace

import pytest

from omniload.base.errors import ConfigError, StateError, UnavailableError
from omniload.base.linux.mount_table import Mount
from snapshot.engines.containerd import views as snapshotter_views
from snapshot.engines.containerd.views import ChainMount, MountedViews
from snapshot.image.mount.daemon import ImageMount
from tests.support.snapshot.snapshotter_builders import a_kept_image


class Machine:
    """Mounts of a machine that is only played: a table, daemons, and what was done."""

    def __init__(self, monkeypatch):
        self.mounted, self.dead, self.busy, self.done = [], set(), set(), []
        self.error = None
        self.ended, self.polled = [], []
        for name in ("start_daemon", "umount", "mounts_here"):
            monkeypatch.setattr(snapshotter_views, name, getattr(self, name))
        played = SimpleNamespace(run=self.run, Popen=subprocess.Popen)
        monkeypatch.setattr(snapshotter_views, "subprocess", played)
        real = snapshotter_views.os.statvfs
        monkeypatch.setattr(snapshotter_views.os, "statvfs", lambda at: self.statvfs(real, at))

    def mounts_here(self):
        return [Mount(where, "fuse.omniload", "x", "ro") for where in ["/", *self.mounted]]

    def statvfs(self, real, where):
        if where in self.dead:
            raise OSError(107, "Transport endpoint is not connected")
        return real(where)

    def start_daemon(self, module, settings, where, *, log_path):
        if self.error is not None:
            raise self.error
        if where in self.dead:  # as start_daemon does with a dead mount in its place
            self.dead.discard(where)
            self.mounted.remove(where)
        self.mounted.append(where)
        self.done.append((module, json.loads(settings), where, log_path))

        def poll():
            self.polled.append(where)
            return 0 if where in self.ended else None

        return SimpleNamespace(poll=poll)

    def umount(self, where):
        if where in self.busy:
            raise StateError("target is busy")
        self.mounted.remove(where)
        self.done.append(("umount", where))

    def run(self, line, check):
        self.done.append(tuple(line))
        self.mounted.remove(line[-1])
        return SimpleNamespace(returncode=0)


@pytest.fixture
def machine(monkeypatch):
    return Machine(monkeypatch)


@pytest.fixture
def views(tmp_path, machine):
    template = ImageMount(image="", mountpoint="", cache="/cache", trace="auto", record="auto")
    return MountedViews(tmp_path / "my views", template)


KEPT = a_kept_image(3)


def test_a_chain_is_shown_by_one_process_with_the_image_and_as_a_root_file_system(
    views, machine, tmp_path
):
    views.show(7, KEPT, 2)

    ((module, settings, where, log),) = machine.done
    assert module == "snapshot.engines.containerd.views"
    assert where == views.path(7) == str(tmp_path / "my views/7")
    assert log == str(tmp_path / "my views.log")
    chain = ChainMount.model_validate_json(json.dumps(settings))
    assert (chain.layers, chain.kept) == (2, KEPT)
    assert (chain.mount.image, chain.mount.mountpoint) == (KEPT.reference, where)
    assert (chain.mount.trace, chain.mount.record) == ("auto", "auto")
    assert chain.mount.bridge.allow_other
    assert chain.mount.bridge.trusted


def test_a_chain_that_is_shown_is_not_shown_again_also_by_another_snapshotter(
    views, machine, tmp_path
):
    views.show(7, KEPT, 2)
    views.show(7, KEPT, 2)
    template = ImageMount(image="", mountpoint="", cache="/cache")
    MountedViews(tmp_path / "my views", template).show(7, KEPT, 2)

    assert len(machine.done) == 1


def test_a_chain_whose_process_died_is_shown_again(views, machine):
    views.show(7, KEPT, 2)
    machine.dead.add(views.path(7))

    views.show(7, KEPT, 2)

    assert len(machine.done) == 2
    assert machine.mounted == [views.path(7)]


def test_the_name_of_the_hub_becomes_its_address(views, machine):
    views.show(1, a_kept_image(1, reference="docker.io/library/x:1"), 1)

    assert machine.done[0][1]["mount"]["image"] == "registry-1.docker.io/library/x:1"


@pytest.mark.parametrize("error", [UnavailableError("down"), StateError("no fuse")])
def test_what_a_process_reports_reaches_whoever_asked(views, machine, error):
    machine.error = error

    with pytest.raises(type(error), match=str(error)):
        views.show(7, KEPT, 2)

    machine.error = None
    views.show(7, KEPT, 2)
    assert machine.mounted == [views.path(7)]


def test_a_dropped_view_is_unmounted_and_its_folder_gone(views, machine, tmp_path):
    views.show(7, KEPT, 2)

    views.drop(7)

    assert machine.mounted == []
    assert list((tmp_path / "my views").iterdir()) == []
    views.drop(7)  # nothing is there: nothing is to do
    views.drop(99)
    assert [line for line in machine.done if line[0] == "umount"] == [("umount", views.path(7))]


def test_a_view_that_is_in_use_goes_when_its_last_user_does(views, machine):
    views.show(7, KEPT, 2)
    machine.busy.add(views.path(7))

    views.drop(7)

    assert machine.done[-1] == ("umount", "-l", views.path(7))
    assert machine.mounted == []


def test_a_view_that_cannot_go_is_reported(views, machine, monkeypatch):
    views.show(7, KEPT, 2)
    machine.busy.add(views.path(7))
    refused = SimpleNamespace(run=lambda *_, **__: SimpleNamespace(returncode=32))
    monkeypatch.setattr(snapshotter_views, "subprocess", refused)

    with pytest.raises(StateError, match="busy"):
        views.drop(7)

    assert machine.mounted == [views.path(7)]


def test_what_is_shown_or_was_to_be_is_known_by_its_place_and_what_is_not_ours_is_not(
    views, machine, tmp_path
):
    for number in (1, 2):
        views.show(number, KEPT, 1)
    (tmp_path / "my views/3").mkdir()  # of a snapshotter that was killed
    (tmp_path / "my views/notes").write_text("mine")

    assert views.numbers() == {1, 2, 3}

    views.drop(1)
    views.drop(3)
    assert views.numbers() == {2}
    assert machine.mounted == [views.path(2)]


def test_several_mounts_at_one_place_all_go(views, machine):
    views.show(7, KEPT, 2)
    machine.mounted.append(views.path(7))

    views.drop(7)

    assert machine.mounted == []


def test_processes_that_have_ended_are_taken_leave_of(views, machine):
    views.show(1, KEPT, 1)
    views.show(2, KEPT, 1)
    machine.ended.append(views.path(1))
    views.show(2, KEPT, 1)
    machine.polled.clear()

    views.show(2, KEPT, 1)

    assert machine.polled == [views.path(2)]


def test_without_a_program_that_unmounts_the_reason_is_told(views, machine, monkeypatch):
    def missing(_):
        raise ConfigError("fusermount3 is not installed")

    views.show(7, KEPT, 2)
    monkeypatch.setattr(snapshotter_views, "umount", missing)

    with pytest.raises(ConfigError, match="not installed"):
        views.drop(7)

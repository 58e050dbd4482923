"""Binds of a started image: what may be named, and mount points that no link of the image bends."""

import stat

import pytest

from omniload.base.errors import ConfigError
from snapshot.image.start.namespaces import LOG_INSIDE, Bind, bind_of, log_of, make_mount_points
from snapshot.startup.events import LOG_VARIABLE


@pytest.fixture
def layers(tmp_path):
    """An image and an empty upper layer."""
    image, upper = tmp_path / "image", tmp_path / "upper"
    image.mkdir()
    upper.mkdir()
    return image, upper


def mode_of(path):
    return stat.S_IMODE(path.lstat().st_mode)


def test_a_folder_is_seen_where_it_is_or_where_it_is_put(tmp_path):
    here = str(tmp_path)

    assert bind_of(here) == Bind(here, here)
    assert bind_of(f"{here}:/data") == Bind(here, "/data")
    assert bind_of(f"{here}:/data:ro") == Bind(here, "/data", read_only=True)
    assert bind_of(f"{here}:ro") == Bind(here, here, read_only=True)
    assert bind_of(f"{here}:/data//deep/") == Bind(here, "/data/deep")


def test_a_relative_name_and_a_link_are_followed_before_anything_is_mounted(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")

    assert bind_of("link") == Bind(str(tmp_path / "real"), str(tmp_path / "link"))


@pytest.mark.parametrize("text", ["", ":", ":/data", "/not/here", "/not/here:/data"])
def test_what_is_not_there_is_refused(text):
    with pytest.raises(ConfigError, match="not on this machine"):
        bind_of(text)


@pytest.mark.parametrize(
    "target", ["data", "/", "/../data", "/a/../b", "/proc", "/proc/self", "/dev/x", "/sys"]
)
def test_a_place_that_cannot_be_mounted_on_is_refused(tmp_path, target):
    with pytest.raises(ConfigError, match="cannot be mounted on"):
        bind_of(f"{tmp_path}:{target}")


def test_mount_points_are_made_in_the_upper_layer(layers, tmp_path):
    image, upper = layers
    (tmp_path / "file").write_text("x")
    binds = [Bind(str(tmp_path), "/data/deep"), Bind(str(tmp_path / "file"), "/etc/pip.conf")]

    make_mount_points(binds, image, upper)

    assert (upper / "data/deep").is_dir()
    assert (upper / "etc/pip.conf").read_text() == ""
    assert list(image.iterdir()) == []


def test_a_folder_that_the_image_has_keeps_its_mode(layers, tmp_path):
    image, upper = layers
    (image / "tmp").mkdir()
    (image / "tmp").chmod(0o1777)

    make_mount_points(
        [Bind(str(tmp_path), "/tmp/job"), Bind(str(tmp_path), "/tmp/node")], image, upper
    )

    assert mode_of(upper / "tmp") == 0o1777
    assert sorted(each.name for each in (upper / "tmp").iterdir()) == ["job", "node"]


def test_a_link_of_the_image_leads_no_mount_point_elsewhere(layers, tmp_path):
    image, upper = layers
    outside = tmp_path / "outside"
    outside.mkdir(mode=0o700)
    (image / "data").symlink_to(outside)

    make_mount_points([Bind(str(tmp_path), "/data/job")], image, upper)

    assert (upper / "data/job").is_dir()
    assert not (upper / "data").is_symlink()
    assert list(outside.iterdir()) == []


def test_a_bind_in_a_file_that_another_one_is_is_refused(layers, tmp_path):
    image, upper = layers
    (tmp_path / "file").write_text("x")
    binds = [Bind(str(tmp_path / "file"), "/data"), Bind(str(tmp_path), "/data/job")]

    with pytest.raises(ConfigError, match=r"/data/job.*another bind lies there"):
        make_mount_points(binds, image, upper)


def test_the_log_of_a_start_is_bound_and_who_it_is_told(tmp_path):
    log = tmp_path / "n1.jsonl"
    known = {LOG_VARIABLE: str(log), "OMNILOAD_JOB": "j", "OMNILOAD_NODE": "n", "HOME": "/root"}

    binds, variables = log_of(known)

    assert binds == (Bind(str(log), LOG_INSIDE),)
    assert sorted(variables) == [
        "OMNILOAD_JOB=j",
        "OMNILOAD_NODE=n",
        f"{LOG_VARIABLE}={LOG_INSIDE}",
    ]
    assert log.read_text() == ""


def test_what_the_log_holds_already_stays(tmp_path):
    log = tmp_path / "n1.jsonl"
    log.write_text("line\n")

    log_of({LOG_VARIABLE: str(log)})

    assert log.read_text() == "line\n"


@pytest.mark.parametrize("known", [{}, {LOG_VARIABLE: ""}, {LOG_VARIABLE: "/no/such/folder/log"}])
def test_without_a_log_that_can_be_written_nothing_goes_along(known):
    assert log_of(known) == ((), [])

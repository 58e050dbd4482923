"""How an image wants to be started: command, variables, folder, user; and what is refused."""

import os

import pytest

from omniload.base.errors import ConfigError
from snapshot.image.start import run as starting
from snapshot.image.start.run import check_machine, ids_of, start_of
from snapshot.oci.manifest import Process

PASSWD = (
    "root:x:0:0:root:/root:/bin/sh\nbroken\nann:x:1000:100::/home/ann:/bin/sh\nbob:x:no:1::/:\n"
)
GROUP = "root:x:0:\nusers:x:100:\nrender:x:44:ann\n"


def test_an_image_says_what_it_runs():
    process = Process(entrypoint=("python",), cmd=("a.py",), env=("A=1=2", "PATH=/opt"), user="ann")

    start = start_of(process, (), ())

    assert start.words == ("python", "a.py")
    assert start.variables == {"PATH": "/opt", "HOME": "/root", "A": "1=2"}
    assert (start.folder, start.user) == ("/", "ann")


def test_words_given_take_the_place_of_both(monkeypatch):
    monkeypatch.setenv("SHOWN", "here")
    monkeypatch.delenv("ABSENT", raising=False)
    process = Process(entrypoint=("python",), env=("A=1",), working_dir="/srv")

    start = start_of(process, ("sh", "-c", "x"), ("A=2", "SHOWN", "ABSENT", "E="))

    assert start.words == ("sh", "-c", "x")
    assert start.folder == "/srv"
    assert (start.variables["A"], start.variables["SHOWN"], start.variables["E"]) == (
        "2",
        "here",
        "",
    )
    assert "ABSENT" not in start.variables
    assert start.variables["PATH"].startswith("/usr/local/sbin")


def test_variables_of_this_machine_stay_outside(monkeypatch):
    monkeypatch.setenv("SECRET_TOKEN", "x")

    assert "SECRET_TOKEN" not in start_of(None, ("sh",), ()).variables


def test_no_command_and_no_variable_are_refused():
    with pytest.raises(ConfigError, match="names no command"):
        start_of(None, (), ())
    with pytest.raises(ConfigError, match="'=x' is not KEY=VALUE"):
        start_of(None, ("sh",), ("=x",))


@pytest.mark.parametrize(
    "process",
    [
        Process(cmd=("sh", "a\0b")),
        Process(cmd=("sh",), env=("A=\0",)),
        Process(cmd=("sh",), env=("A=1", "=x")),
        Process(cmd=("sh",), working_dir="/a\0"),
    ],
)
def test_what_no_process_can_have_is_refused_before_anything_is_mounted(process):
    with pytest.raises(ConfigError, match="no process can have"):
        start_of(process, (), ())


@pytest.mark.parametrize(
    ("user", "ids"),
    [
        ("", (0, 0)),
        (":44", (0, 44)),
        ("ann", (1000, 100)),
        ("1000", (1000, 100)),
        ("1234", (1234, 0)),
        ("1234:5", (1234, 5)),
        ("ann:render", (1000, 44)),
        ("0:users", (0, 100)),
    ],
)
def test_users_and_groups_are_looked_up_in_the_image(user, ids):
    assert ids_of(user, PASSWD, GROUP) == ids


@pytest.mark.parametrize("user", ["eve", "bob", "broken", "ann:wheel", "-1", "٣", "99999999999999"])
def test_a_user_or_group_that_the_image_does_not_know_is_refused(user):
    with pytest.raises(ConfigError, match=r"etc/(passwd|group)"):
        ids_of(user, PASSWD, GROUP)


def test_no_passwd_is_no_user_but_numbers():
    assert ids_of("7:8", "", "") == (7, 8)
    with pytest.raises(ConfigError, match="'ann'"):
        ids_of("ann", "", "")


def test_who_is_not_root_is_told_so(monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 1000)

    with pytest.raises(ConfigError, match="user 1000 cannot mount"):
        check_machine()


def test_root_needs_no_tool_of_fuse(monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr("shutil.which", lambda _: None)

    check_machine()


def test_files_of_the_image_are_read_without_following_its_links(tmp_path):
    outside = tmp_path / "outside"
    outside.write_text("secret")
    (tmp_path / "etc").mkdir()
    (tmp_path / "etc/passwd").symlink_to(outside)
    os.mkfifo(tmp_path / "etc/group")

    assert starting.etc_text(tmp_path, "passwd") == ""
    assert starting.etc_text(tmp_path, "group") == ""
    assert starting.etc_text(tmp_path, "none") == ""
    (tmp_path / "linked").mkdir()
    (tmp_path / "linked/etc").symlink_to(tmp_path / "etc")
    (tmp_path / "etc/hosts").write_text("x")
    assert starting.etc_text(tmp_path / "linked", "hosts") == ""
    assert starting.etc_text(tmp_path, "hosts") == "x"


def test_mount_points_are_made_over_links_of_the_image(tmp_path):
    image, upper, outside = tmp_path / "image", tmp_path / "upper", tmp_path / "outside"
    for folder in (image, upper, outside):
        folder.mkdir()
    for name in ("proc", "dev", "etc"):
        (image / name).symlink_to(outside)

    starting.prepare_upper(image, upper)

    assert sorted(path.name for path in upper.iterdir()) == ["dev", "proc", "sys"]
    assert not any(path.is_symlink() for path in upper.iterdir())
    assert not any(outside.iterdir())


def test_the_folder_of_configuration_keeps_its_mode(tmp_path):
    image, upper = tmp_path / "image", tmp_path / "upper"
    (image / "etc").mkdir(parents=True)
    (image / "etc").chmod(0o711)
    upper.mkdir()

    starting.prepare_upper(image, upper)

    made = upper / "etc"
    assert not made.exists() or made.stat().st_mode & 0o777 == 0o711
    assert upper.stat().st_mode == image.stat().st_mode


def test_what_a_container_reads_is_written_by_nobody_else_whatever_the_umask(tmp_path):
    image, upper = tmp_path / "image", tmp_path / "upper"
    (image / "etc").mkdir(parents=True)
    upper.mkdir()
    before = os.umask(0)
    try:
        starting.prepare_upper(image, upper)
    finally:
        os.umask(before)

    assert [p for p in (upper, *upper.rglob("*")) if p.stat().st_mode & 0o022] == []

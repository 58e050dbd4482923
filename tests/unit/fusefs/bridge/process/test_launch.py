"""Mount points that cannot be used, and machines without FUSE's tools: each is said, with what to do."""

import errno
import os
import subprocess

import click.testing
import pytest

from fusefs.bridge import server
from fusefs.bridge.api.options import BridgeOptions
from fusefs.bridge.api.protocol import FileSystem
from fusefs.bridge.device import binding
from fusefs.bridge.process import launch
from fusefs.cli import command
from omniload.base.errors import ConfigError, StateError
from omniload.base.linux import mount_table
from omniload.base.linux.mount_table import Mount


class Anything(FileSystem):
    """Shows nothing."""


def tools(*installed):
    return lambda name: f"/bin/{name}" if name in installed else None


@pytest.mark.parametrize(
    ("installed", "user", "expected"),
    [
        (("fusermount3", "umount"), 0, ["/bin/fusermount3", "-uz"]),
        (("fusermount3",), 1000, ["/bin/fusermount3", "-uz"]),
        (("umount",), 0, ["/bin/umount", "-l"]),
    ],
)
def test_root_unmounts_without_a_tool_of_fuse(monkeypatch, installed, user, expected):
    monkeypatch.setattr(launch.shutil, "which", tools(*installed))
    monkeypatch.setattr(os, "geteuid", lambda: user)

    assert launch.unmount_command(lazily=True) == expected
    assert len(launch.unmount_command(lazily=False)) == (1 if expected[0] == "/bin/umount" else 2)


@pytest.mark.parametrize(("installed", "user"), [((), 0), (("umount",), 1000)])
def test_a_missing_tool_is_named(monkeypatch, tmp_path, installed, user):
    monkeypatch.setattr(launch.shutil, "which", tools(*installed))
    monkeypatch.setattr(os, "geteuid", lambda: user)

    with pytest.raises(ConfigError, match="install fuse3"):
        launch.umount(str(tmp_path))


def test_dead_mounts_upon_each_other_are_all_taken_away(monkeypatch, tmp_path):
    dead, taken = [1, 2], []

    def statvfs(_):
        if dead:
            raise OSError(errno.ENOTCONN, "not connected")

    def run(words, **_):
        taken.append(words)
        dead.pop()
        return subprocess.CompletedProcess(words, 0)

    monkeypatch.setattr(os, "statvfs", statvfs)
    monkeypatch.setattr(launch.subprocess, "run", run)
    launch.clear_dead_mount(str(tmp_path))

    assert len(taken) == 2


@pytest.mark.parametrize(
    ("number", "message"),
    [(errno.EACCES, "cannot be used"), (errno.ENOTCONN, "cannot be taken away")],
)
def test_a_place_that_cannot_be_used_is_an_error_of_the_state(
    monkeypatch, tmp_path, number, message
):
    def statvfs(_):
        raise OSError(number, "refused")

    monkeypatch.setattr(os, "statvfs", statvfs)
    monkeypatch.setattr(
        launch.subprocess, "run", lambda words, **_: subprocess.CompletedProcess(words, 1)
    )
    with pytest.raises(StateError, match=message):
        launch.clear_dead_mount(str(tmp_path))


def test_a_place_that_is_a_mount_already_is_not_mounted_over(monkeypatch, tmp_path):
    mounted = Mount(str(tmp_path), "fuse.omnifs", "omnifs", "rw", "0:41")
    monkeypatch.setattr(mount_table, "mounts_here", lambda: [mounted])
    # And nothing takes it over.
    with pytest.raises(StateError, match=r"is a mount already; unmount it$"):
        server.serve(Anything(), str(tmp_path), BridgeOptions(bridge="device"))


def test_a_machine_without_the_device_is_told_what_is_missing(monkeypatch, tmp_path):
    def missing(path, *_):
        raise FileNotFoundError(errno.ENOENT, "No such file", path)

    monkeypatch.setattr(binding.os, "open", missing)
    with pytest.raises(StateError, match=r"/dev/fuse.*load the fuse module"):
        binding.attach_as_root(str(tmp_path), BridgeOptions(), "omnifs")


@pytest.mark.parametrize("verb", ["stat", "drop", "prefetch"])
def test_a_path_that_is_not_there_is_said_to_be_so(tmp_path, verb):
    done = click.testing.CliRunner().invoke(command, [verb, str(tmp_path / "none")])

    assert isinstance(done.exception, StateError)
    assert "none' is not there; name a file" in str(done.exception)


@pytest.mark.parametrize(
    ("user", "installed", "writable", "line", "reason"),
    [
        (0, (), False, "", None),
        (1000, (), True, "", "install fuse3"),
        (1000, ("fusermount3",), False, "", "not yours to write"),
        (1000, ("fusermount3",), True, "#user_allow_other", "needs the line user_allow_other"),
        (1000, ("fusermount3",), True, "user_allow_other", None),
    ],
)
def test_a_user_who_may_not_mount_is_told_why(
    monkeypatch, tmp_path, user, installed, writable, line, reason
):
    monkeypatch.setattr(launch.shutil, "which", tools(*installed))
    monkeypatch.setattr(os, "geteuid", lambda: user)
    monkeypatch.setattr(os, "access", lambda *_: writable)
    (tmp_path / "fuse.conf").write_text(f"# of this machine\n{line}\n")

    found = launch.why_not(
        str(tmp_path), BridgeOptions(allow_other=True), str(tmp_path / "fuse.conf")
    )

    assert (found is None) if reason is None else (reason in found)

"""mount.omniload, the tree of inodes, and the table of errnos."""

import errno
import os
import sys
from types import SimpleNamespace

import pytest

from fusefs.bridge.api.errno_answers import errno_of
from fusefs.mounts import fstab
from fusefs.mounts.fstab import Call, parsed
from fusefs.vfs.inode_table import ROOT, InodeTable
from omniload.base.errors import ConfigError, IntegrityError, StateError, UnavailableError


def test_what_mount_hands_to_its_helper_is_understood():
    assert parsed(["hdfs://nn/x", "/mnt", "-n", "-o", "rw,count=8"]) == Call(
        store="hdfs://nn/x", mountpoint="/mnt", options=("rw,count=8",)
    )
    assert parsed(["-s", "/store", "/mnt", "-t", "omniload"]) == Call(
        store="/store", mountpoint="/mnt", options=()
    )


@pytest.mark.parametrize("flag", ["-f", "-vf", "-sfnv", "--fake"])
def test_a_mount_that_is_asked_for_as_a_fake_checks_the_arguments_and_mounts_nothing(
    monkeypatch, capsys, flag
):
    monkeypatch.setattr(fstab, "start", None)
    monkeypatch.setattr(sys, "argv", ["mount.omniload", "/store", "/mnt", flag, "-o", "count=8"])
    fstab.main()
    assert capsys.readouterr() == ("", "")

    monkeypatch.setattr(sys, "argv", ["mount.omniload", "/store", "/mnt", flag, "-o", "cuont=8"])
    with pytest.raises(SystemExit) as ended:
        fstab.main()
    assert ended.value.code == 32
    assert "did you mean 'count'" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["-h"], ["--help"], ["/store", "/mnt", "-vh"]])
def test_usage_is_shown_and_nothing_mounted(monkeypatch, capsys, arguments):
    monkeypatch.setattr(fstab, "start", None)
    monkeypatch.setattr(sys, "argv", ["mount.omniload", *arguments])

    fstab.main()

    assert capsys.readouterr().out.startswith("usage: mount.omniload STORE DIRECTORY")


def test_an_option_that_lacks_its_value_is_said():
    with pytest.raises(ConfigError, match="-o without a value"):
        parsed(["/store", "/mnt", "-o"])


@pytest.fixture
def started(monkeypatch):
    """What was started, with nothing started."""
    calls = []

    def start(config, **chosen):
        calls.append((config, chosen))
        return SimpleNamespace(returncode=None)

    monkeypatch.setattr(fstab, "start", start)
    return calls


@pytest.mark.parametrize(
    ("words", "log"), [("rw,log=/var/log/m.log,count=8", "/var/log/m.log"), ("rw", os.devnull)]
)
def test_the_option_log_names_where_the_mount_logs(started, monkeypatch, words, log):
    monkeypatch.setattr(sys, "argv", ["mount.omniload", "/store", "/mnt", "-o", words])

    fstab.main()

    ((_, chosen),) = started
    assert chosen["log_path"] == log


@pytest.mark.parametrize("watched", [True, False])
def test_the_option_watch_keeps_a_process_beside_the_mount(started, monkeypatch, watched):
    words = "rw,watch,count=8" if watched else "rw,count=8"
    monkeypatch.setattr(sys, "argv", ["mount.omniload", "/store", "/mnt", "-o", words])

    fstab.main()

    ((config, chosen),) = started
    assert config.files.striping.count == 8
    assert chosen["watched"] is watched


def test_a_missing_directory_is_said():
    with pytest.raises(ConfigError, match="SOURCE and DIRECTORY"):
        parsed(["hdfs://nn/x"])


@pytest.mark.parametrize(
    ("error", "number"),
    [
        (UnavailableError("no answer"), errno.ETIMEDOUT),
        (IntegrityError("flipped"), errno.EIO),
        (StateError("version"), errno.EIO),
        (FileNotFoundError(errno.ENOENT, "x"), errno.ENOENT),
        (OSError(errno.ENOTEMPTY, "x"), errno.ENOTEMPTY),
        (ValueError("path"), errno.EINVAL),
        (KeyError("defect"), errno.EIO),
    ],
)
def test_every_error_has_an_errno_and_an_outage_is_never_enoent(error, number):
    assert errno_of(error) == number


def a_tree():
    tree = InodeTable()
    d = tree.child(tree.node(ROOT), "d")
    f = tree.child(d, "f")
    d.lookups = f.lookups = 1
    return tree, d, f


def test_renaming_a_directory_gives_all_below_another_path():
    tree, _, f = a_tree()
    root = tree.node(ROOT)

    tree.move(root, "d", root, "e")

    assert f.path() == "e/f"


def test_a_name_renamed_over_another_takes_its_place():
    tree, d, f = a_tree()
    g = tree.child(d, "g")
    g.lookups = 1

    tree.move(d, "f", d, "g")

    assert f.path() == "d/g"
    assert not g.is_attached
    with pytest.raises(FileNotFoundError):
        g.path()


def test_a_node_lives_until_the_kernel_forgets_it_and_its_children():
    tree, d, f = a_tree()

    tree.forget(d.number, 1)
    assert tree.node(d.number) is d
    tree.forget(f.number, 1)

    for number in (d.number, f.number):
        with pytest.raises(OSError, match="not known") as caught:
            tree.node(number)
        assert caught.value.errno == errno.ESTALE


def test_an_unlinked_node_lives_while_it_is_open():
    tree, d, f = a_tree()
    f.opens = f.readers = 1

    tree.detach(d, "f")
    tree.forget(f.number, 1)
    assert tree.node(f.number) is f
    tree.closed(f, reads=True, writes=False)

    with pytest.raises(OSError, match="not known"):
        tree.node(f.number)


def test_the_root_is_never_forgotten():
    tree, _, _ = a_tree()

    tree.forget(ROOT, 100)

    assert tree.node(ROOT).path() == ""

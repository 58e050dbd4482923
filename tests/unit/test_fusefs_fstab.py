"""mount.omniload, the tree of inodes, and the table of errnos."""

import errno
import sys
from types import SimpleNamespace

import pytest

from fusefs import fstab
from fusefs.errnos import errno_of
from fusefs.fstab import parsed
from fusefs.tree import ROOT, Tree
from omniload.base.errors import ConfigError, IntegrityError, StateError, UnavailableError


def test_what_mount_hands_to_its_helper_is_understood():
    assert parsed(["hdfs://nn/x", "/mnt", "-n", "-o", "rw,count=8"]) == (
        "hdfs://nn/x",
        "/mnt",
        ("rw,count=8",),
    )
    assert parsed(["-s", "/store", "/mnt", "-t", "omniload"]) == ("/store", "/mnt", ())


@pytest.mark.parametrize("watched", [True, False])
def test_the_option_watch_keeps_a_process_beside_the_mount(monkeypatch, watched):
    started = []

    def start(config, **chosen):
        started.append((config, chosen))
        return SimpleNamespace(returncode=None)

    words = "rw,watch,count=8" if watched else "rw,count=8"
    monkeypatch.setattr(fstab, "start", start)
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
    tree = Tree()
    d = tree.child(tree.node(ROOT), "d")
    f = tree.child(d, "f")
    d.lookups = f.lookups = 1
    return tree, d, f


def test_renaming_a_directory_gives_all_below_another_path():
    tree, _, f = a_tree()
    root = tree.node(ROOT)

    tree.move(root, "d", root, "e")

    assert tree.path(f) == "e/f"


def test_a_name_renamed_over_another_takes_its_place():
    tree, d, f = a_tree()
    g = tree.child(d, "g")
    g.lookups = 1

    tree.move(d, "f", d, "g")

    assert tree.path(f) == "d/g"
    assert not g.is_attached
    with pytest.raises(FileNotFoundError):
        tree.path(g)


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
    f.opens = 1

    tree.detach(d, "f")
    tree.forget(f.number, 1)
    assert tree.node(f.number) is f
    tree.closed(f)

    with pytest.raises(OSError, match="not known"):
        tree.node(f.number)


def test_the_root_is_never_forgotten():
    tree, _, _ = a_tree()

    tree.forget(ROOT, 100)

    assert tree.path(tree.node(ROOT)) == ""

"""Folders that containers wrote: counted, held, and taken away, however deep or strange."""

import os
import subprocess

import pytest

from snapshot.engines.containerd import folders as snapshotter_folders
from snapshot.engines.containerd.folders import take_away, usage_of

DEPTH = 1500
"""Folders in folders: more than Python calls itself, and longer than a path may be with names of three bytes."""


@pytest.fixture
def deep(tmp_path):
    """A folder as a container can make it, one step after the other."""
    top = tmp_path / "deep"
    top.mkdir()
    at = os.open(top, os.O_RDONLY | os.O_DIRECTORY)
    for _ in range(DEPTH):
        os.mkdir("abc", dir_fd=at)
        below = os.open("abc", os.O_RDONLY | os.O_DIRECTORY, dir_fd=at)
        os.close(at)
        at = below
    os.close(at)
    yield top
    subprocess.run(["rm", "-rf", str(top)], check=True)


def test_a_tree_of_any_depth_can_be_counted_and_taken_away(deep, tmp_path):
    size_bytes, inodes = usage_of(deep)

    take_away(deep)

    assert inodes > 900
    assert size_bytes >= 0
    assert list(tmp_path.iterdir()) == []


def test_each_inode_counts_once_and_links_are_not_followed(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere/big").write_bytes(bytes(1 << 20))
    top = tmp_path / "top"
    (top / "one").mkdir(parents=True)
    (top / "one/file").write_bytes(bytes(100_000))
    os.link(top / "one/file", top / "again")
    (top / "out").symlink_to(tmp_path / "elsewhere")

    size_bytes, inodes = usage_of(top)

    assert inodes == 4, "two folders, one file, one link"
    assert 100_000 <= size_bytes < 200_000


def test_what_is_gone_or_no_folder_any_more_counts_nothing(tmp_path, monkeypatch):
    assert usage_of(tmp_path / "none") == (0, 0)
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_bytes(bytes(5000))
    real = os.scandir

    def scandir(path):
        if path.endswith("folder"):  # a file in its place since it was looked at
            raise NotADirectoryError(path)
        return real(path)

    monkeypatch.setattr(snapshotter_folders.os, "scandir", scandir)

    assert usage_of(tmp_path)[1] == 3


def test_what_cannot_be_removed_is_said_and_no_error(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(snapshotter_folders.shutil, "rmtree", lambda *_, **__: None)

    take_away(tmp_path)
    take_away(tmp_path / "none")

    (record,) = caplog.records
    assert "tried again at the next cleanup" in record.getMessage()

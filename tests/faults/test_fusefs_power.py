"""The power fails under a local store: what an fsync promised is there, and nothing that was replaced is lost.

An ext4 file system in a file is shut down without its journal's last transactions, as a power
failure does, and mounted again.
"""

import fcntl
import os
import shutil
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from fusefs.stores.local.store import LocalStore
from tests.support.fusefs.before_the_failure import BIG
from tests.support.fusefs.builders import contents, tiny_files
from tests.support.mount_table import once_mounts_allow
from tests.support.programs import finished

_SHUTDOWN, _WITHOUT_THE_LOG = 0x8004587D, 2


class Disk:
    """A file system that a power failure can be had on."""

    def __init__(self, base):
        self.image, self.root = base / "image", base / "disk"
        self.root.mkdir()
        with self.image.open("wb") as file:
            file.truncate(64 << 20)
        made = subprocess.run(["mkfs.ext4", "-q", self.image], check=False, capture_output=True)
        if made.returncode or not self._mount():
            pytest.skip("NOT TESTED: no ext4 in a loop device here")

    def _mount(self):
        words = ["mount", "-o", "loop,commit=300", self.image, self.root]
        return subprocess.run(words, check=False, capture_output=True).returncode == 0

    def lose_power(self):
        """Drop what is not durable, and come back."""
        root = os.open(self.root, os.O_RDONLY)
        fcntl.ioctl(root, _SHUTDOWN, struct.pack("I", _WITHOUT_THE_LOG))
        os.close(root)
        self.unmount()
        assert self._mount()

    def unmount(self):
        """Unmount, and wait until no mount namespace holds a copy: mounted again, it would be what failed."""
        subprocess.run(["umount", self.root], check=True, capture_output=True)
        once_mounts_allow(self._is_let_go)

    def _is_let_go(self):
        words = ["losetup", "--noheadings", "--associated", self.image]
        shown = subprocess.run(words, check=True, capture_output=True).stdout
        return None if shown else True


@pytest.fixture
def disk(tmp_path):
    if os.geteuid() != 0 or shutil.which("mkfs.ext4") is None:
        pytest.skip("NOT TESTED: needs root and mkfs.ext4")
    disk = Disk(tmp_path)
    yield disk
    # A test that failed may hold its store.
    subprocess.run(["umount", "-l", disk.root], check=True, capture_output=True)


def before_the_failure(disk, work):
    """Do something in a process of its own, which ends without closing anything; then lose the power."""
    words = [sys.executable, "-m", "tests.support.fusefs.before_the_failure", disk.root, work]
    done = finished(words, limit_s=60, cwd=Path(__file__).parents[2])
    assert done.returncode == 0, done.stderr
    disk.lose_power()


def test_what_was_fsynced_is_whole_and_reachable_after_a_power_failure(disk):
    before_the_failure(disk, "fsync")

    with tiny_files(LocalStore(disk.root)) as files:
        assert contents(files, "a/b/f") == b"small"
        assert contents(files, "a/b/big") == BIG


def test_what_takes_the_place_of_a_file_leaves_the_old_one_or_the_new_after_a_power_failure(disk):
    before_the_failure(disk, "replace")

    with tiny_files(LocalStore(disk.root)) as files:
        assert contents(files, "closed") in {b"old", b"new"}
        assert contents(files, "renamed") in {b"old", b"new"}
        assert contents(files, "striped") == b"new"


def test_a_small_file_that_was_only_closed_is_gone_or_empty_or_whole(disk):
    before_the_failure(disk, "close")

    with tiny_files(LocalStore(disk.root)) as files:
        names = [info.name for info in files.listing("")]
        assert "warm" in names
        assert "f" not in names or contents(files, "f") in {b"", b"small"}

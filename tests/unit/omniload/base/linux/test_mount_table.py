"""The kernel's list of mounts."""

import os

import pytest

from omniload.base.linux import mount_table
from omniload.base.linux.mount_table import (
    Mount,
    fuse_mount_at,
    mount_point,
    mounts_everywhere,
    mounts_here,
    parse_mounts,
)

LINES = r"""
24 1 254:0 / / rw,relatime shared:1 - ext4 /dev/vda rw,discard
90 24 0:45 / /env/lib ro,nosuid shared:2 master:1 - overlay omniload-env:abc ro,lowerdir=/a:/b
91 24 0:46 / /with\040blank ro - overlay overlay ro,lowerdir=/a
""".strip()


def test_mounts_are_read_with_and_without_optional_fields():
    assert parse_mounts(LINES) == [
        Mount("/", "ext4", "/dev/vda", "rw,discard", "254:0"),
        Mount("/env/lib", "overlay", "omniload-env:abc", "ro,lowerdir=/a:/b", "0:45"),
        Mount("/with blank", "overlay", "overlay", "ro,lowerdir=/a", "0:46"),
    ]


def test_no_mounts_are_no_lines():
    assert parse_mounts("") == []


@pytest.mark.parametrize(
    "given", ["a/m", "a/../a/m/", "b/m", "l", "a/l", "a/c", "b/../a/m", "a/round", "no/m", "a/."]
)
def test_a_mount_point_is_found_by_any_path_to_it_and_not_asked(tmp_path, monkeypatch, given):
    (tmp_path / "a" / "m").mkdir(parents=True)
    (tmp_path / "b").symlink_to("a")
    (tmp_path / "l").symlink_to("b/m")
    (tmp_path / "a" / "l").symlink_to("../b/m")
    (tmp_path / "a" / "c").symlink_to("c")
    (tmp_path / "a" / "round").symlink_to("../b/../l")
    real, asked = os.path.realpath(tmp_path / given), []
    lstat = os.lstat
    monkeypatch.setattr(os, "lstat", lambda path, **_: asked.append(str(path)) or lstat(path))
    monkeypatch.chdir(tmp_path)

    assert mount_point(given) == real
    assert str(tmp_path / "a" / "m") not in asked


def test_the_root_of_this_process_is_mounted():
    assert "/" in {mount.path for mount in mounts_here()}


MOUNTS = """\
22 1 0:20 / /proc rw - proc proc rw
90 1 0:41 / /mnt/a rw shared:1 - fuse.omnifs omnifs rw,user_id=0
91 90 0:42 / /mnt/a rw shared:1 - fuse.omnifs omnifs rw,user_id=0
92 1 0:43 / /mnt/with\\040space rw - fuse.example example rw
94 1 0:44 / /mnt/tab\\011here\\134\u00a0\udcff rw - fuse.example example rw
93 1 8:1 / /mnt/disk rw - ext4 /dev/sda1 rw
"""


@pytest.mark.parametrize(
    ("target", "device"),
    [
        ("/mnt/a", "0:42"),  # the uppermost of two
        ("/mnt/with space", "0:43"),
        ("/mnt/tab\there\\\u00a0\udcff", "0:44"),
        ("/mnt/disk", None),
        ("/mnt/none", None),
    ],
)
def test_a_fuse_mount_is_found_in_the_table_without_asking_it(monkeypatch, target, device):
    monkeypatch.setattr(mount_table, "mounts_here", lambda: parse_mounts(MOUNTS))

    found = fuse_mount_at(target)

    assert (found.device if found else None) == device


def a_process(proc, number, namespace):
    """Make a folder as /proc has one of each process, with the lines above as its mounts."""
    folder = proc / str(number)
    (folder / "ns").mkdir(parents=True)
    (folder / "ns" / "mnt").symlink_to(namespace)
    (folder / "mountinfo").write_text(LINES)
    return folder


def test_each_mount_namespace_is_looked_at_once(tmp_path):
    (tmp_path / "sys").mkdir()
    first, _, other, unseen, ended = (
        a_process(tmp_path, number, f"mnt:[{namespace}]")
        for number, namespace in ((2, 1), (10, 1), (11, 2), (12, 3), (13, 4))
    )
    (unseen / "mountinfo").unlink()
    (unseen / "mountinfo").mkdir()  # an error that is not of a process that has ended
    (ended / "mountinfo").unlink()

    found = list(mounts_everywhere(tmp_path))

    assert [folder for folder, _ in found] == [first, other, unseen]
    assert [mounts for _, mounts in found] == [parse_mounts(LINES), parse_mounts(LINES), None]

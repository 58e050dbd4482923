"""What the system calls: mount(8) with a line of an fstab, and systemd's unit."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.fusefs.model import fast_directory
from tests.support.fusefs.proof import NO_MOUNT, WHY_NO_MOUNT, without

ROOT = Path(__file__).parents[4]
HELPER = Path(sys.executable).with_name("mount.omniload")


@pytest.fixture
def place():
    base = fast_directory("fusefs-system-")
    for name in ("store", "mnt", "sbin"):
        (base / name).mkdir()
    # A name of /sbin in the test's own mount namespace: the machine's stays as it is.
    (base / "sbin/mount.omniload").symlink_to(HELPER)
    yield base
    shutil.rmtree(base)


def in_namespace(place, script):
    """Run a script of the shell where ``mount.omniload`` lies in /sbin."""
    words = ["unshare", "--mount", "sh", "-euc", f"mount --bind {place}/sbin /usr/sbin\n{script}"]
    return subprocess.run(words, capture_output=True, text=True, timeout=120, check=False)


needs_root = [
    pytest.mark.fuse,
    pytest.mark.skipif(NO_MOUNT, reason=WHY_NO_MOUNT),
    pytest.mark.skipif(os.getuid() != 0, reason="FSTAB NOT TESTED: needs root"),
    pytest.mark.skipif(**without("unshare", "mount", "umount")),
]


def marked(test):
    for mark in needs_root:
        test = mark(test)
    return test


def fstab_of_the_page(place):
    """Return the line that the how-to shows, for a store and mount point of ours."""
    page = (ROOT / "docs/how-to/files.md").read_text()
    (line,) = re.findall(r"^hdfs://.* omniload .*$", page, re.MULTILINE)
    source, target, *rest = line.split()
    assert source.startswith("hdfs://")
    assert target == "/mnt/jobs"
    rest[1] = re.sub(r"log=[^,]+", f"log={place}/log", rest[1])
    return " ".join([str(place / "store"), str(place / "mnt"), *rest])


@marked
def test_mount_mounts_the_line_of_fstab_that_the_page_shows(place):
    (place / "fstab").write_text(fstab_of_the_page(place) + "\n")

    done = in_namespace(
        place,
        f"""
        mount -T {place}/fstab {place}/mnt
        grep ' {place}/mnt ' /proc/self/mounts
        head -c 3000000 /dev/zero > {place}/mnt/f
        getfattr() {{ {sys.executable} -c 'import os, sys; print(os.getxattr(*sys.argv[1:]).decode())' "$@"; }}
        getfattr {place}/mnt/f user.omnifs.layout
        {HELPER.with_name("omniload")} fs umount {place}/mnt
        """,
    )

    assert done.returncode == 0, done.stderr
    assert "fuse.omnifs rw,nosuid,nodev" in done.stdout
    assert '"stripe_count":8' in done.stdout
    assert (place / "store/f").exists()
    assert (place / "log").exists()
    assert not os.path.ismount(place / "mnt")


@marked
def test_a_fake_mount_checks_the_line_and_mounts_nothing(place):
    (place / "fstab").write_text(fstab_of_the_page(place) + "\n")

    done = in_namespace(
        place,
        f"""
        mount --fake -T {place}/fstab {place}/mnt
        {HELPER} {place}/store {place}/mnt -f
        ! grep ' {place}/mnt ' /proc/self/mounts
        """,
    )

    assert done.returncode == 0, done.stderr
    assert not (place / "log").exists()


@marked
@pytest.mark.parametrize(
    "options",
    ["ro", "defaults,noatime,nosuid,nodev", "nofail,x-systemd.automount,comment=mine"],
)
def test_options_that_mount_knows_reach_the_helper_and_are_understood(place, options):
    (place / "store/there").write_text("as it was")

    done = in_namespace(
        place,
        f"""
        mount -t omniload -o {options} {place}/store {place}/mnt
        cat {place}/mnt/there
        touch {place}/mnt/new || echo refused
        umount {place}/mnt
        """,
    )

    assert done.returncode == 0, done.stderr
    assert done.stdout == "as it was" + ("refused\n" if options == "ro" else "")


@marked
def test_a_mount_that_fails_says_why_and_ends_as_mount_does(place):
    done = in_namespace(place, f"mount -t omniload -o cach=1GiB {place}/store {place}/mnt")

    assert done.returncode == 32
    assert "option 'cach' is not known; did you mean 'cache'?" in done.stderr

    done = in_namespace(place, f"mount -t omniload {place}/none {place}/mnt")

    assert done.returncode == 32
    assert "is not a directory; make it first" in done.stderr


@pytest.mark.skipif(**without("systemd-analyze"))
def test_the_unit_of_the_design_is_one_that_systemd_takes(tmp_path):
    page = (ROOT / "docs/design/fusefs/0011-fusefs-concurrency.md").read_text()
    (unit,) = re.findall(r"^```\n(\[Unit\].*?)^```$", page, re.MULTILINE | re.DOTALL)
    command = HELPER.with_name("omniload")
    assert unit.count("/usr/bin/omniload") == 3
    (tmp_path / "omniload-jobs.service").write_text(unit.replace("/usr/bin/omniload", str(command)))
    words = ["systemd-analyze", "verify", "--man=no", tmp_path / "omniload-jobs.service"]

    done = subprocess.run(words, capture_output=True, text=True, timeout=120, check=False)

    assert (done.returncode, done.stderr) == (0, "")


def test_each_command_of_the_unit_is_one_of_ours(tmp_path):
    page = (ROOT / "docs/design/fusefs/0011-fusefs-concurrency.md").read_text()
    commands = re.findall(r"^Exec\w+=/usr/bin/omniload (.*)$", page, re.MULTILINE)
    assert len(commands) == 3

    for command in commands:
        words = [HELPER.with_name("omniload"), *command.split()]
        words = [tmp_path / "none" if word == "/mnt/jobs" else word for word in words]
        done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)

        # Understood, and refused for the one reason that there is no such folder.
        assert "Usage:" not in done.stderr
        assert done.returncode in {2, 4}
        assert "none" in done.stderr

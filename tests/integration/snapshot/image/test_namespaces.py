"""What the namespaces of a command in an image share with the machine, and what they do not."""

import contextlib
import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from snapshot.oci.layout import OciLayout
from tests.support.snapshot.engine_images import push_python_image

pytestmark = [pytest.mark.fuse, pytest.mark.slow]

MAIN = "from omniload.base.cli import main; main()"


@pytest.fixture(scope="module")
def layout(tmp_path_factory):
    if not Path("/dev/fuse").exists() or os.geteuid() != 0:
        pytest.skip("NOT TESTED: needs /dev/fuse and root")
    folder = tmp_path_factory.mktemp("images") / "layout"
    store = OciLayout.create(folder)
    push_python_image(store, "v")
    return f"oci:{folder}"


@pytest.fixture
def start(layout, tmp_path):
    """Start a command in an image, in a process of its own; all it may leave lies below one folder."""
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    cache = (
        f"--option=cache={tmp_path / 'cache'}",
        f"--scratch={scratch}",
        f"--log={tmp_path}/log",
    )

    def call(*words, options=()):
        line = [sys.executable, "-c", MAIN, "image", "run", f"{layout}:v"]
        return subprocess.Popen(
            [*line, *cache, *options, "--", *words],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[4])},
        )

    yield call
    left = [line.split()[1] for line in Path("/proc/self/mounts").read_text().splitlines()]
    left = [point for point in left if point.startswith(f"{scratch}/")]
    for point in reversed(left):
        subprocess.run(["umount", "-l", point], check=False)
    assert left == []
    assert list(scratch.iterdir()) == []


@pytest.fixture
def shared(tmp_path):
    """A folder whose mounts are shared, as all are where systemd runs."""
    folder = tmp_path / "shared"
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "shared", folder], check=True)
    subprocess.run(["mount", "--make-shared", folder], check=True)
    yield folder
    # Lazily: another lane may look at a mount just then. What keeps a mount in use is a matter of the tests.
    for point in (folder / "other", folder):
        if point.is_mount():
            subprocess.run(["umount", "-l", point], check=True)


def unmount(point):
    """Unmount as the machine does, which asks again: any look at a mount keeps it in use for that moment."""
    end = time.monotonic() + 30
    while True:
        ended = subprocess.run(["umount", point], check=False, capture_output=True, text=True)
        if ended.returncode == 0:
            return
        assert time.monotonic() < end, ended.stderr
        time.sleep(0.05)


def holders(point):
    """Return the mount namespaces in which something is mounted at a place."""
    found = set()
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended
            if f" {point} " in (process / "mountinfo").read_text():
                found.add((process / "ns/mnt").readlink())
    return found


def namespaces_of(process):
    """Return the mount namespaces of a start; those of other tests come and go beside it."""
    family = [
        process.pid,
        *(child.pid for child in psutil.Process(process.pid).children(recursive=True)),
    ]
    found = {Path(f"/proc/{pid}/ns/mnt").readlink() for pid in family}
    return found - {Path("/proc/self/ns/mnt").readlink()}


def done(process):
    out, err = process.communicate(timeout=120)
    return process.returncode, out, err


def test_what_the_machine_unmounts_meanwhile_is_held_by_no_start(start, shared):
    """Else the daemon of a mount would live, and an unmount wait, as long as any job that began before."""
    other = shared / "other"
    other.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "other", other], check=True)
    with start("sh", "-c", "echo up; exec cat") as process:
        assert process.stdout.readline() == "up\n"
        of_start = namespaces_of(process)
        assert of_start & holders(other)

        unmount(other)

        assert not of_start & holders(other)
        assert of_start & holders(shared)  # so it was looked for in the right place
        code, _, err = done(process)
    assert code == 0, err


def test_what_a_start_was_given_stays_as_it_was(start, shared):
    (shared / "other").mkdir()
    script = "echo up; read line; cat /given/other/file /given/other/* 2>&1; echo end"
    with start("sh", "-c", script, options=(f"--bind={shared}:/given",)) as process:
        assert process.stdout.readline() == "up\n"
        subprocess.run(["mount", "-t", "tmpfs", "other", shared / "other"], check=True)
        (shared / "other/file").write_text("mounted later")
        process.stdin.write("go\n")

        code, out, err = done(process)

    assert code == 0, err
    assert "mounted later" not in out
    assert out.endswith("end\n")

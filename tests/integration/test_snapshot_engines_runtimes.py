"""Real containers of runc and crun on a lazily mounted image, without an engine around them."""

import contextlib
import os
import re
import resource
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from snapshot.image.trace import decode_trace
from snapshot.oci.layout import OciLayout
from tests.support.engine_images import push_config, push_python_image
from tests.support.registry import needs

pytestmark = [pytest.mark.fuse, pytest.mark.slow]

MAIN = "from omniload.base.cli import main; main()"
RUNTIMES = ("runc", "crun")


@pytest.fixture(scope="module")
def layout(tmp_path_factory):
    needs(*RUNTIMES)
    if not Path("/dev/fuse").exists() or os.geteuid() != 0:
        pytest.skip("NOT TESTED: needs /dev/fuse and root")
    folder = tmp_path_factory.mktemp("images") / "layout"
    store = OciLayout.create(folder)
    image = push_python_image(store, "v")
    layers = list(zip(image.layers, image.config.rootfs.diff_ids, strict=True))
    push_config(store, "ann", layers, User="ann", WorkingDir="/made/by/it")
    return f"oci:{folder}"


@pytest.fixture
def start(layout, tmp_path):
    """Start a command in a container, in a process of its own; all it may leave lies below one folder."""
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    before = set(Path("/sys/fs/cgroup").rglob("omniload-run-*"))
    cache = (
        f"--option=cache={tmp_path / 'cache'}",
        f"--scratch={scratch}",
        f"--log={tmp_path}/log",
    )

    def call(runtime, *words, tag="v", verb="run", options=()):
        line = [sys.executable, "-c", MAIN, "image", verb, f"{layout}:{tag}"]
        return subprocess.Popen(
            [*line, *([f"--runtime={runtime}"] if runtime else []), *cache, *options, "--", *words],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[2])},
        )

    yield call
    left = [line.split()[1] for line in Path("/proc/self/mounts").read_text().splitlines()]
    left = [point for point in left if point.startswith(f"{scratch}/")]
    for point in reversed(left):
        subprocess.run(["umount", "-l", point], check=False)
    assert left == []
    assert list(scratch.iterdir()) == []
    # Containers of tests in the other lane have groups too; theirs go, ours would stay.
    end_s = time.monotonic() + 60
    while left := set(Path("/sys/fs/cgroup").rglob("omniload-run-*")) - before:
        assert time.monotonic() < end_s, left
        select.select([], [], [], 0.1)


@pytest.fixture
def shared(tmp_path):
    """A folder whose mounts are shared, as all are where systemd runs."""
    folder = tmp_path / "shared"
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "shared", folder], check=True)
    subprocess.run(["mount", "--make-shared", folder], check=True)
    yield folder
    subprocess.run(["umount", "-R", folder], check=True)


def holders(point):
    """Return the mount namespaces in which something is mounted at a place."""
    found = set()
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended
            if f" {point} " in (process / "mountinfo").read_text():
                found.add((process / "ns/mnt").readlink())
    return found


def done(process):
    out, err = process.communicate(timeout=120)
    return process.returncode, out, err


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_a_container_runs_numpy_and_its_code_is_passed_on(start, runtime):
    script = "import numpy, os, sys; print(numpy.arange(5).sum(), os.getcwd(), os.environ['GREETING']); sys.exit(7)"

    code, out, err = done(start(runtime, "python", "-c", script))

    assert (code, out) == (7, "10 /data hello\n"), err


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_a_container_is_kept_from_the_machine(start, runtime, tmp_path):
    script = """
import os
status = dict(line.split(":\\t", 1) for line in open("/proc/self/status"))
print(os.getpid(), int(status["CapEff"], 16) >> 21 & 1, os.uname().nodename)
print(open("/proc/self/limits").read().split("Max open files")[1].split()[:2])
print(sorted(os.listdir("/data")), os.listdir("/data/old"), oct(os.stat("/tmp").st_mode))
open("/data/made", "w").write("x")
for path in ("/proc/sys/kernel/hostname", "/sys/made"):
    try:
        open(path, "w")
        print("written")
    except OSError:
        print("refused")
print(open("/given").read())
"""
    (tmp_path / "given").write_text("bound")
    options = (f"--bind={tmp_path / 'given'}:/given:ro",)

    code, out, err = done(start(runtime, "python", "-c", script, options=options))

    assert code == 0, err
    first, limits, data, *rest = out.splitlines()
    assert re.fullmatch(r"1 0 omniload-run-\w+", first)
    assert limits == str([str(n) for n in resource.getrlimit(resource.RLIMIT_NOFILE)])
    assert data == "['cold', 'kept', 'old'] ['new'] 0o41777"
    assert rest == ["refused", "refused", "bound"]
    assert not Path("/data/made").exists()


def test_an_image_says_as_whom_and_where_it_runs(start):
    code, out, err = done(start("crun", "sh", "-c", "pwd; cat /proc/self/status", tag="ann"))

    assert code == 0, err
    assert out.startswith("/made/by/it\n")
    assert re.search(r"^Uid:\t1000\t1000\t", out, re.MULTILINE)
    assert re.search(r"^Gid:\t1000\t1000\t", out, re.MULTILINE)
    assert re.search(r"^CapEff:\t0+$", out, re.MULTILINE)


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_input_and_signals_reach_the_command(start, runtime):
    script = "trap 'echo told; exit 3' TERM; read line; echo $line; read line"
    with start(runtime, "sh", "-c", script) as process:
        process.stdin.write("hi\n")
        process.stdin.flush()
        assert process.stdout.readline() == "hi\n"
        process.send_signal(signal.SIGTERM)
        out = process.stdout.read()  # its input stays open: an end of that would end it, too

        code, _, err = done(process)

    assert (code, out) == (3, "told\n"), err


def test_a_container_that_is_deaf_is_killed_by_the_second_signal(start):
    with start("runc", "sh", "-c", "echo up; exec cat") as process:
        assert process.stdout.readline() == "up\n"
        process.send_signal(signal.SIGTERM)
        process.send_signal(signal.SIGHUP)
        process.stdout.read()  # its input stays open: an end of that would end it, too

        code, _, err = done(process)

    assert code == 128 + signal.SIGKILL, err


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_when_we_are_killed_the_container_ends_and_nothing_stays(start, runtime):
    with start(runtime, "sh", "-c", "echo up; exec cat") as process:
        assert process.stdout.readline() == "up\n"
        process.kill()
        # The last who holds its output is the one that tidies up.
        rest = process.stdout.read()
        _, _, err = done(process)

    assert rest == ""
    assert process.returncode == -signal.SIGKILL, err


@pytest.mark.parametrize("runtime", [*RUNTIMES, None])
def test_what_the_machine_unmounts_meanwhile_is_held_by_no_start(start, runtime, shared):
    """Else the daemon of a mount would live, and an unmount wait, as long as any job that began before."""
    other = shared / "other"
    other.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "other", other], check=True)
    with start(runtime, "sh", "-c", "echo up; exec cat") as process:
        assert process.stdout.readline() == "up\n"
        assert len(holders(other)) > 1

        subprocess.run(["umount", other], check=True)

        assert holders(other) == set()
        assert len(holders(shared)) > 1  # so it was looked for in the right place
        code, _, err = done(process)
    assert code == 0, err


@pytest.mark.parametrize("runtime", [*RUNTIMES, None])
def test_what_a_start_was_given_stays_as_it_was(start, runtime, shared):
    (shared / "other").mkdir()
    script = "echo up; read line; cat /given/other/file /given/other/* 2>&1; echo end"
    with start(runtime, "sh", "-c", script, options=(f"--bind={shared}:/given",)) as process:
        assert process.stdout.readline() == "up\n"
        subprocess.run(["mount", "-t", "tmpfs", "other", shared / "other"], check=True)
        (shared / "other/file").write_text("mounted later")
        process.stdin.write("go\n")

        code, out, err = done(process)

    assert code == 0, err
    assert "mounted later" not in out
    assert out.endswith("end\n")


def test_what_a_container_touches_is_recorded(start, tmp_path):
    options = ("-o", str(tmp_path / "trace"))

    code, _, err = done(start("runc", "cat", "/data/kept", verb="record", options=options))

    assert code == 0, err
    touched = {t.path for t in decode_trace((tmp_path / "trace").read_bytes(), name="it").touches}
    assert "data/kept" in touched
    assert "data/cold" not in touched


def test_a_command_that_is_not_there_is_said_so(start):
    code, _, err = done(start("runc", "not-there"))

    assert code != 0
    assert "not-there" in err

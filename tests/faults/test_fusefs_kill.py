"""kill -9 of the mount at any moment: no fsynced byte is lost, no half file is visible."""

import os
import random
import shutil
import signal
import subprocess
import sys
import threading

import pytest

from fusefs.mounts.lifecycle import MountConfig, start
from fusefs.stores.local.store import LocalStore
from fusefs.tools.fsck import verify
from fusefs.tree.namespace import StripedFiles
from tests.support.fusefs.builders import contents
from tests.support.fusefs.model import TINY, fast_directory

pytestmark = [
    pytest.mark.fuse,
    pytest.mark.slow,
    pytest.mark.skipif(
        not os.access("/dev/fuse", os.R_OK | os.W_OK) or shutil.which("fusermount3") is None,
        reason="MOUNT NOT TESTED: no /dev/fuse or fusermount3",
    ),
]

WRITER = """
import os, sys
root, ledger = sys.argv[1], os.open(sys.argv[2], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
def line(*words):
    os.write(ledger, (" ".join(map(str, words)) + "\\n").encode())
def block(number, size):
    return (b"%08d" % number) * (size // 8)
number = 0
while True:
    number += 1
    if number == 3:
        print("has written", flush=True)
    size = (number * 2477 % 40_000 + 16) // 8 * 8
    name = f"f{number % 5}"
    if number % 3 == 0:                      # temp, fsync, rename: the checkpoint's way
        with open(f"{root}/{name}.tmp", "wb", buffering=0) as f:
            f.write(block(number, size))
            os.fsync(f.fileno())
        line("begin", name, number, size)
        os.rename(f"{root}/{name}.tmp", f"{root}/{name}")
        line("done", name, number, size)
    elif number % 3 == 1:                    # rewritten in place and closed
        line("begin", name, number, size)
        with open(f"{root}/{name}", "wb", buffering=0) as f:
            f.write(block(number, size))
        line("done", name, number, size)
    else:                                    # a log, synced after every line
        line("begin", "log", number, 8)
        with open(f"{root}/log", "ab", buffering=0) as f:
            f.write(block(number, 8))
            os.fsync(f.fileno())
        line("done", "log", number, 8)
"""


def block(number, size):
    return (b"%08d" % number) * (size // 8)


def one_life(base, seed):
    """Mount, let a writer run, kill the daemon after some of its writes."""
    config = MountConfig(
        store=str(base / "store"),
        mountpoint=str(base / "mount"),
        files=TINY,
        bridge=("pyfuse3", "device")[seed % 2],
    )
    daemon = start(config, log_path=os.devnull)
    writer = subprocess.Popen(
        [sys.executable, "-c", WRITER, base / "mount", base / "ledger"],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    # A busy machine takes long to start an interpreter: the clock begins with its first writes.
    assert writer.stdout is not None
    assert writer.stdout.readline() == b"has written\n"
    killer = threading.Timer(0.15 + random.Random(seed).random() / 2, daemon.kill)
    killer.start()
    writer.wait(timeout=60)  # its next call after the kill fails, and it ends
    killer.join()
    writer.stdout.close()
    daemon.wait()
    assert daemon.returncode == -signal.SIGKILL
    subprocess.run(["fusermount3", "-uz", base / "mount"], check=True)


def acceptable(ledger):
    """What each file may hold: its last finished write, or the one under way when the end came."""
    settled, possible, log = {}, {}, []
    for line in ledger.read_text().splitlines():
        word, name, number, size = line.split()
        if name == "log":
            log.append((word, int(number)))
        elif word == "begin":
            possible[name] = (int(number), int(size))
        else:
            settled[name] = (int(number), int(size))
            possible.pop(name, None)
    return settled, possible, log


def exists(files, name):
    try:
        files.stat(name)
    except FileNotFoundError:
        return False
    return True


def test_no_fsynced_byte_is_lost_and_no_half_file_is_seen_however_often_the_mount_is_killed():
    base = fast_directory("fusefs-kill-")
    for name in ("store", "mount"):
        (base / name).mkdir()
    try:
        for seed in range(4):
            (base / "ledger").unlink(missing_ok=True)
            shutil.rmtree(base / "store")
            (base / "store").mkdir()
            one_life(base, seed)

            settled, possible, log = acceptable(base / "ledger")
            assert settled, "the writer did nothing before the kill"
            files = StripedFiles(LocalStore(base / "store"))
            for name in {*settled, *possible}:
                allowed = [block(*v) for v in (settled.get(name), possible.get(name)) if v]
                if name not in settled:
                    allowed.append(None)
                found = contents(files, name) if exists(files, name) else None
                assert found in allowed, (seed, name, settled.get(name), possible.get(name))
            finished = b"".join(block(n, 8) for word, n in log if word == "done")
            begun = b"".join(block(n, 8) for word, n in log if word == "begin")
            found = contents(files, "log") if exists(files, "log") else b""
            assert found.startswith(finished)
            assert begun.startswith(found)
            report = verify(files, read_data=True)
            assert report.harmful == []
            verify(files, repair=True, grace_s=-60)
            assert verify(files, grace_s=-60).faults == []
            files.close()
    finally:
        subprocess.run(["fusermount3", "-uz", base / "mount"], check=False, capture_output=True)
        shutil.rmtree(base, ignore_errors=True)

"""Many processes open one file of a mount at the same moment: what they ask of the store."""
# ruff: noqa: PTH123 -- the calls of the operating system are what is tested

import os
import shutil
import threading
import time

import orjson
import pytest

from fusefs.bridge.process.launch import start_daemon
from fusefs.mounts.lifecycle import umount
from tests.support.fusefs.herd import DATA, NAME

pytestmark = [
    pytest.mark.fuse,
    pytest.mark.skipif(
        not os.access("/dev/fuse", os.R_OK | os.W_OK) or shutil.which("fusermount3") is None,
        reason="MOUNT NOT TESTED: no /dev/fuse or fusermount3",
    ),
]
SIZE = 12


@pytest.mark.parametrize("bridge", ["pyfuse3", "device"])
def test_a_herd_asks_the_store_twice_and_all_of_it_reads_the_file(bridge, tmp_path):
    told = orjson.dumps({"mountpoint": str(tmp_path), "bridge": bridge, "size": SIZE})
    daemon = start_daemon("tests.support.fusefs.herd", told, str(tmp_path))
    try:
        path, found, begin_s = tmp_path / NAME, [], time.monotonic()
        assert path.stat().st_size == len(DATA)
        os.getxattr(path, "user.begin")

        def one():
            with open(path, "rb") as file:
                found.append(file.read())

        members = [threading.Thread(target=one) for _ in range(SIZE)]
        for member in members:
            member.start()
        for member in members:
            member.join(60)

        took_s = time.monotonic() - begin_s
        assert found == [DATA] * SIZE
        counts = orjson.loads(os.getxattr(path, "user.counts"))
        # The first opens it (its manifest may be known), the second looks for all others.
        # One more for each second: the kernel asks for attributes that are that old.
        assert 2 <= counts["stat"] <= 3 + took_s
        assert counts.get("read", 0) <= 1
    finally:
        umount(str(tmp_path))
        assert daemon.wait(timeout=60) == 0

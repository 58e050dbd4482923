"""Processes that share a block store and are killed while they write harm nobody."""

import os
import signal
import subprocess
import sys

import pytest

from snapshot.image.block.store import BlockStore
from snapshot.oci.digest import digest_of

WRITER = """
import os, sys
from snapshot.image.block.store import BlockStore
from snapshot.oci.digest import digest_of
store = BlockStore(sys.argv[1], 2_000_000)
number = int(sys.argv[2])
print("ready", flush=True)
while True:
    data = number.to_bytes(8, "big") * 2000
    store.put_all({digest_of(data): data})
    number += 1
    if number % 50 == 0:
        print(number, flush=True)
"""


@pytest.mark.scripts_start_warm
def test_writers_killed_at_any_moment_leave_a_store_that_is_right_and_under_its_cap(tmp_path):
    folder = tmp_path / "blocks"
    for rounds in range(3):
        writers = [
            subprocess.Popen(
                [sys.executable, "-c", WRITER, str(folder), str((rounds * 2 + i) * 10_000)],
                stdout=subprocess.PIPE,
            )
            for i in range(2)
        ]
        for writer in writers:
            # Ready, and then a few hundred blocks: the second writer's lines come at other times.
            for _ in range(5):
                assert writer.stdout.readline()
        for writer in writers:
            os.kill(writer.pid, signal.SIGKILL)
            writer.wait()
            writer.stdout.close()

    store = BlockStore(folder, 2_000_000)

    files = [path for path in folder.glob("??/*") if path.is_file()]
    assert len(files) > 50
    assert store.used_bytes <= 2_000_000
    assert all(digest_of(path.read_bytes()) == f"sha256:{path.name}" for path in files)
    assert list((folder / "new").iterdir()) == []
    data = b"one more"
    assert store.put_all({digest_of(data): data})
    assert store.get(digest_of(data)) == data

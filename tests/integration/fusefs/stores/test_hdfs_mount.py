"""The mount over a real HDFS: striped files, a killed data node, a name node that goes and comes back."""
# ruff: noqa: PTH116,PTH208 -- the calls of the operating system are what is tested

import contextlib
import errno
import os
import shutil
import signal
import uuid

import pytest

from fusefs.mounts.lifecycle import mount
from fusefs.stores.remote.arrow import arrow_store
from fusefs.tools.fsck import verify
from fusefs.tree.namespace import StripedFiles
from tests.support.fusefs.builders import contents
from tests.support.fusefs.model import TINY, Pair, run
from tests.support.hdfs.cluster import why_not

pytestmark = [
    pytest.mark.slow,
    pytest.mark.fuse,
    pytest.mark.skipif(why_not() is not None, reason=f"REAL HDFS NOT TESTED: {why_not()}"),
    pytest.mark.skipif(
        not os.access("/dev/fuse", os.R_OK | os.W_OK) or shutil.which("fusermount3") is None,
        reason="MOUNT NOT TESTED: no /dev/fuse or fusermount3",
    ),
]
DATA = os.urandom(9 << 20)
SETTINGS = {"give_up_after": 60.0}
BRIEF = {"give_up_after": 10.0}
"""Where nobody answers: a store that is well may take longer on a busy machine."""


@pytest.fixture
def cluster(mended_hdfs):
    return mended_hdfs


@pytest.fixture
def url(cluster):
    url = f"{cluster.url}/{uuid.uuid4().hex}"
    store = arrow_store(url)
    store.publish("seed", b"")
    store.remove("seed")
    return url


def test_a_file_striped_over_hdfs_reads_back_here_and_without_the_mount(url, tmp_path):
    with mount(url, tmp_path, SETTINGS) as root:
        (root / "step.tmp").mkdir()
        (root / "step.tmp/rank0").write_bytes(DATA)
        (root / "step.tmp").rename(root / "step")
        assert (root / "step/rank0").read_bytes() == DATA
        (root / "step/rank0").write_bytes(DATA[::-1])
        assert (root / "step/rank0").read_bytes() == DATA[::-1]

    with contextlib.closing(StripedFiles(arrow_store(url))) as files:
        assert files.manifest("step/rank0").segments[0].layout.stripe_count == 4
        assert contents(files, "step/rank0") == DATA[::-1]
        assert verify(files, read_data=True, grace_s=-60).faults == []


def test_a_file_that_lay_in_hdfs_before_is_read_as_it_is(url, tmp_path):
    arrow_store(url).publish("old", DATA)

    with mount(url, tmp_path, SETTINGS) as root:
        assert (root / "old").read_bytes() == DATA


def test_random_operations_over_hdfs_answer_as_a_plain_directory_does(url, tmp_path):
    for name in ("mount", "model"):
        (tmp_path / name).mkdir()
    with mount(url, tmp_path / "mount", {**SETTINGS, "files": TINY}) as root:
        pair = Pair(root, tmp_path / "model")
        run(pair, 250, seed=3, check_every=125)
        pair.empty()


def test_a_data_node_killed_while_a_file_is_read_loses_nothing(cluster, url, tmp_path):
    with mount(url, tmp_path, SETTINGS) as root:
        (root / "f").write_bytes(DATA)
    with mount(url, tmp_path, SETTINGS) as root, (root / "f").open("rb", buffering=0) as file:
        first = os.pread(file.fileno(), 1 << 20, 0)

        cluster.stop_process("datanode0", signal.SIGKILL)

        rest = b"".join(os.pread(file.fileno(), 1 << 20, i << 20) for i in range(1, 9))
        assert first + rest == DATA


def test_a_dead_name_node_is_a_timeout_never_a_missing_file_and_all_is_there_afterwards(
    cluster, url, tmp_path
):
    with mount(url, tmp_path, BRIEF) as root:
        (root / "f").write_bytes(DATA)
        cluster.stop_process("namenode", signal.SIGKILL)
        try:
            for call in (
                lambda: os.stat(root / "unknown"),
                lambda: os.listdir(root),
                lambda: (root / "new").write_bytes(b"1"),
            ):
                with pytest.raises(OSError, match=r".") as caught:
                    call()
                assert caught.value.errno == errno.ETIMEDOUT
        finally:
            cluster.mend()

        assert (root / "f").read_bytes() == DATA
        (root / "new").write_bytes(b"2")
        assert (root / "new").read_bytes() == b"2"

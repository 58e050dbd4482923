"""A store that goes away, or hangs: every call answers soon after its limit, and the mount can be ended."""
# ruff: noqa: PTH116,PTH208 -- the calls of the operating system are what is tested

import contextlib
import errno
import os
import signal
import socket
import time
import uuid
from pathlib import Path

import psutil
import pytest

from fusefs.mounts.lifecycle import MountConfig, start, umount
from fusefs.stores.retry import RetryingStore
from fusefs.stores.url import open_store
from omniload.base.errors import UnavailableError
from tests.support.fusefs.proof import NO_MOUNT, WHY_NO_MOUNT
from tests.support.fusefs.s3 import s3_server
from tests.support.hdfs.cluster import hdfs_cluster, why_not

LIMIT_S = 2.0
MARGIN_S = 25.0
"""Of a busy machine; with it less than the limit that holds where none is set, 30 s."""
LONG_S = 60.0
mounts = pytest.mark.skipif(NO_MOUNT, reason=WHY_NO_MOUNT)


class Asked:
    """Makes calls, and notes the longest."""

    def __init__(self):
        self.longest_s = 0.0

    def refused(self, error, call):
        begin = time.monotonic()
        with pytest.raises(error) as caught:
            call()
        self.longest_s = max(self.longest_s, time.monotonic() - begin)
        assert self.longest_s < LIMIT_S + MARGIN_S
        return caught.value


@pytest.fixture
def asked():
    return Asked()


@pytest.fixture(scope="module")
def s3(tmp_path_factory):
    with s3_server(tmp_path_factory.mktemp("s3")) as server:
        server.client.create_dir("bucket")
        yield server


@pytest.fixture
def url(s3):
    where = f"bucket/{uuid.uuid4().hex}"
    query = f"region=us-east-1&scheme=http&endpoint_override={s3.address}"
    return f"s3://k:s@{where}?{query}"


def states_of(pid):
    """Return the states in which the threads of a process are, by their letters."""
    found = set()
    for told in Path(f"/proc/{pid}/task").glob("*/stat"):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            found.add(told.read_text().rpartition(") ")[2][0])
    return found


@contextlib.contextmanager
def stopped(port):
    """Have the process that listens on a port hang."""
    (process,) = {
        psutil.Process(found.pid)
        for found in psutil.net_connections("tcp")
        if found.status == psutil.CONN_LISTEN and found.laddr.port == port
    }
    process.suspend()
    try:
        # Until all its threads have stopped, one of them may answer yet.
        while states_of(process.pid) != {"T"}:
            os.sched_yield()
        yield
    finally:
        process.resume()


def once_it_answers(call):
    """Return what a call of a store that is well brings: on a busy machine that may come after the limit set here."""
    until_s = time.monotonic() + LONG_S
    while True:
        try:
            return call()
        except (UnavailableError, TimeoutError):
            if time.monotonic() > until_s:
                raise


@contextlib.contextmanager
def silence():
    """Yield the port of one who takes connections and never answers."""
    with socket.create_server(("127.0.0.1", 0), backlog=64) as listener:
        yield listener.getsockname()[1]


CALLS = {
    "stat": lambda store: store.stat("f"),
    "listing": lambda store: store.listing(""),
    "read": lambda store: store.read("f", 0, 4),
    "publish": lambda store: store.publish("new", b"data"),
    "rename": lambda store: store.rename("f", "g"),
    "remove": lambda store: store.remove("f"),
}


def test_an_object_store_that_hangs_answers_within_the_limit_and_goes_on_when_it_comes_back(
    s3, url, asked
):
    RetryingStore(open_store(url)).publish("f", b"data")
    store = RetryingStore(open_store(url, give_up_after_s=LIMIT_S), give_up_after_s=LIMIT_S)

    with stopped(int(s3.address.rpartition(":")[2])):
        for call in CALLS.values():
            asked.refused(UnavailableError, lambda call=call: call(store))

    # It answers first what was asked of it meanwhile.
    assert once_it_answers(lambda: store.read("f", 0, 4)) == b"data"


SILENT = {
    "s3": "s3://k:s@bucket/x?region=us-east-1&scheme=http&endpoint_override=127.0.0.1:{port}",
    "hdfs+native": "hdfs+native://127.0.0.1:{port}/x",
    "webhdfs": "webhdfs://127.0.0.1:{port}/x",
    "sftp": "sftp://user:secret@127.0.0.1:{port}/x",
    "s3fs": "fsspec+s3://bucket/x",
}


@pytest.mark.parametrize("kind", SILENT)
def test_who_takes_connections_and_never_answers_is_waited_for_no_longer_than_the_limit(
    kind, asked, monkeypatch
):
    monkeypatch.setattr("fusefs.stores.url.GIVE_UP_AFTER_S", LIMIT_S)
    with silence() as port:
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{port}")
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "k")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "s")

        def ask():
            opened = open_store(SILENT[kind].format(port=port), give_up_after_s=LIMIT_S)
            RetryingStore(opened, give_up_after_s=LIMIT_S).stat("f")

        asked.refused(UnavailableError, ask)


@pytest.mark.fuse
@mounts
@pytest.mark.parametrize("bridge", ["device", "pyfuse3"])
def test_a_mount_of_a_store_that_hangs_answers_and_ends(s3, url, asked, tmp_path, bridge):
    (tmp_path / "mount").mkdir()
    settings = {"store": url, "mountpoint": str(tmp_path / "mount"), "bridge": bridge}
    config = MountConfig(**settings, give_up_after=LIMIT_S, files={"read_streams": 2})
    daemon = once_it_answers(lambda: start(config, log_path=str(tmp_path / "log")))
    root = tmp_path / "mount"
    once_it_answers(lambda: (root / "f").write_bytes(b"data"))
    file = once_it_answers(lambda: os.open(root / "f", os.O_RDONLY))

    with stopped(int(s3.address.rpartition(":")[2])):
        for call in (
            lambda: os.stat(root / "none"),
            lambda: os.listdir(root),
            lambda: (root / "new").write_bytes(b"x" * 4096),
        ):
            assert asked.refused(OSError, call).errno == errno.ETIMEDOUT
        os.close(file)
        begin = time.monotonic()
        with contextlib.suppress(UnavailableError):
            umount(str(root), within_s=60)
        daemon.wait(timeout=60)
        assert time.monotonic() - begin < 60

    assert not os.path.ismount(root)


# HDFS: the name node answers, the data node hangs


@pytest.fixture(scope="module")
def cluster():
    with hdfs_cluster(datanodes=1) as running:
        os.environ.update(running.client_environment())
        yield running


@pytest.mark.slow
@pytest.mark.skipif(why_not() is not None, reason=f"REAL HDFS NOT TESTED: {why_not()}")
@pytest.mark.parametrize("scheme", ["hdfs", "hdfs+native"])
@pytest.mark.parametrize("who", ["datanode0", "namenode"])
def test_hdfs_whose_node_hangs_answers_within_the_limit(cluster, asked, tmp_path, scheme, who):
    url = f"{cluster.url}/{uuid.uuid4().hex}".replace("hdfs:", f"{scheme}:")
    give_up = {"give_up_after_s": LIMIT_S}
    # A cluster that has just begun takes its time.
    RetryingStore(open_store(url)).publish("f", b"data")
    store = RetryingStore(open_store(url, **give_up), **give_up)
    (tmp_path / "mount").mkdir()
    settings = {"store": url, "mountpoint": str(tmp_path / "mount"), "give_up_after": LIMIT_S}
    log = str(tmp_path / "log")
    config = MountConfig(**settings)
    daemon = None if NO_MOUNT else once_it_answers(lambda: start(config, log_path=log))

    node = cluster.processes[who]
    node.send_signal(signal.SIGSTOP)
    # Until all its threads have stopped, one of them may answer yet.
    os.waitid(os.P_PID, node.pid, os.WSTOPPED | os.WNOWAIT)
    try:
        asked.refused(UnavailableError, lambda: store.read("f", 0, 4))
        asked.refused(UnavailableError, lambda: store.publish("new", b"data"))
        if daemon is not None:
            root = tmp_path / "mount"
            assert asked.refused(OSError, (root / "f").read_bytes).errno == errno.ETIMEDOUT
            with contextlib.suppress(UnavailableError):
                umount(str(root), within_s=60)
            daemon.wait(timeout=60)
    finally:
        cluster.processes[who].send_signal(signal.SIGCONT)

"""The store contract over a real HDFS: pyarrow with libhdfs, WebHDFS, and hdfs-native where installed."""

import importlib.util
import json
import os
import signal
import subprocess
import sys
import urllib.request
import uuid

import pytest
from typing_extensions import override

from fusefs.stores.remote.arrow import arrow_store
from fusefs.stores.remote.fsspec_store import fsspec_store
from omniload.base.errors import UnavailableError
from tests.support.fusefs.store_contract import StoreContract
from tests.support.hdfs.cluster import why_not

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(why_not() is not None, reason=f"REAL HDFS NOT TESTED: {why_not()}"),
]


@pytest.fixture
def cluster(mended_hdfs):
    return mended_hdfs


class TestHdfsThroughPyarrow(StoreContract):
    @pytest.fixture
    def store(self, cluster):
        store = arrow_store(f"{cluster.url}/{uuid.uuid4().hex}")
        store.publish("seed", b"")
        store.remove("seed")
        return store

    def test_a_missing_root_is_an_empty_store(self, cluster):
        store = arrow_store(f"{cluster.url}/{uuid.uuid4().hex}")

        store.publish("a", b"1")

        assert store.read("a", 0, 1) == b"1"

    def test_ranges_past_the_64_kib_of_a_sequential_read_come_whole(self, store):
        data = os.urandom(3 << 20)
        store.publish("big", data)

        assert store.read("big", 5, 2 << 20) == data[5 : 5 + (2 << 20)]

    @pytest.mark.scripts_start_warm
    @pytest.mark.parametrize(("query", "copies"), [("", 2), ("?replication=1", 1)])
    def test_a_block_has_as_many_copies_as_the_site_or_the_url_says(self, cluster, query, copies):
        root = uuid.uuid4().hex
        text = "import sys; from fusefs.stores.remote.arrow import arrow_store as s; s(sys.argv[1]).publish('a', b'1')"
        # A process of its own: a Java machine keeps the site that was its first.
        subprocess.run(
            [sys.executable, "-c", text, f"{cluster.url}/{root}{query}"],
            env={**os.environ, **cluster.client_environment()},
            check=True,
            timeout=60,
        )

        status = f"{cluster.webhdfs_url}/v1/{root}/a?op=GETFILESTATUS".replace("webhdfs://", "")
        address = status.replace("/v1/", "/webhdfs/v1/", 1)
        with urllib.request.urlopen(f"http://{address}", timeout=30) as answer:
            assert json.load(answer)["FileStatus"]["replication"] == copies


class TestWebHdfsThroughFsspec(StoreContract):
    @pytest.mark.xfail(reason="WebHDFS of Hadoop 2.7 redirects such names wrongly", strict=True)
    @override
    def test_names_may_hold_blanks_percent_signs_and_letters_of_any_script(self, store):
        super().test_names_may_hold_blanks_percent_signs_and_letters_of_any_script(store)

    def test_a_name_that_a_data_node_refuses_is_an_error_and_never_its_error_page(self, store):
        store.publish("d/a+ü.txt", b"1")

        with pytest.raises(UnavailableError, match="404"):
            store.read("d/a+ü.txt", 0, 1)

    @pytest.fixture
    def store(self, cluster):
        pytest.importorskip("requests")
        root = uuid.uuid4().hex
        store = fsspec_store(
            f"{cluster.webhdfs_url}/{root}", {"user": os.environ.get("USER", "root")}
        )
        store.publish("seed", b"")
        store.remove("seed")
        return store


@pytest.mark.skipif(
    importlib.util.find_spec("hdfs_native") is None, reason="hdfs-native is not installed"
)
class TestHdfsNativeThroughFsspec(StoreContract):
    @pytest.fixture
    def store(self, cluster):
        store = fsspec_store(f"{cluster.url}/{uuid.uuid4().hex}")
        store.publish("seed", b"")
        store.remove("seed")
        return store


def test_a_data_node_killed_between_reads_loses_nothing(cluster):
    store = arrow_store(f"{cluster.url}/{uuid.uuid4().hex}")
    data = os.urandom(4 << 20)
    store.publish("big", data)

    cluster.stop_process("datanode0", signal.SIGKILL)

    assert store.read("big", 0, len(data)) == data


def test_a_dead_name_node_is_unavailable_and_after_its_return_all_is_there(cluster):
    store = arrow_store(f"{cluster.url}/{uuid.uuid4().hex}")
    store.publish("a", b"1")
    cluster.stop_process("namenode", signal.SIGKILL)

    try:
        with pytest.raises(UnavailableError):
            store.stat("a")
        with pytest.raises(UnavailableError):
            store.read("a", 0, 1)
        with pytest.raises(UnavailableError):
            store.listing("")
    finally:
        cluster.mend()

    assert store.read("a", 0, 1) == b"1"

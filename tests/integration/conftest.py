"""What several folders of integration tests share."""

import importlib.util
import os
import tempfile
from pathlib import Path

import pytest

from tests.support.fusefs.gcs import gcs_server
from tests.support.fusefs.s3 import s3_server
from tests.support.hdfs.cluster import hdfs_cluster, why_not
from tests.support.plane.two_hosts import two_hosts


@pytest.fixture(scope="session")
def hdfs():
    """One HDFS for all tests: each of its nodes takes two to three seconds of a processor to start."""
    if (reason := why_not()) is not None:
        pytest.skip(f"REAL HDFS NOT TESTED: {reason}")
    with hdfs_cluster(datanodes=2) as running:
        os.environ.update(running.client_environment())
        yield running


@pytest.fixture(scope="session")
def s3_of_all(tmp_path_factory):
    """One server of S3, moto's, for tests that have a bucket or a prefix of their own: it loads for two seconds."""
    if importlib.util.find_spec("moto") is None:
        pytest.skip("S3 NOT TESTED: moto is not installed")
    with s3_server(tmp_path_factory.mktemp("s3")) as server:
        yield server


@pytest.fixture(scope="session")
def gcs_url(tmp_path_factory):
    """URL of one emulator of Google's Cloud Storage, for tests that have a prefix of their own."""
    missing = [
        name for name in ("gcsfs", "gcp_storage_emulator") if not importlib.util.find_spec(name)
    ]
    if missing:
        pytest.skip(f"GCS NOT TESTED: {' and '.join(missing)} not installed")
    with gcs_server(tmp_path_factory.mktemp("gcs")) as url:
        yield url


@pytest.fixture(scope="module")
def mended_hdfs(hdfs):
    """The same, for tests that kill its nodes: it is whole again when those of a module have ended."""
    yield hdfs
    hdfs.mend()


@pytest.fixture(scope="module")
def hosts():
    """Two hosts, by name: they share a wire and nothing else, so that no test finds what another's left on its own."""
    if os.geteuid() != 0:
        pytest.skip("NOT TESTED: network namespaces need root")
    with two_hosts() as names:
        yield names


@pytest.fixture
def scratch():
    """A folder for temporary files of one test: short, for Ray's sockets, and no other test's."""
    with tempfile.TemporaryDirectory(prefix="test", dir="/tmp") as folder:
        yield Path(folder)

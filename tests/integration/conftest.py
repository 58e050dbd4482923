"""What several folders of integration tests share."""

import os

import pytest

from tests.support.hdfs.cluster import hdfs_cluster, why_not


@pytest.fixture(scope="session")
def hdfs():
    """One HDFS for all tests: each of its nodes takes two to three seconds of a processor to start."""
    if (reason := why_not()) is not None:
        pytest.skip(f"REAL HDFS NOT TESTED: {reason}")
    with hdfs_cluster(datanodes=2) as running:
        os.environ.update(running.client_environment())
        yield running


@pytest.fixture(scope="module")
def mended_hdfs(hdfs):
    """The same, for tests that kill its nodes: it is whole again when those of a module have ended."""
    yield hdfs
    hdfs.mend()

"""What several folders of integration tests share."""

import pytest

from tests.support.hdfs.cluster import hdfs_cluster, why_not


@pytest.fixture(scope="session")
def hdfs():
    """One HDFS for all tests that leave it whole: four seconds of a processor to start, and as much again to end."""
    if (reason := why_not()) is not None:
        pytest.skip(f"REAL HDFS NOT TESTED: {reason}")
    with hdfs_cluster(datanodes=1) as running:
        yield running

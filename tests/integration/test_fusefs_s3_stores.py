"""The store contract over S3 through pyarrow, against moto's server where it is installed."""

import importlib.util
import os
import uuid

import pytest

from fusefs.stores.arrow import store_on
from tests.support.fusefs_builders import contents, object_paths, some_files
from tests.support.fusefs_s3 import s3_server
from tests.support.fusefs_store_contract import StoreContract

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("moto") is None, reason="S3 NOT TESTED: moto is not installed"
    ),
]


@pytest.fixture(scope="module")
def s3(tmp_path_factory):
    with s3_server(tmp_path_factory.mktemp("s3")) as server:
        yield server.client


@pytest.fixture
def store(s3):
    bucket = uuid.uuid4().hex
    s3.create_dir(bucket)
    return store_on(s3, bucket, f"s3://{bucket}")


class TestS3ThroughPyarrow(StoreContract):
    @pytest.fixture
    def store(self, store):
        return store


def test_a_striped_file_lives_on_s3_and_its_directory_renames(store):
    data = os.urandom(50_000)
    with some_files(store) as files:
        files.write_file("step.tmp/rank0", data)
        files.rename("step.tmp", "step")

        assert contents(files, "step/rank0") == data
        assert len(object_paths(store)) == 3
        files.remove("step/rank0")
        assert object_paths(store) == []

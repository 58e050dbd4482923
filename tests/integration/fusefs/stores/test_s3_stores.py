"""The store contract over S3 through pyarrow, against moto's server where it is installed."""

import os
import uuid

import pytest

from fusefs.stores.remote.arrow import store_on
from omniload.base.errors import IntegrityError
from tests.support.fusefs.builders import contents, object_paths, some_files
from tests.support.fusefs.store_contract import StoreContract

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def s3(s3_of_all):
    return s3_of_all.client


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
        files.names.rename("step.tmp", "step")

        assert contents(files, "step/rank0") == data
        assert len(object_paths(store)) == 3
        files.names.remove("step/rank0")
        assert object_paths(store) == []


@pytest.mark.parametrize("read", ["read", "read_large"])
def test_what_was_replaced_while_it_was_open_is_read_as_it_is_now(store, read):
    asked = getattr(store, read)
    store.publish("f", b"a" * 4000)
    assert asked("f", 0, 4000) == b"a" * 4000

    store.publish("f", b"b" * 2000)
    assert asked("f", 0, 2000) == b"b" * 2000
    store.publish("f", b"c" * 8000)
    assert asked("f", 3000, 5000) == b"c" * 5000
    store.remove("f")
    with pytest.raises(FileNotFoundError):
        asked("f", 0, 2000)


@pytest.mark.parametrize("read", ["read", "read_large"])
@pytest.mark.parametrize("kept", [1, 999])
def test_what_was_replaced_by_less_while_it_was_open_is_not_read_past_its_end(store, read, kept):
    asked = getattr(store, read)
    store.publish("f", b"a" * 2000)
    assert asked("f", 0, 2000) == b"a" * 2000

    store.publish("f", b"b" * (1000 + kept))

    with pytest.raises(IntegrityError, match=f"{kept} of the 1000 bytes wanted at offset 1000"):
        asked("f", 1000, 1000)


@pytest.mark.parametrize("read", ["read", "read_large"])
def test_any_last_byte_is_read(store, read):
    data = bytes(range(256))
    store.publish("f", data)

    for size_bytes in range(160, 176):
        assert getattr(store, read)("f", 0, size_bytes) == data[:size_bytes]

"""Snapshots on an object store over the network."""

import importlib.util
import uuid
from contextlib import contextmanager
from pathlib import Path

import pytest

from fusefs.stores.remote.arrow import store_on
from fusefs.stores.retry import RetryingStore
from snapshot.env.store.repository import Repository
from tests.support.fusefs.s3 import s3_server
from tests.support.snapshot.env_builders import (
    a_restorer,
    an_environment,
    an_installation,
    contents,
    remake,
)

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[4]


@pytest.mark.skipif(
    importlib.util.find_spec("moto") is None, reason="S3 NOT TESTED: moto is not installed"
)
def test_a_snapshot_travels_through_an_object_store(tmp_path):
    with s3_server(tmp_path) as server:
        s3 = server.client
        bucket = uuid.uuid4().hex
        s3.create_dir(bucket)

        @contextmanager
        def opened():
            yield Repository(RetryingStore(store_on(s3, bucket, f"s3://{bucket}")))

        environment = an_environment(tmp_path)
        restorer = a_restorer(environment, tmp_path)
        restorer.opened = opened
        made = restorer.restore_or_install(an_installation(environment), "")
        held = contents(environment)
        remake(environment, tmp_path)
        restored = restorer.restore_or_install(an_installation(environment), "", "copy")

        assert (made.form, made.saved) == ("command", True)
        assert (restored.form, restored.key) == ("copy", made.key)
        assert restored.stored_bytes > 0
        assert (
            contents(environment).items()
            >= {name: each for name, each in held.items() if each[0] != "directory"}.items()
        )
        with opened() as repository:
            assert repository.all_keys() == [made.key]
            assert repository.full_key(made.key[:9]) == made.key

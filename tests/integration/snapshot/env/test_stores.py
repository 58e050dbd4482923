"""Snapshots on an object store over the network, and for the tasks of a Ray cluster."""

import importlib.util
import json
import os
import subprocess
import sys
import uuid
from contextlib import contextmanager
from pathlib import Path

import pytest

from fusefs.stores.remote.arrow import store_on
from fusefs.stores.retry import RetryingStore
from snapshot.env.node.cache import CACHE_VARIABLE
from snapshot.env.store.repository import Repository
from tests.support.fusefs.s3 import s3_server
from tests.support.snapshot.env_builders import (
    a_restorer,
    an_environment,
    an_installation,
    contents,
    remake,
)
from tests.support.snapshot.env_wheels import a_quick_pip, a_venv, a_wheel

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


DRIVER = """
import json, sys
from omniload.actors.ray.cluster import PrivateCluster
from omniload.actors.ray.environment import ray
store, key = sys.argv[1:3]
cluster = PrivateCluster(object_store_bytes=80 << 20, workers=1)
@ray.remote
def task():
    import tiny
    return tiny.VERSION, tiny.__file__
@ray.remote
def plain():
    import importlib.util
    return importlib.util.find_spec("tiny") is None
declared = {"omniload_env": {"store": store, "key": key}}
found = [*ray.get(task.options(runtime_env=declared).remote(), timeout=200),
         ray.get(plain.remote(), timeout=200)]
try:
    ray.get(task.options(runtime_env={"omniload_env": {"store": store, "key": "short"}}).remote())
    found.append("accepted")
except Exception as error:
    found.append(type(error).__name__)
print(json.dumps(found), flush=True)
cluster.close()
"""


@pytest.mark.ray
def test_a_ray_task_imports_a_package_that_is_only_in_the_snapshot(tmp_path):
    pytest.importorskip("ray")
    python = a_venv(tmp_path / "venv")
    a_wheel(tmp_path / "wheels", "tiny")
    (tmp_path / "store").mkdir()
    known = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        CACHE_VARIABLE: str(tmp_path / "cache"),
        "RAY_RUNTIME_ENV_PLUGINS": json.dumps(
            [{"class": "snapshot.env.flow.ray_plugin.EnvironmentPlugin"}]
        ),
        "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
        "RAY_USAGE_STATS_ENABLED": "0",
    }
    saving = [sys.executable, "-c", "from omniload.base.cli import main; main()", "env", "save"]
    saving += ["-o", "store", "--python", "venv", "--", *a_quick_pip(tmp_path, python), "tiny"]
    saved = subprocess.run(
        saving, cwd=tmp_path, env=known, capture_output=True, text=True, check=True
    )
    key = saved.stdout.split()[0]
    a_venv(tmp_path / "venv")

    done = subprocess.run(
        [python, "-c", DRIVER, tmp_path / "store", key],
        cwd=tmp_path,
        env=known,
        capture_output=True,
        text=True,
        check=False,
        timeout=280,
    )

    assert done.returncode == 0, done.stderr[-3000:]
    version, file, plain_has_none, refused = json.loads(done.stdout.splitlines()[-1])
    assert version == "1.0"
    assert Path(file).is_relative_to(tmp_path / "cache" / "trees" / key)
    assert plain_has_none
    assert refused != "accepted"

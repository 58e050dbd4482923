"""Striped checkpoints over a real HDFS: saved by ranks, loaded without a mount and through one."""

import os
import shutil
import uuid

import pytest
import torch
from click.testing import CliRunner
from safetensors import safe_open

from fusefs.cli import command
from fusefs.mounts.lifecycle import mount
from fusefs.stores.url import open_store
from fusefs.tools.fsck import verify
from omniload.base.errors import IntegrityError, StateError
from tests.support.fusefs.builders import contents
from tests.support.hdfs.cluster import why_not
from tests.support.trainer.processes.striped_rank import (
    STRIPING,
    Job,
    empty,
    full,
    require_loads,
    run,
)
from trainer_integration.checkpoint.striped.place import open_striped, read_index
from trainer_integration.checkpoint.striped.writer import load_striped, save_striped

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(why_not() is not None, reason=f"REAL HDFS NOT TESTED: {why_not()}"),
]
SHARD = "shard-00002-of-00002.safetensors"


@pytest.fixture
def cluster(hdfs):
    return hdfs


@pytest.fixture
def store(cluster):
    name = uuid.uuid4().hex
    open_store(cluster.url).make_directory(name)
    return f"{cluster.url}/{name}"


def test_what_ranks_saved_to_hdfs_loads_here_and_one_lost_object_is_named(cluster, store):
    url = f"omnifs://runs/a::{store}"
    run(Job(what="save", url=url, world_size=2, environment=dict(cluster.client_environment())))
    files, folder = open_striped(url, STRIPING)

    assert set(read_index(files, folder).files) == {SHARD, "shard-00001-of-00002.safetensors"}
    require_loads(files, folder)
    assert verify(files, read_data=True, grace_s=-60).faults == []

    export = ["export", f"{folder}/{SHARD}", f"{store}/plain/{SHARD}", "--store", store]
    assert CliRunner().invoke(command, export).exit_code == 0
    assert isinstance(CliRunner().invoke(command, export).exception, StateError)
    assert CliRunner().invoke(command, [*export, "--force"]).exit_code == 0
    assert files.stat(f"plain/{SHARD}").stored == "plain"
    assert contents(files, f"plain/{SHARD}") == contents(files, f"{folder}/{SHARD}")

    lost = files.manifest(f"{folder}/{SHARD}").object_paths()[2]
    files.store.remove(lost)
    with pytest.raises(IntegrityError, match=f"{SHARD}.*{lost}.*missing"):
        load_striped(empty(), files, folder)


@pytest.mark.fuse
@pytest.mark.skipif(
    not os.access("/dev/fuse", os.R_OK | os.W_OK) or shutil.which("fusermount3") is None,
    reason="MOUNT NOT TESTED: no /dev/fuse or fusermount3",
)
def test_a_shard_is_mapped_through_a_mount_of_the_same_store_and_exported_from_there(
    store, tmp_path, tmp_path_factory
):
    files, folder = open_striped(f"omnifs://runs/b::{store}", STRIPING)
    save_striped(full(), files, folder)

    with mount(store, tmp_path, {"give_up_after": 60.0}) as root:
        shard = root / folder / "shard-00001-of-00001.safetensors"
        with safe_open(shard, framework="pt") as mapped:
            found = {name: mapped.get_tensor(name).clone() for name in mapped.keys()}  # noqa: SIM118
        out = tmp_path_factory.mktemp("exported")
        done = CliRunner().invoke(command, ["export", str(root / folder), str(out / "b")])
        assert done.exit_code == 0, done.exception
        assert (out / "b" / shard.name).read_bytes() == shard.read_bytes()
        assert (out / "b/index.json").read_bytes() == contents(files, f"{folder}/index.json")

    assert found.keys() == full().keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in full().items())

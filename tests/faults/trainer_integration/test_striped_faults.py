"""Striped checkpoints of real ranks: killed in mid-save, damaged on the store."""

import pytest

from fusefs.tools.fsck import verify
from omniload.base.errors import IntegrityError, StateError
from tests.support.trainer.processes.striped_rank import (
    PATIENCE_S,
    STRIPING,
    Job,
    empty,
    full,
    ranks,
    require_loads,
    run,
)
from trainer_integration.checkpoint.place import place_of
from trainer_integration.checkpoint.striped.place import open_striped, read_index
from trainer_integration.checkpoint.striped.writer import load_striped, save_striped

SHARDS = ["shard-00001-of-00002.safetensors", "shard-00002-of-00002.safetensors"]
# One stream, so that an object is begun when those before it are there.
ONE_STREAM = {**STRIPING, "write_streams": 1}


@pytest.fixture
def url(tmp_path):
    (tmp_path / "store").mkdir()
    return f"omnifs://ckpt::file://{tmp_path}/store"


@pytest.mark.parametrize("pause_at", [("create", 3), ("publish", 2)], ids=["objects", "commit"])
def test_a_save_killed_before_its_commit_leaves_nothing_that_loads_and_the_next_is_whole(
    tmp_path, url, pause_at
):
    with ranks(Job(what="save", url=url, pause_at=pause_at, config=ONE_STREAM)) as [(rank, told)]:
        assert told.poll(PATIENCE_S)
        assert told.recv() == "paused"
        rank.kill()
        rank.join()
    files, folder = open_striped(url, STRIPING)
    left = [path for path in (tmp_path / "store/.omnifs").rglob("*") if path.is_file()]

    assert left
    with pytest.raises(StateError, match=r"ckpt holds no index\.json.*interrupted"):
        load_striped(empty(), files, folder)
    save_striped(full(), files, folder)
    assert verify(files, repair=True, grace_s=-60).harmful == []
    require_loads(files, folder)


def test_what_two_ranks_saved_one_and_three_load(url):
    run(Job(what="save", url=url, world_size=2))
    files, folder = open_striped(url, STRIPING)

    assert sorted(read_index(files, folder).files) == SHARDS
    require_loads(files, folder)
    run(Job(what="load", url=url, world_size=3))


def test_two_ranks_of_a_run_keep_one_checkpoint_and_load_it(url):
    run(Job(what="run", url=url, world_size=2))

    place = place_of(url)
    assert place.steps() == (2,)
    assert place.unfinished() == ()


def test_one_wrong_bit_in_one_object_is_an_error_that_names_shard_and_object(tmp_path, url):
    files, folder = open_striped(url, STRIPING)
    save_striped(full(), files, folder)
    victim = files.manifest(f"{folder}/shard-00001-of-00001.safetensors").object_paths()[3]
    file = tmp_path / "store" / victim
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)

    with pytest.raises(IntegrityError, match=f"shard-00001-of-00001.*{victim}.*checksum"):
        load_striped(empty(), files, folder)

"""Checkpoints of a run on a striped namespace: resumed to the last bit, committed by their index."""

import pytest
import torch

from fusefs.stores.memory import MemoryStore
from omniload.base.errors import IntegrityError, StateError, UnavailableError
from tests.support.fusefs.builders import object_paths, some_files
from tests.support.fusefs.faulty_store import FaultyStore, Outage
from tests.support.trainer.moe_builders import a_config, a_run, train_on
from trainer_integration.checkpoint.place import FolderPlace, StorePlace, is_store, place_of
from trainer_integration.checkpoint.striped.writer import StripedCheckpoints, save_striped

LOADER = {"version": 1, "cursors": {"web": [3, 1 << 40]}, "note": "caf\u00e9"}


@pytest.fixture
def files():
    with some_files() as built:
        yield built


def checkpoints_in(files, folder="run", **changes):
    return StripedCheckpoints(StorePlace(files, folder), a_config().model_dump(), **changes)


@pytest.mark.parametrize("folder", ["run/checkpoints", ""])
def test_a_run_that_is_resumed_goes_on_to_the_last_bit(files, folder):
    model, optimizer = a_run()
    checkpoints_in(files, folder).save(1, model, optimizer, LOADER)
    resumed, resumed_optimizer = a_run(seed=9, steps=0)

    restored = checkpoints_in(files, folder).load(resumed, resumed_optimizer)

    assert (restored.step, restored.loader_state) == (1, LOADER)
    expected, found = train_on(model, optimizer, 1), train_on(resumed, resumed_optimizer, 1)
    assert found.figures == expected.figures
    assert all(
        torch.equal(a, b) for a, b in zip(model.parameters(), resumed.parameters(), strict=True)
    )


def test_where_nothing_was_saved_nothing_is_loaded(files):
    model, optimizer = a_run(steps=0)

    assert checkpoints_in(files).load(model, optimizer) is None
    assert StorePlace(files, "run").steps() == ()


def test_the_newest_stay_and_the_objects_of_others_go(files):
    model, optimizer = a_run()
    kept = checkpoints_in(files, keep=2)
    sizes = []
    for step in (1, 2, 3):
        kept.save(step, model, optimizer, LOADER)
        sizes.append(len(object_paths(files.store)))

    assert StorePlace(files, "run").steps() == (2, 3)
    assert sizes == [sizes[0], 2 * sizes[0], 2 * sizes[0]]
    assert kept.load(model, optimizer, step=2).step == 2
    with pytest.raises(StateError, match=r"step-00000001 holds no index\.json"):
        kept.load(model, optimizer, step=1)


def test_a_step_is_saved_once(files):
    model, optimizer = a_run()
    checkpoints_in(files).save(1, model, optimizer, LOADER)

    with pytest.raises(StateError, match="step-00000001 holds a checkpoint"):
        checkpoints_in(files).save(1, model, optimizer, LOADER)


@pytest.mark.parametrize("fault", [("create", 2), ("publish", 1), ("publish", 2)])
def test_an_interrupted_save_is_never_seen_and_swept_by_the_next(fault):
    store = FaultyStore(MemoryStore(), {fault: Outage})
    model, optimizer = a_run()
    with some_files(store) as files:
        with pytest.raises(UnavailableError):
            checkpoints_in(files).save(1, model, optimizer, LOADER)
        store.assert_all_faults_fired()

        assert StorePlace(files, "run").steps() == ()
        assert StorePlace(files, "run").unfinished() == (1,)
        checkpoints_in(files).save(2, model, optimizer, LOADER)
        assert [info.name for info in files.listing("run")] == ["step-00000002"]


def test_another_model_is_refused_with_what_differs(files):
    model, optimizer = a_run()
    checkpoints_in(files).save(1, model, optimizer, LOADER)
    place, other = StorePlace(files, "run"), a_config(top_k=1).model_dump()

    with pytest.raises(StateError, match="holds another model: top_k was 2 and is 1"):
        StripedCheckpoints(place, other).load(model, optimizer)


@pytest.mark.parametrize("name", ["shard-00001-of-00001.safetensors", "index.json"])
def test_a_flipped_bit_is_found_before_training_goes_on(files, name):
    model, optimizer = a_run()
    checkpoints_in(files).save(1, model, optimizer, LOADER)
    victim = files.manifest(f"run/step-00000001/{name}").object_paths()[1]
    data = bytearray(files.store.read(victim, 0, files.store.stat(victim).size_bytes))
    data[-1] ^= 1
    files.store.remove(victim)
    writer = files.store.create(victim)
    writer.write(data)
    writer.close()

    with pytest.raises(IntegrityError, match=f"step-00000001: {name}.*{victim}"):
        checkpoints_in(files).load(model, optimizer)


def test_tensors_that_no_run_saved_are_not_resumed_from(files):
    save_striped({"w": torch.ones(3)}, files, "run/step-00000004")

    with pytest.raises(StateError, match="holds no state of the data plane"):
        StorePlace(files, "run").loader_state_of(4)


def test_strange_names_and_files_are_no_checkpoints(files):
    files.names.make_directory("run/step-8")
    files.write_file("run/step-00000009", b"a file")
    files.names.make_directory("run/notes")

    assert StorePlace(files, "run").steps() == StorePlace(files, "run").unfinished() == ()


def test_a_location_is_a_folder_or_a_place_on_a_store(tmp_path):
    url = f"omnifs://runs/a::file://{tmp_path}"

    store, folder = place_of(url), place_of(str(tmp_path / "checkpoints"))

    assert isinstance(store, StorePlace)
    assert store.location == f"file://{tmp_path}/runs/a"
    assert isinstance(folder, FolderPlace)
    assert (folder.location, folder.steps()) == (str(tmp_path / "checkpoints"), ())
    assert [is_store(url), is_store(folder.location)] == [True, False]

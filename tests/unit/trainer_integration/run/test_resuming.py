"""Which checkpoint a run goes on from, in a folder and on a store, when the newest is damaged."""

from copy import deepcopy
from functools import cache

import pytest

from omniload.base.errors import IntegrityError, StateError
from tests.support.fusefs.builders import some_files
from tests.support.trainer.moe_builders import (
    a_batch,
    a_config,
    a_microbatch,
    a_model,
    an_optimizer,
    rows_of,
)
from trainer_integration.checkpoint.checkpoints import Checkpoints
from trainer_integration.checkpoint.file_digests import read_sealed_json, write_sealed_json
from trainer_integration.checkpoint.place import FolderPlace, StorePlace
from trainer_integration.checkpoint.striped.writer import StripedCheckpoints
from trainer_integration.run.resuming import choose
from trainer_integration.training.step import train_step

STEPS = (1, 2, 3)


@cache
def trained():
    """Return the model and the optimizer behind each step: to train takes longer than to save."""
    model = a_model()
    optimizer = an_optimizer(model)
    found = []
    for step in STEPS:
        train_step(model, optimizer, a_batch(step - 1, [a_microbatch(rows_of(step))]))
        found.append(deepcopy((model, optimizer)))
    return found


def save_all(checkpoints):
    for step, (model, optimizer) in zip(STEPS, trained(), strict=True):
        checkpoints.save(step, model, optimizer, {"version": 1, "next_step": step})


@pytest.fixture
def folder(tmp_path):
    save_all(Checkpoints(tmp_path, a_config().model_dump()))
    return FolderPlace(tmp_path)


@pytest.fixture
def store():
    with some_files() as files:
        place = StorePlace(files, "run")
        save_all(StripedCheckpoints(place, a_config().model_dump()))
        yield place


@pytest.fixture(params=["folder", "store"])
def place(request):
    return request.getfixturevalue(request.param)


def flipped(data):
    return data[:-9] + bytes([data[-9] ^ 1]) + data[-8:]


def cut(data):
    return data[:-1]


def damage(place, step, name, change):
    """Change a file of a checkpoint; ``None`` removes it."""
    if isinstance(place, FolderPlace):
        (file,) = (place.folder / f"step-{step:08d}").glob(name)
        file.write_bytes(change(file.read_bytes())) if change else file.unlink()
        return
    (info,) = [i for i in place.files.listing(place.path_of(step)) if i.name.startswith(name[:5])]
    path = f"{place.path_of(step)}/{info.name}"
    with place.files.open(path) as file:
        data = bytes(file.reader.read(0, file.reader.size_bytes))
    place.files.names.remove(path)
    if change:
        place.files.write_file(path, change(data))


IN_A_FOLDER = [
    *((name, change) for name in ("meta.json", "loader.json") for change in (flipped, cut, None)),
    ("shard-*", cut),
    ("shard-*", None),
]
ON_A_STORE = [("index.json", flipped), ("index.json", cut), ("shard-*", cut), ("shard-*", None)]


@pytest.mark.parametrize(("name", "change"), IN_A_FOLDER)
def test_any_damage_of_the_newest_in_a_folder_that_shows_falls_back_to_the_one_before(
    folder, name, change
):
    damage(folder, 3, name, change)

    choice = choose(folder, "latest", {})

    assert (choice.step, choice.state) == (2, {"version": 1, "next_step": 2})
    assert list(choice.beyond) == [3]
    assert "step-00000003" in choice.beyond[3]


@pytest.mark.parametrize(("name", "change"), ON_A_STORE)
def test_any_damage_of_the_newest_on_a_store_that_shows_falls_back_to_the_one_before(
    store, name, change
):
    damage(store, 3, name, change)

    choice = choose(store, "latest", {})

    assert (choice.step, choice.state) == (2, {"version": 1, "next_step": 2})
    assert list(choice.beyond) == [3]


def test_the_newest_is_chosen_where_nothing_is_wrong(place):
    choice = choose(place, "latest", {})

    assert (choice.step, choice.state, choice.beyond) == (3, {"version": 1, "next_step": 3}, {})


def test_what_ranks_could_not_load_is_not_chosen_again_and_two_may_be_damaged(place):
    damage(place, 2, "shard-*", None)

    choice = choose(place, "latest", {3: "checksum"})

    assert choice.step == 1
    assert list(choice.beyond) == [2, 3]
    assert choice.beyond[3] == "checksum"
    assert "is missing" in choice.beyond[2]


def test_a_run_all_of_whose_checkpoints_are_damaged_is_not_begun_anew(place):
    for step in STEPS:
        damage(place, step, "shard-*", None)

    with pytest.raises(IntegrityError, match=r"no whole checkpoint.*step-00000001.*step-00000003"):
        choose(place, "latest", {})


def test_the_step_that_was_asked_for_is_taken_and_later_ones_are_given_up(place):
    choice = choose(place, 1, {})

    assert (choice.step, list(choice.beyond)) == (1, [2, 3])
    assert "resumed from step-00000001, as was asked" in choice.beyond[2]


def test_a_damaged_step_that_was_asked_for_is_refused_with_the_others(place):
    damage(place, 2, "shard-*", None)

    with pytest.raises(IntegrityError, match=r"step-00000002 was asked for.*\[1, 3\].*latest"):
        choose(place, 2, {})


def test_a_step_without_a_checkpoint_is_refused_with_those_there_are(place):
    with pytest.raises(StateError, match=r"no checkpoint of step 7; it has \[1, 2, 3\]"):
        choose(place, 7, {})


def test_another_release_is_no_damage_that_a_run_falls_back_from(folder):
    meta = folder.folder / "step-00000003" / "meta.json"
    write_sealed_json(meta, read_sealed_json(meta) | {"version": 2})

    with pytest.raises(StateError, match="has version 2"):
        choose(folder, "latest", {})


def test_what_is_set_aside_is_no_checkpoint_any_more_and_is_never_overwritten(place):
    first = place.set_aside(3)

    assert place.steps() == (1, 2)
    assert first == "step-00000003.aside-1"
    if isinstance(place, FolderPlace):
        (place.folder / "step-00000003").mkdir()
        assert (place.folder / first / "meta.json").exists()
        assert place.set_aside(3) == "step-00000003.aside-2"
    else:
        assert place.unfinished() == ()
        assert {i.name for i in place.files.listing(f"run/{first}")} >= {"index.json"}

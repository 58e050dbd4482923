"""The drop-in DataLoader without workers: torch's arguments, and a state that is checked."""

import copy
import dataclasses
import inspect
import json
import os
import pickle
import random
import typing

import pytest
import torch
import torch.utils.data as torch_data
from torch.utils.data import IterableDataset, Sampler

import trainer_integration
from omniload.base.errors import ConfigError, StateError
from omniload.batch.arrays import NumpyArrays
from omniload.front.delivery import BatchForm
from omniload.front.loader import Loader
from omniload.mix.state import MixState
from tests.support.trainer.loaders import Numbers, Remembering, Stream, StreamWithState, plain
from trainer_integration import DataLoader
from trainer_integration.loader import data_loader
from trainer_integration.loader.mixes import MixBatches
from trainer_integration.loader.ways import Ways


def taken(loader, batches):
    """Return the state after some batches."""
    iterator = iter(loader)
    for _ in range(batches):
        next(iterator)
    return loader.state_dict()


def test_what_the_package_offers():
    assert trainer_integration.__all__ == [
        "DataLoader",
        "ReplicaLoader",
        "SharedDataset",
        "StripedReader",
        "StripedWriter",
        "load_striped",
        "open_striped",
        "open_writers",
        "save_striped",
        "token_mean",
    ]
    assert dir(trainer_integration) == trainer_integration.__all__
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        trainer_integration.Nothing  # noqa: B018


def test_the_signature_is_torchs_and_so_is_the_class():
    assert inspect.signature(DataLoader) == inspect.signature(torch_data.DataLoader)
    assert isinstance(DataLoader(Numbers(1)), torch_data.DataLoader)
    assert issubclass(DataLoader[int].__origin__, torch_data.DataLoader)


def test_the_written_signature_is_torchs_and_what_is_taken_beside_it():
    written, of_a_mix = map(inspect.signature, typing.get_overloads(DataLoader.__init__))
    theirs = inspect.signature(torch_data.DataLoader.__init__).parameters
    beside = {field.name: field.default for field in dataclasses.fields(Ways)}
    beside |= {"cost_fn": None, "cost_counts": "equal"}
    shown = {name: (p.kind, p.default) for name, p in written.parameters.items()}

    expected = {name: (p.kind, p.default) for name, p in theirs.items()}
    only = inspect.Parameter.KEYWORD_ONLY
    assert shown == expected | {name: (only, default) for name, default in beside.items()}
    assert [*of_a_mix.parameters] == ["self", "dataset", "collate_fn", "keywords"]


@pytest.mark.parametrize(
    "keywords",
    [
        {"num_workers": -1},
        {"timeout": -1},
        {"prefetch_factor": 2},
        {"persistent_workers": True},
        {"shuffle": True, "sampler": [0]},
        {"batch_sampler": [[0]], "batch_size": 2},
        {"batch_size": None, "drop_last": True},
        {"batch_size": 0},
        {"multiprocessing_context": "fork"},
        {"nonsense": 1},
    ],
    ids=str,
)
def test_arguments_are_refused_as_torch_refuses_them(keywords):
    with pytest.raises((ValueError, TypeError)) as theirs:
        torch_data.DataLoader(Numbers(3), **keywords)
    with pytest.raises(type(theirs.value)) as ours:
        DataLoader(Numbers(3), **keywords)

    assert str(ours.value) == str(theirs.value)


@pytest.mark.parametrize(
    "name", ["batch_size", "batch_sampler", "sampler", "drop_last", "dataset", "persistent_workers"]
)
def test_attributes_are_read_only(name):
    with pytest.raises(ValueError, match=f"{name} attribute should not be set after DataLoader"):
        setattr(DataLoader(Numbers(3)), name, 1)


def test_the_global_generator_ends_where_torch_leaves_it():
    ends = []
    for kind in (torch_data.DataLoader, DataLoader):
        torch.manual_seed(7)
        list(kind(Numbers(9), shuffle=True))
        ends.append(torch.get_rng_state())

    assert torch.equal(*ends)


def test_a_resumed_epoch_leaves_every_global_generator_alone():
    state = taken(DataLoader(Numbers(9), shuffle=True), 4)
    loader = DataLoader(Numbers(9), shuffle=True)
    loader.load_state_dict(state)
    before = torch.get_rng_state(), random.getstate()

    list(loader)

    assert torch.equal(before[0], torch.get_rng_state())
    assert before[1] == random.getstate()


def test_no_sample_is_loaded_to_get_to_a_place():
    state = taken(DataLoader(Numbers(1000), shuffle=True), 900)
    loader = DataLoader(Numbers(1000), shuffle=True)
    loader.load_state_dict(state)

    next(iter(loader))

    assert len(loader.dataset.loaded) == 1


def test_a_state_is_json_and_bears_another_key():
    state = json.loads(json.dumps(taken(DataLoader(Numbers(9), shuffle=True), 4)))
    loader = DataLoader(Numbers(9), shuffle=True)
    loader.load_state_dict(state | {"_iterator_finished": False})

    assert len(list(loader)) == 5
    assert not any(key.startswith("_") for key in state)


def test_an_empty_state_changes_nothing():
    loader = DataLoader(Numbers(3))
    loader.load_state_dict({})

    assert plain(loader) == [[0], [1], [2]]


def test_a_state_loaded_after_iter_moves_the_iterator_in_use():
    state = taken(DataLoader(Numbers(5)), 3)
    loader = DataLoader(Numbers(5))
    batches = iter(loader)
    next(batches)

    loader.load_state_dict(state)

    assert loader.state_dict() == state
    assert plain(batches) == [[3], [4]]
    assert plain(loader) == [[0], [1], [2], [3], [4]]


def test_two_iterators_go_their_own_ways_and_the_state_is_of_the_last():
    loader = DataLoader(Numbers(4))
    first, second = iter(loader), iter(loader)
    plain([next(first), next(first), next(second)])

    assert loader.state_dict()["batches"] == 1
    assert plain(first) == [[2], [3]]


def test_an_epoch_that_ended_is_followed_by_a_whole_one():
    loader = DataLoader(Numbers(3))
    list(loader)
    again = DataLoader(Numbers(3))
    again.load_state_dict(loader.state_dict())

    assert loader.state_dict()["stage"] == "finished"
    assert plain(again) == [[0], [1], [2]]


def test_set_epoch_of_the_run_that_saved_holds_for_the_rest_of_the_epoch():
    def made():
        sampler = torch_data.DistributedSampler(range(20), num_replicas=2, rank=0)
        return DataLoader(Numbers(20), sampler=sampler)

    loader = made()
    loader.sampler.set_epoch(3)
    expected, state = plain(loader), taken(loader, 4)
    again = made()
    again.load_state_dict(state)

    assert plain(again) == expected[4:]
    assert again.sampler.epoch == 3


class Counting(Sampler):
    """Counts up from its own state."""

    def __init__(self):
        self.at, self.asked = 0, 0

    def __iter__(self):
        self.asked += 1
        while self.at < 12:
            self.at += 1
            yield self.at - 1
        self.at = 0

    def __len__(self):
        return 12

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]


def test_a_sampler_with_a_state_of_its_own_is_set_and_not_replayed():
    loader = DataLoader(Numbers(12), sampler=Counting(), batch_size=2)
    state = taken(loader, 3)
    again = DataLoader(Numbers(12), sampler=Counting(), batch_size=2)
    again.load_state_dict(state)

    assert state["sampler"] == {"at": 6}
    assert plain(again) == [[6, 7], [8, 9], [10, 11]]
    assert again.sampler.asked == 1


class Wandering(Sampler):
    """Gives another order each time, from nothing that a state can hold."""

    def __iter__(self):
        return iter(random.SystemRandom().sample(range(1000), 1000))

    def __len__(self):
        return 1000


def test_an_order_that_is_not_found_again_is_refused():
    loader = DataLoader(Numbers(1000), sampler=Wandering())
    state = taken(loader, 5)
    loader.load_state_dict(state)

    with pytest.raises(
        StateError, match="Wandering gives other indices than in the run that saved"
    ):
        next(iter(loader))


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"batch_size": 3}, "batch_size was 2 in the run that saved and is 3 here"),
        ({"drop_last": True}, "drop_last was False in the run that saved and is True here"),
        ({"shuffle": True}, "samplers was .* in the run that saved and is .*RandomSampler"),
        ({"dataset": Numbers(8)}, "samples was 9 in the run that saved and is 8 here"),
        ({"dataset": Stream(9)}, "kind 'map', this one is 'iterable'"),
    ],
    ids=lambda value: value if isinstance(value, str) else "+".join(value),
)
def test_a_state_of_other_batches_is_refused(keywords, message):
    state = taken(DataLoader(Numbers(9), batch_size=2), 2)
    loader = DataLoader(**({"dataset": Numbers(9), "batch_size": 2} | keywords))

    with pytest.raises(StateError, match=message):
        loader.load_state_dict(state)


def of_version_1(state):
    """Return a state as it was written before all of it had a digest."""
    older = copy.deepcopy(state) | {"version": 1}
    del older["blake2b"], older["given"]
    return older


@pytest.mark.parametrize("dataset", [Numbers(9), Stream(9)], ids=["map", "iterable"])
def test_a_state_of_version_1_is_read(dataset):
    state = taken(DataLoader(dataset, batch_size=2), 2)
    resumed = []
    for each in (state, of_version_1(state)):
        loader = DataLoader(copy.deepcopy(dataset), batch_size=2)
        loader.load_state_dict(each)
        resumed.append([batch.tolist() for batch in loader])

    assert resumed[0] == resumed[1] != []


def order_changed(state):
    state["order"]["drawn"]["torch"] = "AAAA"


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (lambda s: s.update(version=3), "version 3, this code reads 2"),
        (lambda s: s.pop("batches") and s.pop("order"), "has no 'order'"),
        (lambda s: s.update(batches=-1), "-1 is not a whole number"),
        (lambda s: s.update(late=[7]), "7 is not a whole number"),
        (lambda s: s.update(stage="lost"), "stage is 'lost'"),
        (lambda s: s.update(seed="x"), "'x' is not a whole number"),
        (lambda s: s.update(late=3), "damaged"),
        (order_changed, "is damaged"),
    ],
)
def test_a_damaged_state_without_a_digest_is_refused_by_its_ranges(harm, message):
    loader = DataLoader(Numbers(9), shuffle=True)
    state = of_version_1(taken(loader, 2))
    harm(state)

    with pytest.raises(StateError, match=message):
        loader.load_state_dict(state)


@pytest.mark.parametrize("dataset", [Remembering(6), StreamWithState(6)])
@pytest.mark.parametrize("state", [3, [], {}, "x", {"made": 1}, {"dataset": {"at": 1}, "more": 1}])
def test_a_worker_whose_state_is_of_another_form_is_refused(dataset, state):
    loader = DataLoader(dataset, collate_fn=list)
    saved = of_version_1(taken(loader, 1))
    saved["starts"][0]["state"] = state

    with pytest.raises(StateError, match=r"the state of a worker is .*, none of \['dataset'"):
        loader.load_state_dict(saved)


def test_what_is_no_state_of_a_loader_is_told_as_such_and_not_as_of_another_release():
    with pytest.raises(
        StateError, match="no state of a loader: it has no version, and holds 'a', 'b'"
    ):
        DataLoader(Numbers(4)).load_state_dict({"a": 1, "b": 2})


def test_a_state_of_a_loader_that_is_not_torchs_is_refused_by_the_name_of_that():
    mosaic = {"epoch": 0, "sample_in_epoch": 96, "num_canonical_nodes": 1}

    with pytest.raises(StateError, match=r"of Mosaic Streaming, whose places .* begin a new epoch"):
        DataLoader(Numbers(4)).load_state_dict(mosaic)
    with pytest.raises(StateError, match="no state of a loader: it has no version"):
        DataLoader(Numbers(4)).load_state_dict({"_snapshot": {}})  # a part of one of torchdata's
    with pytest.raises(StateError, match=r"of a mix, whose places .* begin a new epoch"):
        DataLoader(Numbers(4)).load_state_dict(MixState.start(1).to_json(["web"], {}))


def test_torchdatas_keyword_is_told_to_be_needless():
    with pytest.raises(ConfigError, match=r"snapshot_every_n_steps=3 .*leave it out"):
        DataLoader(Numbers(4), snapshot_every_n_steps=3)


def test_what_is_no_state_is_refused():
    with pytest.raises(StateError, match="of type list"):
        DataLoader(Numbers(3)).load_state_dict([1])


def test_a_place_beyond_the_samplers_end_is_refused():
    class Odd(Counting):
        state_dict = None

    state = of_version_1(taken(DataLoader(Numbers(12), sampler=Odd()), 5)) | {"batches": 50}
    loader = DataLoader(Numbers(12), sampler=Odd())
    loader.load_state_dict(state)

    with pytest.raises(StateError, match="ends after 12 batches, the state is of batch 50"):
        next(iter(loader))


class HandsOutItsOwn(StreamWithState):
    def __init__(self, length):
        super().__init__(length)
        self.held = {}

    def state_dict(self):
        self.held["at"] = self.at
        return self.held


@pytest.mark.parametrize("kind", [Remembering, HandsOutItsOwn])
def test_a_state_stays_what_it_was_though_the_dataset_goes_on_in_what_it_gave(kind):
    loader = DataLoader(kind(6), collate_fn=list)
    batches = iter(loader)
    next(batches)
    state = loader.state_dict()
    rest = list(batches)
    loader.state_dict()
    again = DataLoader(kind(6), collate_fn=list)
    again.load_state_dict(state)

    assert list(again) == rest


class KeepsWhatItIsGiven(Remembering):
    def load_state_dict(self, state):
        self.held = state


class StreamKeepsWhatItIsGiven(HandsOutItsOwn):
    def load_state_dict(self, state):
        self.held, self.resume = state, state["at"]


class CountingInItsState(Counting):
    """Goes on in the very state that it was given."""

    at = property(lambda self: self.held["at"], lambda self, at: self.held.update(at=at))

    def __init__(self):
        self.held = {}
        super().__init__()

    def load_state_dict(self, state):
        self.held = state


@pytest.mark.parametrize(
    "made",
    [
        lambda: DataLoader(KeepsWhatItIsGiven(6), collate_fn=list),
        lambda: DataLoader(StreamKeepsWhatItIsGiven(6), collate_fn=list),
        lambda: DataLoader(Numbers(12), sampler=CountingInItsState(), batch_size=2),
    ],
)
def test_a_state_may_be_loaded_again_though_the_dataset_went_on_in_what_it_was_given(made):
    state = taken(made(), 2)
    before = copy.deepcopy(state)
    again = made()
    again.load_state_dict(state)
    shown = again.state_dict()
    rest = plain(again)

    assert state == shown == before
    third = made()
    third.load_state_dict(state)
    assert plain(third) == rest


def test_a_map_dataset_that_sets_torchs_generator_draws_what_it_would_have_drawn():
    class Augmented(Numbers):
        def __getitem__(self, index):
            return index, int(torch.randint(1 << 30, ()))

        def state_dict(self):
            return {"generator": torch.get_rng_state()}

        def load_state_dict(self, state):
            torch.set_rng_state(state["generator"])

    def left(taken):
        torch.manual_seed(5)
        loader = DataLoader(Augmented(10), shuffle=True, collate_fn=list)
        state = loader.state_dict()
        batches = iter(loader)
        for number in range(taken):
            next(batches)
            state = loader.state_dict() if number == taken - 1 else state
        unbroken = list(batches)
        torch.manual_seed(77)
        again = DataLoader(Augmented(10), shuffle=True, collate_fn=list)
        again.load_state_dict(state)
        return unbroken, list(again)

    for taken in (0, 1, 9):
        unbroken, resumed = left(taken)
        assert resumed == unbroken


def test_an_iterable_dataset_with_a_state_is_not_read_again():
    class Once(StreamWithState):
        given = 0

        def __iter__(self):
            for sample in super().__iter__():
                self.given += 1
                yield sample

    state = taken(DataLoader(Once(10)), 6)
    loader = DataLoader(Once(10))
    loader.load_state_dict(state)

    assert plain(loader) == [[6], [7], [8], [9]]
    assert loader.dataset.given == 4


def test_a_longer_iterable_dataset_than_it_said_is_warned_of():
    class Short(Stream):
        def __len__(self):
            return 2

    loader = DataLoader(Short(3))
    assert len(loader) == 2
    with pytest.warns(
        UserWarning, match="Length of IterableDataset .*Short.* was reported to be 2"
    ):
        list(loader)


def test_a_data_pipe_has_no_place():
    loader = DataLoader(torch_data.datapipes.iter.IterableWrapper(range(3)))

    assert plain(loader) == [[0], [1], [2]]
    with pytest.raises(StateError, match="DataPipe's place cannot be saved"):
        loader.state_dict()


def test_a_loader_is_copied_and_pickled_without_its_iterators():
    loader = DataLoader(Numbers(3))
    batches = iter(loader)
    next(batches)

    for other in (copy.copy(loader), pickle.loads(pickle.dumps(loader))):
        assert plain(other) == [[0], [1], [2]]
        assert other.state_dict()["stage"] == "finished"


def mix_loader():
    return Loader(lambda stack, state: None, BatchForm(arrays=NumpyArrays()))


@pytest.mark.parametrize("made", [mix_loader, lambda: DataLoader(Numbers(3))])
def test_a_loader_is_no_dataset(made):
    with pytest.raises(ConfigError, match="makes batches already; every worker would hand out"):
        DataLoader(made(), num_workers=2)


def test_the_loader_of_a_mix_goes_to_no_other_process(monkeypatch):
    loader = mix_loader()
    with pytest.raises(ConfigError, match="handed to another process"):
        pickle.dumps(loader)
    here = os.getpid()
    monkeypatch.setattr(os, "getpid", lambda: here + 1)
    with pytest.raises(ConfigError, match="handed to another process"):
        loader.next_batch()


@pytest.mark.parametrize(
    "keywords",
    [
        {"batch_size": 4},
        {"shuffle": True},
        {"shuffle": False},  # the mix has an order all the same
        {"num_workers": 2},
        {"pin_memory": True},
    ],
    ids=str,
)
def test_a_mix_refuses_what_belongs_to_single_samples(keywords):
    (name,) = keywords
    with pytest.raises(ConfigError, match=f"{name}=.* does not go with a mix: "):
        DataLoader("mix.yaml", **keywords)


def test_a_mix_takes_the_keywords_of_a_loader_that_ask_for_nothing():
    nothing = {"num_workers": 0, "pin_memory": False, "sampler": None, "shuffle": None}
    nothing |= {"prefetch_factor": None, "drop_last": False, "batch_size": None}

    # The next thing that is wrong.
    with pytest.raises(ConfigError, match=r"no-mix\.yaml: no such file"):
        DataLoader("no-mix.yaml", **nothing)


class Steps:
    """Stands for the loader of a mix: batch ``k`` is ``k``."""

    def __init__(self):
        self.next_step = 0

    def __len__(self):
        return 3

    def start(self):
        pass

    def next_batch(self):
        if self.next_step == 3:
            return None
        self.next_step += 1
        return self.next_step - 1

    def take_back(self):
        self.next_step -= 1

    def end_loop(self, _):
        pass

    def state_dict(self):
        return {"next_step": self.next_step}

    def load_state_dict(self, state):
        assert set(state) <= {"next_step"}, "a mix's state is sealed"
        self.next_step = state.get("next_step", self.next_step)


@pytest.fixture
def mix_of_steps(monkeypatch):
    """Return a function that opens a loader over a mix of three steps."""

    def opened(form=lambda step: -step, **keywords):
        batches = MixBatches(Steps(), form, **keywords)
        monkeypatch.setattr(data_loader, "open_batches", lambda *_: batches)
        return DataLoader("mix.yaml")

    return opened


def test_batches_of_a_mix_pass_through_collate_fn_and_are_as_many_as_its_steps(mix_of_steps):
    assert list(mix_of_steps()) == [0, -1, -2]
    assert len(mix_of_steps()) == 3


def test_a_batch_that_collate_fn_fails_for_is_the_next_one_of_a_mix_still(mix_of_steps):
    failing = [1]

    def form(step):
        if step in failing:
            failing.remove(step)
            raise ValueError("step 1")
        return None if step == 2 else step  # a loop may be given anything

    loader = mix_of_steps(form)
    batches = iter(loader)
    assert next(batches) == 0
    with pytest.raises(ValueError, match="step 1"):
        next(batches)

    assert loader.state_dict() == {"next_step": 1}
    assert list(batches) == [1, None]


def test_each_loop_over_a_split_begins_anew_and_over_another_mix_goes_on(mix_of_steps):
    for held_out, second in ((False, [-2]), (True, [0, -1, -2])):
        loader = mix_of_steps(held_out=held_out)
        first = iter(loader)
        assert [next(first), next(first)] == [0, -1]
        state = loader.state_dict()
        assert list(loader) == second, held_out
        loader.load_state_dict(state)
        assert list(loader) == [-2]
        assert list(loader) == (second if held_out else [])
        assert loader.use_stateful_dataloader is not held_out

    resumed = mix_of_steps(held_out=True)
    resumed.load_state_dict(state)  # before any loop
    assert [list(resumed), list(resumed)] == [[-2], [0, -1, -2]]

    going = iter(resumed)
    assert next(going) == 0
    for empty in (
        {},
        {"_iterator_finished": True},
    ):  # as accelerate has it of a loader without a place
        resumed.load_state_dict(empty)
    assert list(going) == [-1, -2]
    assert list(resumed) == [0, -1, -2]


def test_keys_that_frameworks_add_to_the_state_of_a_mix_are_borne(mix_of_steps):
    loader = mix_of_steps()
    next(iter(loader))
    state = loader.state_dict() | {"_iterator_finished": False}
    again = mix_of_steps()
    again.load_state_dict(state)

    assert list(again) == [-1, -2]


def test_an_empty_state_of_a_mix_that_torchs_dcp_gives_back_unfilled_is_refused(monkeypatch):
    unopened = Loader(lambda *_: None, BatchForm(arrays=NumpyArrays()))
    monkeypatch.setattr(data_loader, "open_batches", lambda *_: MixBatches(unopened, lambda b: b))
    loader = DataLoader("mix.yaml")

    with pytest.raises(StateError, match="the empty one that this loader returned"):
        loader.load_state_dict(loader.state_dict())


def test_a_mix_is_prepared_for_accelerate_and_another_loader_is_not(mix_of_steps):
    mix, samples = mix_of_steps(), DataLoader(Numbers(4))

    assert (mix.is_mix, mix._is_accelerate_prepared, mix.use_stateful_dataloader) == (True,) * 3
    assert (samples.is_mix, samples.use_stateful_dataloader) == (False, False)
    assert not getattr(samples, "_is_accelerate_prepared", True)
    mix._is_accelerate_prepared = True  # as accelerate notes it


def test_a_loader_that_accelerate_has_rebuilt_tells_so_until_it_is_iterated_itself():
    loader = DataLoader(Numbers(4))
    assert not loader._is_accelerate_prepared
    with pytest.raises(StateError, match="ask the prepared loader"):
        loader.state_dict()
    next(iter(loader))

    loader.load_state_dict(loader.state_dict())
    with pytest.raises(StateError, match="prepare first"):
        loader._is_accelerate_prepared  # noqa: B018


def test_a_stream_that_filters_resumes_after_what_it_gave():
    class Odd(Stream):
        def __iter__(self):
            return (number for number in super().__iter__() if number % 2)

    unbroken = plain(DataLoader(Odd(20), 2))
    state = taken(DataLoader(Odd(20), 2), 2)
    resumed = DataLoader(Odd(20), 2)
    resumed.load_state_dict(state)

    assert plain(resumed) == unbroken[2:]
    assert unbroken[2] == [9, 11]


def test_a_mapping_of_samples_is_a_map_dataset():
    assert plain(DataLoader({0: 5, 1: 6})) == [[5], [6]]


def test_an_endless_dataset_has_no_length():
    class Endless(IterableDataset):
        def __iter__(self):
            yield from iter(int, 1)

    with pytest.raises(TypeError):
        len(DataLoader(Endless()))


def test_a_batch_that_failed_is_the_next_until_another_is_handed_out():
    class Torn(Numbers):
        def __getitem__(self, index):
            if index == 1:
                raise LookupError("torn")
            return index

    loader = DataLoader(Torn(4))
    batches = iter(loader)
    next(batches)
    with pytest.raises(LookupError, match="torn"):
        next(batches)
    places = [loader.state_dict()["batches"]]
    next(batches)
    places.append(loader.state_dict()["batches"])

    assert places == [1, 3]

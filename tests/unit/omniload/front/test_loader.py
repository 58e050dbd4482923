"""The loader: opens when it is needed, resumes before and after iteration, closes once."""

import _thread
import gc
import os
import threading
import weakref
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch.distributed.checkpoint as dcp

import omniload
from omniload.base.clock import LONGEST_WAIT_S
from omniload.base.errors import ConfigError, OmniloadError, StateError, UnavailableError
from omniload.batch.arrays import NumpyArrays
from omniload.batch.microbatch import Batch, Microbatch
from omniload.batch.slices import slice_for_cp
from omniload.front.delivery import BatchForm
from omniload.front.loader import Loader
from omniload.front.spec import MixFacts
from omniload.front.turn import take_turn, take_turn_to_train
from omniload.mix.journal.losses import SourceLoss, losses_of_step
from omniload.mix.journal.notes import RunNotes
from omniload.mix.journal.rewards import SourceRewards, rewards_by_source
from tests.support.locks import HeardLock
from tests.support.plane.builders import a_microbatch


class FakeClient:
    """Four steps from the place in its state."""

    def __init__(self, state, stop=4):
        self.next_step = 0 if state is None else state["step"]
        self.stop = stop
        self.last_wait_s = 0.5
        self.closed = 0

    def wait_for_batch(self, timeout=None):
        if self.next_step == self.stop:
            return None
        rows = np.zeros((1, 2), np.int32)
        part = Microbatch(
            tokens_RT=rows,
            cu_seqlens=np.array([0, 2], np.int32),
            sources_D=np.zeros(1, np.int16),
            next_D=np.zeros(1, np.int32),
            keys_K4=np.zeros((0, 4), np.int64),
        )
        return Batch(
            step=self.next_step, microbatches=(part,), loss_tokens=0, imbalance=1.0, bound=1.0
        )

    def hand_out(self):
        self.next_step += 1

    def take_back(self, batch):
        self.next_step = batch.step

    def state_dict(self):
        return {"step": self.next_step}

    def close(self):
        self.closed += 1


def test_data_without_a_batch_is_told_of_once(make, caplog):
    loader = make({"step": 4})  # where a resumed job had ended
    assert loader.next_batch() is None
    assert not caplog.text

    late = Loader(lambda *_: FakeClient({"step": 4}), BatchForm(arrays=NumpyArrays()))
    assert late.next_batch() is None  # for a rank that joins at the end of a run
    assert not caplog.text

    empty = Loader(lambda *_: FakeClient(None, stop=0), BatchForm(arrays=NumpyArrays()))
    assert [empty.next_batch(), empty.next_batch()] == [None, None]
    assert caplog.text.count("the data ended before the first batch") == 1


def test_a_loop_over_epochs_is_told_once_that_a_mix_has_none(caplog):
    loader = Loader(lambda *_: FakeClient(None, stop=2), BatchForm(arrays=NumpyArrays()))

    assert len(list(loader)) == 2
    assert not caplog.text
    assert [len(list(loader)) for _ in range(3)] == [0, 0, 0]
    assert caplog.text.count("A mix has no epochs to loop over") == 1


def next_of(batches):
    """Return the next batch, requested again after each error; ``None`` at the end."""
    while True:
        try:
            return next(batches, None)
        except UnavailableError:
            continue


def test_a_loop_goes_on_behind_an_error_where_it_stood():
    class Late(FakeClient):
        late = True

        def wait_for_batch(self, timeout=None):
            self.late = not self.late
            if not self.late:
                raise UnavailableError("it is not there yet")
            return super().wait_for_batch(timeout)

    batches, steps = (
        iter(Loader(lambda *_: Late(None, stop=2), BatchForm(arrays=NumpyArrays()))),
        [],
    )
    while (batch := next_of(batches)) is not None:
        steps.append(batch.step)

    assert steps == [0, 1]
    assert next(batches, None) is None


def test_threads_that_ask_one_loader_wait_for_each_other_and_share_its_steps():
    class Waiting(FakeClient):
        def wait_for_batch(self, timeout=None):
            step, self.asked = self.next_step, [*getattr(self, "asked", []), threading.get_ident()]
            if step == 0:
                other.start()
                assert not other_had_its_own.wait(0.05)  # the first asks alone
            self.next_step = step
            return super().wait_for_batch(timeout)

    def ask():
        steps.append(loader.next_batch().step)
        other_had_its_own.set()

    steps, other_had_its_own = [], threading.Event()
    client = Waiting(None)
    loader = Loader(lambda *_: client, BatchForm(arrays=NumpyArrays()))
    other = threading.Thread(target=ask)

    first = loader.next_batch().step
    other.join(60)

    assert (first, steps) == (0, [1])
    assert len({*client.asked}) == 2


def test_a_thread_waits_for_another_one_that_asks_no_longer_than_it_says():
    class Waiting(FakeClient):
        def wait_for_batch(self, timeout=None):
            if self.next_step == 0:
                others = [threading.Thread(target=ask, args=(each,)) for each in (0.01, -1, "1")]
                for other in others:
                    other.start()
                for other in others:
                    other.join(60)
            return super().wait_for_batch(timeout)

    def ask(timeout):
        try:
            loader.next_batch(timeout)
        except OmniloadError as error:
            said[timeout] = f"{type(error).__name__}: {error}"

    said = {}
    loader = Loader(lambda *_: Waiting(None), BatchForm(arrays=NumpyArrays()))

    assert loader.next_batch().step == 0
    assert said[0.01].startswith("UnavailableError: another thread waits for a batch")
    assert said[-1].startswith("ConfigError: timeout is -1")
    assert said["1"].startswith("ConfigError: timeout is '1'")
    assert loader.next_batch().step == 1


@pytest.mark.parametrize("timeout", [1e300, 10**90])
def test_a_timeout_beyond_what_locks_bear_is_the_longest_that_they_do_beside_another_thread(
    timeout, monkeypatch
):
    class Waiting(FakeClient):
        def wait_for_batch(self, timeout=None):
            limits.append(timeout)
            if self.next_step == 0:
                other.start()
                assert comes.wait(60)  # it waits for its turn
            return super().wait_for_batch(timeout)

    def ask():
        steps.append(loader.next_batch(timeout).step)

    limits, steps, comes = [], [], threading.Event()
    fake = SimpleNamespace(RLock=lambda: HeardLock(comes))
    monkeypatch.setattr("omniload.front.loader.threading", fake)
    loader = Loader(lambda *_: Waiting(None), BatchForm(arrays=NumpyArrays()))
    other = threading.Thread(target=ask)

    loader.next_batch()
    other.join(60)

    assert steps == [1]
    assert limits == [None, pytest.approx(LONGEST_WAIT_S)]


@pytest.mark.parametrize(("assumed_alone", "size"), [(True, 2), (True, 1), (False, 2)])
def test_a_loader_from_before_the_process_group_hands_no_batch_to_each_of_several_ranks(
    monkeypatch, assumed_alone, size
):
    monkeypatch.setattr("omniload.front.arguments.group_of_torch", lambda: (0, size))
    form = BatchForm(arrays=NumpyArrays())
    loader = Loader(lambda *_: FakeClient(None), form, MixFacts(assumed_alone=assumed_alone))

    if assumed_alone and size > 1:
        for _ in range(2):  # a second request is refused too
            with pytest.raises(ConfigError, match="opened before torch's process group of 2 ranks"):
                loader.next_batch()
    else:
        assert loader.next_batch().step == 0


class Planes:
    """Opens planes that note, each by its number, that they have ended."""

    def __init__(self):
        self.ended, self.count, self.one_has_ended = [], 0, threading.Event()

    def __call__(self, stack, state):
        stack.callback(self._end, self.count)
        self.count += 1
        return FakeClient(state)

    def _end(self, number):
        self.ended.append((number, threading.get_ident()))
        self.one_has_ended.set()


def test_a_loader_that_nobody_holds_any_more_ends_its_plane_beside_who_let_go_of_it():
    planes = Planes()
    loader = Loader(planes, BatchForm(arrays=NumpyArrays()), MixFacts(is_alone=True))
    loader.next_batch()
    loader.load_state_dict({"step": 1})  # ends the first plane, and the next batch opens a second
    batches = iter(loader)
    assert next(batches).step == 1
    planes.one_has_ended.clear()

    del loader
    assert next(batches).step == 2  # its iterator holds it
    del batches

    assert planes.one_has_ended.wait(60)
    (first, here), (second, beside) = planes.ended
    assert (first, second) == (0, 1)
    assert here == threading.get_ident() != beside


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_state_that_torchs_dcp_has_filled_with_nothing_begins_no_run_at_step_0(tmp_path):
    """As where a checkpoint has the loader itself: DCP fills the state that a new loader returns, and loads that."""
    form = BatchForm(arrays=NumpyArrays())
    with Loader(Planes(), form) as loader:
        loader.next_batch()
        dcp.save({"loader": loader}, checkpoint_id=tmp_path, no_dist=True)

    again = Loader(Planes(), form)
    with pytest.raises(StateError, match="the run would begin at step 0: save and load the state"):
        dcp.load({"loader": again}, checkpoint_id=tmp_path, no_dist=True)
    again.load_state_dict({})  # of a run that was saved before its first batch

    assert again.next_batch().step == 0


def test_an_evaluation_gives_way_to_a_training_and_goes_on_where_it_was_even_if_it_was_let_go_of():
    evaluations, form = [Planes(), Planes()], BatchForm(arrays=NumpyArrays())
    trainings = Planes()
    facts = MixFacts(gives_way=True)

    def trains(stack, state):
        take_turn_to_train(stack)
        return trainings(stack, state)

    def evaluates(planes):
        def opens(stack, state):
            with suppress(StateError):  # then rank 0 deals
                take_turn(stack)
            return planes(stack, state)

        return Loader(opens, form, facts)

    kept = evaluates(evaluations[0])
    assert kept.next_batch().step == 0
    evaluates(evaluations[1]).next_batch()

    with Loader(trains, form) as training:
        assert training.next_batch().step == 0
        assert [len(planes.ended) for planes in evaluations] == [1, 1]
        assert kept.next_batch().step == 1
        assert [planes.count for planes in evaluations] == [2, 1]
        with pytest.raises(StateError, match="has a loader over several ranks open already"):
            Loader(trains, form).start()
    kept.close()


def opened_to_evaluate():
    """Return a loader of an evaluation, and its planes."""
    planes = Planes()

    def opens(stack, state):
        take_turn(stack)
        return planes(stack, state)

    return Loader(opens, BatchForm(arrays=NumpyArrays()), MixFacts(gives_way=True)), planes


def test_an_evaluation_whose_place_is_lost_gives_way_too_and_gets_no_batch_any_more(
    monkeypatch, caplog
):
    """As on a rank that opens the training later than rank 0 waits for it: rank 0 has ended the evaluation's plane."""

    def is_gone(_):
        raise UnavailableError("Ray has ended on this host")

    monkeypatch.setattr(FakeClient, "state_dict", is_gone)
    evaluation, planes = opened_to_evaluate()
    evaluation.next_batch()

    with ExitStack() as training:
        take_turn_to_train(training)

        assert len(planes.ended) == 1
        assert "its data plane has ended (Ray has ended on this host)" in caplog.text
        with pytest.raises(StateError, match="the loader is closed"):
            evaluation.next_batch()


def test_a_training_of_a_fork_ends_no_evaluation_of_its_parent(monkeypatch):
    evaluation, planes = opened_to_evaluate()
    evaluation.next_batch()

    here = os.getpid()
    with monkeypatch.context() as forked:
        forked.setattr(os, "getpid", lambda: here + 1)
        with pytest.raises(StateError, match="has a loader over several ranks open already"):
            take_turn_to_train(ExitStack())

    assert not planes.ended
    evaluation.close()


def test_a_thread_that_looks_at_a_loader_waits_for_the_plane_that_another_opens(monkeypatch):
    planes, comes, seen = Planes(), threading.Event(), []
    fake = SimpleNamespace(RLock=lambda: HeardLock(comes), get_ident=threading.get_ident)
    monkeypatch.setattr("omniload.front.loader.threading", fake)

    def opens(stack, state):
        client = planes(stack, state)
        if planes.count == 1:
            other.start()
        else:
            comes.set()
        assert comes.wait(60)
        return client

    loader = Loader(opens, BatchForm(arrays=NumpyArrays()))
    other = threading.Thread(target=lambda: seen.append(loader.next_step))

    steps = [loader.next_batch().step]
    other.join(60)
    steps += steps_of(loader)

    assert (planes.count, len(seen)) == (1, 1)
    assert steps == [0, 1, 2, 3]


def test_a_loader_that_is_closed_while_a_thread_opens_its_plane_ends_that():
    planes = Planes()

    def opens(stack, state):
        client = planes(stack, state)
        closing = threading.Thread(target=loader.close)
        closing.start()
        closing.join(60)
        return client

    loader = Loader(opens, BatchForm(arrays=NumpyArrays()), MixFacts(is_alone=True))

    with pytest.raises(StateError, match="the loader is closed; open the mix again"):
        loader.next_batch()

    assert planes.ended == [(0, threading.get_ident())]


def test_a_loader_that_is_closed_or_shared_or_forked_ends_no_plane_where_it_is_dropped(monkeypatch):
    started = []
    monkeypatch.setattr("_thread.start_new_thread", lambda *call: started.append(call))
    form = BatchForm(arrays=NumpyArrays())

    closed = Loader(Planes(), form, MixFacts(is_alone=True))
    closed.start()
    closed.close()
    shared = Loader(Planes(), form)
    shared.start()
    forked = Loader(Planes(), form, MixFacts(is_alone=True))
    forked.start()
    here = os.getpid()
    del closed, shared
    monkeypatch.setattr(os, "getpid", lambda: here + 1)
    del forked

    assert started == []


def test_a_loader_that_follows_a_dropped_one_opens_once_the_plane_of_that_is_closed(monkeypatch):
    happened, comes, may_close = [], threading.Event(), threading.Event()
    fake = SimpleNamespace(
        allocate_lock=lambda: HeardLock(comes), start_new_thread=_thread.start_new_thread
    )
    monkeypatch.setattr("omniload.base.concurrency.threads._thread", fake)

    def opens(stack, state):
        happened.append("opened")
        stack.callback(closes)
        comes.set()
        return FakeClient(state)

    def closes():
        assert may_close.wait(60)
        happened.append("closed")

    def follows():
        with Loader(opens, form, MixFacts(is_alone=True)) as loader:
            loader.start()

    form = BatchForm(arrays=NumpyArrays())
    dropped = Loader(opens, form, MixFacts(is_alone=True))
    dropped.start()
    del dropped
    comes.clear()
    following = threading.Thread(target=follows)
    following.start()
    assert comes.wait(60)  # it waits, or has opened
    may_close.set()
    following.join(60)

    assert happened == ["opened", "closed", "opened", "closed"]


def test_a_rank_outside_the_ranks_is_refused_in_the_words_of_the_call(tmp_path, make):
    loader = make()

    with pytest.raises(
        ConfigError, match="rank is 2 and world_size is 2; ranks are numbered from 0 to 1"
    ):
        loader.resize(2, 2)
    with pytest.raises(ConfigError, match="rank is 3 and world_size is 3; ranks are numbered"):
        omniload.join(tmp_path, rank=3, world_size=3, timeout=1e-9)


def test_other_ranks_are_refused_where_images_go_by_the_numbers_of_a_mesh():
    form = BatchForm(arrays=NumpyArrays(), ranks=(0, 2, 1, 3))
    loader = Loader(lambda *_: FakeClient(None), form)

    with pytest.raises(ConfigError, match="number the mesh as init_device_mesh does"):
        loader.resize(0, 1)


@pytest.fixture
def clients():
    return []


@pytest.fixture
def make(clients):
    def made(state=None):
        def open_client(stack, state):
            clients.append(FakeClient(state))
            stack.callback(clients[-1].close)
            return clients[-1]

        return Loader(open_client, BatchForm(arrays=NumpyArrays()), state=state)

    return made


@pytest.mark.parametrize(("vocab_size", "told"), [(1, False), (0, True), (None, False)])
def test_ids_above_the_vocabulary_are_told_of_once(clients, make, caplog, vocab_size, told):
    loader = make()
    loader.vocab_size = vocab_size

    assert len(list(loader)) == 4

    assert caplog.text.count("the first batch has token id 0, but loader.vocab_size is") == told


def steps_of(loader):
    return [batch.step for batch in loader]


class TaggedClient(FakeClient):
    """Batches of two sources, and from step 2 on of a third, that an edit has added."""

    def wait_for_batch(self, timeout=None):
        names = ("web", "code") if self.next_step < 2 else ("web", "code", "books")
        tags = {"code": {"domain": "software"}, "books": {"domain": "prose"}}
        return replace(
            super().wait_for_batch(timeout),
            tokens_by_source=dict.fromkeys(names, 1),
            source_tags={name: held for name, held in tags.items() if name in names},
        )


@pytest.mark.parametrize("tags", [None, {"code": {"domain": "software"}}])
def test_tags_of_sources_are_known_of_those_that_are_added_and_by_ranks_that_join(tags):
    loader = Loader(
        lambda _stack, state: TaggedClient(state),
        BatchForm(arrays=NumpyArrays()),
        MixFacts(names=("web", "code"), tags=tags),
    )
    assert loader.source_tags == (() if tags is None else ({}, {"domain": "software"}))

    found = []
    for _ in range(3):
        batch = loader.next_batch()
        found.append((loader.source_names, loader.source_tags))
        assert batch.source_tags == loader.source_tags

    two = (("web", "code"), ({}, {"domain": "software"}))
    three = (("web", "code", "books"), ({}, {"domain": "software"}, {"domain": "prose"}))
    assert found == [two, two, three]


def test_a_loader_opens_with_its_first_batch(make, clients):
    loader = make()
    assert clients == []

    assert steps_of(loader) == [0, 1, 2, 3]
    assert len(clients) == 1


def test_a_loader_that_is_started_is_open(make, clients):
    make().start()

    assert len(clients) == 1


def test_a_state_loaded_before_iteration_opens_nothing_twice(make, clients):
    loader = make()
    loader.load_state_dict({"step": 2})

    assert steps_of(loader) == [2, 3]
    assert len(clients) == 1


def test_a_state_loaded_within_an_iteration_goes_on_there(make, clients):
    loader = make()
    seen = []
    for batch in loader:
        seen.append(batch.step)
        if seen == [0, 1, 2]:
            loader.load_state_dict({"step": 1})

    assert seen == [0, 1, 2, 1, 2, 3]
    assert [client.closed for client in clients] == [1, 0]


def test_an_empty_state_changes_nothing(make, clients):
    loader = make({"step": 3})
    loader.load_state_dict({})

    assert steps_of(loader) == [3]


def test_a_loaded_state_is_the_callers_no_more(make):
    state = {"step": 2}
    loader = make()
    loader.load_state_dict(state)
    state["step"] = 0

    assert steps_of(loader) == [2, 3]


def test_what_is_no_state_is_refused_with_its_type(make):
    with pytest.raises(StateError, match="of type list"):
        make().load_state_dict([1])


def test_a_state_of_another_loader_is_refused_by_the_name_of_that_before_anything_opens(make):
    energon = type("SavableDataLoaderState", (), {"__module__": "megatron.energon.savable_loader"})

    with pytest.raises(StateError, match="a state of Megatron-Energon: its order"):
        make(energon())
    with pytest.raises(StateError, match="Mosaic Streaming, and holds 'sample_in_epoch'"):
        make().load_state_dict({"sample_in_epoch": 3})


def test_a_path_in_place_of_a_state_is_told_to_be_read(make, tmp_path):
    for state in (tmp_path / "state.json", "state.json"):
        with pytest.raises(StateError, match=r"(PosixPath|str); read it first"):
            make(state)


def test_an_empty_state_opens_at_the_start(make):
    assert steps_of(make({})) == [0, 1, 2, 3]


def test_a_loader_shows_where_it_stands():
    def open_client(stack, state):
        return FakeClient(state)

    loader = Loader(open_client, BatchForm(arrays=NumpyArrays()), MixFacts(names=("ids", "web")))
    shown = [repr(loader)]
    loader.next_batch()
    shown.append(repr(loader))
    loader.close()

    assert [*shown, repr(loader)] == [
        "Loader(sources=['ids', 'web'], not opened)",
        "Loader(sources=['ids', 'web'], next_step=1)",
        "Loader(sources=['ids', 'web'], closed)",
    ]


def test_a_closed_loader_says_so_and_closes_once(make, clients):
    with make() as loader:
        loader.start()
    loader.close()

    assert clients[0].closed == 1
    for call in (loader.start, loader.state_dict, loader.next_batch):
        with pytest.raises(StateError, match="the loader is closed"):
            call()
    with pytest.raises(StateError, match="the loader is closed"):
        loader.load_state_dict({"step": 1})


def test_an_opening_that_fails_leaves_nothing_open(clients):
    def open_client(stack, state):
        client = FakeClient(state)
        clients.append(client)
        stack.callback(client.close)
        raise StateError("another mix")

    loader = Loader(open_client, BatchForm(arrays=NumpyArrays()))

    with pytest.raises(StateError, match="another mix"):
        loader.start()
    assert clients[0].closed == 1


def test_what_is_public_is_listed_and_there():
    assert len(set(omniload.__all__)) == len(omniload.__all__)
    assert [name for name in omniload.__all__ if getattr(omniload, name, None) is None] == []
    assert set(omniload.__all__) <= set(dir(omniload))


def test_what_type_checkers_see_is_what_is_there():
    stub = {}
    exec(Path(f"{omniload.__file__}i").read_text(encoding="utf-8"), stub)

    assert stub["__all__"] == omniload.__all__
    assert {name: stub[name] for name in stub["__all__"]} == {
        name: getattr(omniload, name) for name in omniload.__all__
    }


def test_a_name_that_is_not_offered_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'Loadr'"):
        omniload.Loadr  # noqa: B018


def held_to(steps, state, *, repeats=True):
    facts = MixFacts(num_steps=steps, repeats=repeats)
    return Loader(lambda *_: None, BatchForm(arrays=NumpyArrays()), facts, state=state)


def test_a_state_behind_the_last_step_is_refused_with_both():
    with pytest.raises(
        ConfigError, match="steps is 4, and the state stands before step 5: no batch is left"
    ):
        held_to(4, {"step": 5})
    loader = held_to(4, {"step": 3})
    with pytest.raises(ConfigError, match="steps is 4, and the state stands before step 9"):
        loader.load_state_dict({"step": 9})


def test_a_state_at_the_last_step_is_that_of_a_job_that_had_ended(caplog):
    held_to(4, {"step": 3})
    assert not caplog.text

    held_to(4, {"step": 4})
    assert "steps is 4, and the state stands before step 4: no batch is left" in caplog.text


def test_the_length_is_the_batches_from_where_it_was_opened():
    assert [len(held_to(4, state)) for state in (None, {"step": 3}, {"step": 4})] == [4, 1, 0]


def test_a_state_that_is_loaded_later_leaves_the_length_as_within_an_epoch():
    loader = held_to(4, {"step": 1})
    loader.load_state_dict({"step": 3})

    assert len(loader) == 3


def test_what_asks_for_batches_by_number_is_told_that_a_loader_is_no_dataset():
    # torch's DataLoader does, of all that is no IterableDataset and has a length.
    with pytest.raises(TypeError, match=r"no batch number 0.*iterate over it as it is"):
        held_to(4, None)[0]


@pytest.mark.parametrize(("steps", "repeats"), [(None, True), (4, False)])
def test_a_mix_that_may_end_with_its_data_has_no_length_and_is_there_all_the_same(steps, repeats):
    loader = held_to(steps, None, repeats=repeats)

    with pytest.raises(TypeError, match=r"steps= gives it one.*iterate over it as it is"):
        len(loader)
    assert loader


class Observed(FakeClient):
    """Three pieces of two sources in two rows."""

    def wait_for_batch(self, timeout=None):
        rows = [[(0, 6, 0, 0, 8, 8)], [(1, 4, 0, 0, 3, 3), (0, 1, 2, 2, 4, 6)]]
        part = a_microbatch(rows, length=8)
        batch = super().wait_for_batch(timeout)
        return None if batch is None else replace(batch, microbatches=(part,))


@pytest.fixture
def observed(tmp_path):
    facts = MixFacts(names=("code", "web"))
    notes = RunNotes(tmp_path, 0)
    with Loader(
        lambda *_: Observed(None), BatchForm(arrays=NumpyArrays()), facts, notes=notes
    ) as loader:
        yield loader


def test_losses_of_rows_documents_sources_and_all_are_kept_each_as_what_it_is(observed, tmp_path):
    for told in (
        {"losses": [1.0, 2.0]},
        {"document_losses": [1.0, 2.0, 3.0]},
        {"loss": np.float32(4.0)},
        {"source": "web", "loss": 5},
        {"source": "code", "loss": 6.0, "labels": 100},
        {"source": "code", "reward": 0.25},
    ):
        observed.next_batch() if observed.next_step < 4 else None
        observed.observe(**told)
    steps = [losses_of_step(tmp_path, step) for step in range(4)]

    means = [[piece.mean for piece in step.pieces.values()] for step in steps]
    assert means == [[1.0, 2.0, 2.0], [1.0, 2.0, 3.0], [4.0, 4.0, 4.0], []]
    overs = [{piece.over for piece in step.pieces.values()} for step in steps]
    assert overs == [{"row"}, {"document"}, {"rows"}, set()]
    assert steps[3].sources == {"web": SourceLoss(10.0, 2), "code": SourceLoss(600.0, 100)}
    rewards, _ = rewards_by_source(tmp_path, 0)
    assert rewards == {"code": SourceRewards(reward=0.25 * 9, labels=9)}


class TwoMicrobatches(FakeClient):
    """A piece of each of two sources in each of two microbatches."""

    def wait_for_batch(self, timeout=None):
        parts = tuple(
            a_microbatch([[(0, 4, i, 0, 4, 4), (1, 4, i, 0, 3, 3)]], length=8) for i in range(2)
        )
        batch = super().wait_for_batch(timeout)
        return None if batch is None else replace(batch, microbatches=parts)


@pytest.fixture(params=[True, False], ids=["kept", "nowhere"])
def accumulating(request, tmp_path):
    facts = MixFacts(names=("code", "web"))
    notes = RunNotes(tmp_path, 0) if request.param else None
    form = BatchForm(arrays=NumpyArrays())
    with Loader(lambda *_: TwoMicrobatches(None), form, facts, notes=notes) as loader:
        yield loader


@pytest.mark.parametrize(
    ("told", "what"),
    [
        ({"losses": [1.0]}, "losses"),
        ({"document_losses": [1.0, 2.0]}, "losses"),
        ({"loss": 1.0}, "losses"),
        ({"source": "web", "loss": 1.0}, "the loss of web"),
        ({"source": "web", "reward": 1.0, "labels": 9}, "the reward of web"),
        ({"rewards": [[1, 0]] * 2}, "rewards"),
    ],
)
def test_what_was_told_of_rows_is_refused_when_it_is_told_again(accumulating, told, what):
    """It counted twice, and a mean of one microbatch, told without its rows, was that of all."""
    for _ in range(2):  # of each batch anew
        batch = accumulating.next_batch()
        first, second = batch.microbatches
        accumulating.observe(first, **told)
        accumulating.observe(second, seconds=0.5, **told)
        accumulating.observe(second, seconds=0.5)  # a time is a measurement
        for rows in batch.microbatches:
            with pytest.raises(ConfigError, match=rf"given {what} of step .* again, of 1 of 1"):
                accumulating.observe(rows, **told)

    accumulating.next_batch()
    accumulating.observe(source="code", loss=1.0, reward=2.0)
    with pytest.raises(ConfigError, match=r"the reward of code of step .* again, of 2 of 2 micro"):
        accumulating.observe(source="code", reward=1.0)
    accumulating.observe(loss=1.0)
    with pytest.raises(ConfigError, match=r"losses of step .*, of 2 of 2 .*observe\(rows, "):
        accumulating.observe(loss=2.0)


def test_what_was_refused_may_be_told_as_it_should_be(observed, tmp_path):
    observed.next_batch()
    with pytest.raises(ConfigError, match="have shape"):
        observed.observe(losses=[1.0], rewards=[[1, 0]] * 3)

    observed.observe(losses=[1.0, 2.0], rewards=[[1, 0]] * 3)
    with pytest.raises(ConfigError, match="again"):
        observed.observe(rewards=[[1, 0]] * 3)

    rewards, _ = rewards_by_source(tmp_path, 0)
    assert sum(each.groups for each in rewards.values()) == 3
    assert len(losses_of_step(tmp_path, 0).pieces) == 3


class Shared(Observed):
    """One of two cp peers of these rows."""

    def __init__(self, peer):
        super().__init__(None)
        self.peer = peer

    def wait_for_batch(self, timeout=None):
        batch = super().wait_for_batch(timeout)
        (part,) = batch.microbatches
        return replace(batch, microbatches=(slice_for_cp(part, self.peer, 2),))


def test_cp_peers_tell_together_of_rows_that_they_share(observed, tmp_path):
    whole = observed.next_batch()
    losses = np.arange(16.0).reshape(2, 8)
    observed.observe(whole, losses)
    due = losses_of_step(tmp_path, 0)
    for peer in range(2):
        form, facts = BatchForm(arrays=NumpyArrays()), MixFacts(names=("code", "web"))
        notes = RunNotes(tmp_path / "shared", peer)
        client = Shared(peer)
        with Loader(lambda *_, c=client: c, form, facts, notes=notes) as loader:
            rows = loader.next_batch()
            loader.observe(rows, losses[:, rows.columns_in_row])
            loader.next_batch()
            loader.observe(source="code", loss=1.0 + peer)
            loader.next_batch()
            loader.observe(source="code", loss=1.5, reward=0.5, labels=100)

    found = losses_of_step(tmp_path / "shared", 0)
    assert found.pieces == due.pieces
    # One peer has three of the nine labels of code, and the other one six.
    told = losses_of_step(tmp_path / "shared", 1).sources
    assert told == {"code": SourceLoss(3 * 1.0 + 6 * 2.0, 9)}
    # Both peers report one word of the whole step.
    told = losses_of_step(tmp_path / "shared", 2).sources
    assert told == {"code": SourceLoss(150.0, 100)}


def test_a_source_that_the_rows_have_no_label_of_is_told_once_and_not_kept(
    observed, tmp_path, caplog
):
    observed.source_names = ("code", "web", "news")
    observed.next_batch()
    for _ in range(2):
        observed.observe(source="news", loss=1.0)

    assert caplog.text.count("but these rows have no label of it") == 1
    assert not losses_of_step(tmp_path, 0)


@pytest.mark.parametrize(
    ("told", "said"),
    [
        ({}, "no losses, rewards or seconds"),
        ({"reward": 1.0}, "name the source"),
        ({"loss": 1.0, "labels": 3}, "name the source"),
        ({"source": "web", "rewards": [[1, 0]]}, "no loss or reward"),
        ({"source": 3, "loss": 1.0}, "source is 3; give the name of one"),
        ({"source": "wbe", "loss": 1.0}, "did you mean 'web'"),
        ({"source": "web", "loss": 1.0, "labels": 0}, "at least 1"),
        ({"source": "web", "loss": [1.0]}, r"loss of a source is \[1.0\]; give its mean"),
        ({"source": "web", "loss": np.ones(2)}, "no single number"),
        ({"source": "web", "reward": np.nan}, "give a finite number"),
        ({"losses": [1.0, 2.0], "loss": 1.0}, "in two ways"),
        ({"losses": [1.0, 2.0], "source": "web", "loss": 1.0}, "in two ways"),
        ({"document_losses": [1.0, 2.0, 3.0], "loss": 1.0}, "in two ways"),
        ({"losses": [1.0, 2.0, 3.0]}, r"have shape \[3\], labels \[2, 8\]"),
        ({"losses": [1.0, 2.0, 3.0], "seconds": 0.5}, r"have shape \[3\], labels \[2, 8\]"),
        ({"losses": [1.0, 2.0, 3.0], "rewards": [[1, 0]] * 3}, r"have shape \[3\], labels"),
        ({"rewards": [1.0], "seconds": 0.5}, "rewards"),
        ({"source": "wbe", "loss": 1.0, "seconds": 0.5}, "did you mean 'web'"),
    ],
)
def test_what_cannot_be_observed_is_refused_and_nothing_kept(observed, tmp_path, told, said):
    with pytest.raises(ConfigError, match="ask for one first"):
        observed.observe(source="web", loss=1.0)
    observed.next_batch()

    with pytest.raises(ConfigError, match=said):
        observed.observe(**told)

    assert not list(tmp_path.rglob("*.jsonl"))


def test_a_loader_lets_go_of_its_last_batch_at_the_end_and_says_once_it_is_closed(observed):
    for batch in observed:
        handed = weakref.ref(batch)
    del batch

    gc.collect()
    assert handed() is None
    with pytest.raises(ConfigError, match="ask for one first"):
        observed.observe(losses=1.0)
    observed.close()
    with pytest.raises(StateError, match="the loader is closed"):
        observed.observe(losses=1.0)

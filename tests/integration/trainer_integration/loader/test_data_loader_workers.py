"""The drop-in DataLoader with worker processes: places, errors, hung workers, no orphans."""

import gc
import json
import multiprocessing
import os
import signal
import subprocess
import textwrap
import threading
import time

import lance
import psutil
import pyarrow as pa
import pytest
import torch
from torch.utils.data import DataLoader as TorchLoader
from torch.utils.data import IterableDataset, _utils, get_worker_info
from torchdata.stateful_dataloader import StatefulDataLoader

import omniload
from omniload.base.errors import StateError
from omniload.mix.schema.records import ShuffleConfig
from omniload.mix.sources import LanceSource
from omniload.source.record_source import open_source
from omniload.source.spec import SourceSpec
from tests.support.trainer.loaders import (
    Numbers,
    Remembering,
    Stream,
    StreamWithState,
    plain,
    resumed_equals_unbroken,
)
from trainer_integration import DataLoader
from trainer_integration.loader import hung_workers

STORED = ShuffleConfig(method="none")

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")


@pytest.mark.parametrize(
    ("saved", "resumed", "batch_size"),
    [
        *(pytest.param(*each, marks=pytest.mark.soak) for each in ((2, 0, 3), (0, 2, None))),
        (1, 3, None),
        (3, 1, 3),
    ],
)
def test_a_map_dataset_resumes_at_another_worker_count(saved, resumed, batch_size):
    keywords = {"batch_size": batch_size}
    for position in (0, 1, 4):
        resumed_equals_unbroken(
            lambda: TorchLoader(Numbers(13), shuffle=True, num_workers=saved, **keywords),
            lambda: DataLoader(Numbers(13), shuffle=True, num_workers=saved, **keywords),
            lambda: DataLoader(Numbers(13), shuffle=True, num_workers=resumed, **keywords),
            epoch=1,
            position=position,
        )


@pytest.mark.parametrize("position", [0, 2, 5])
def test_kept_workers_resume(position):
    def made(kind):
        return kind(Numbers(10), 2, shuffle=True, num_workers=2, persistent_workers=True)

    resumed_equals_unbroken(
        lambda: made(TorchLoader),
        lambda: made(DataLoader),
        lambda: made(DataLoader),
        epoch=1,
        position=position,
    )


@pytest.mark.parametrize("kind", [Stream, StreamWithState])
@pytest.mark.parametrize("kept", [False, True])
@pytest.mark.parametrize(
    "position", [*(pytest.param(k, marks=pytest.mark.soak) for k in (0, 3)), 1, 5]
)
def test_an_iterable_dataset_resumes_each_worker_in_turn(kind, kept, position):
    def made(loader):
        return loader(kind(11), 2, num_workers=3, persistent_workers=kept)

    epoch = 1 if kind is StreamWithState and kept else 0
    resumed_equals_unbroken(
        lambda: made(TorchLoader),
        lambda: made(DataLoader),
        lambda: made(DataLoader),
        epoch=epoch,
        position=position,
    )


def test_an_iterable_dataset_keeps_its_worker_count():
    loader = DataLoader(StreamWithState(9), num_workers=2)
    batches = iter(loader)
    next(batches)

    with pytest.raises(StateError, match=r"2 workers, each with its own place .* num_workers=2"):
        DataLoader(StreamWithState(9), num_workers=1).load_state_dict(loader.state_dict())


class LanceRows(StreamWithState):
    """Token ids of a Lance data set, opened in the worker."""

    def __init__(self, folder, count):
        super().__init__(count)
        self.folder, self.source = folder, None

    def read(self, row):
        if self.source is None:
            config = LanceSource(type="lance", path="own.lance", tokens="ids", shuffle=STORED)
            self.source = open_source(
                SourceSpec("ids", config, seed=1, tokenizer=None, base_dir=self.folder)
            )
        return self.source.read(row, row + 1).tokens.values_V.tolist()

    def __iter__(self):
        return (self.read(int(row)) for row in super().__iter__())

    def __getstate__(self):
        return self.__dict__ | {"source": None}


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_workers_that_are_not_forked_carry_their_states_and_read_lance(
    method, spawns_warm, tmp_path
):
    lance.write_dataset(pa.table({"ids": [[n, 7] for n in range(6)]}), tmp_path / "own.lance")
    rows = LanceRows(tmp_path, 6)
    assert rows.read(5) == [5, 7]

    def made():
        return DataLoader(
            rows, batch_size=None, num_workers=1, multiprocessing_context=method, timeout=60
        )

    loader = made()
    batches = iter(loader)
    before = [next(batches), next(batches)]
    again = made()
    again.load_state_dict(loader.state_dict())

    assert [*before, *again] == [[n, 7] for n in range(6)]


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
@pytest.mark.parametrize("position", [0, 1, 3, 4])
@pytest.mark.parametrize("workers", [0, 2])
def test_torchdatas_loader_goes_on_with_the_same_batches(workers, position):
    rest = []
    for kind in (StatefulDataLoader, DataLoader):

        def made(kind=kind):
            return kind(StreamWithState(7), batch_size=2, num_workers=workers)

        loader = made()
        batches = iter(loader)
        for _ in range(position):
            next(batches)
        again = made()
        again.load_state_dict(loader.state_dict())
        rest.append(plain(again))

    assert rest[0] == rest[1]


class LateFirst(Numbers):
    """Sample 0 comes once it may."""

    def __init__(self, length):
        super().__init__(length)
        self.may_come = multiprocessing.get_context("fork").Event()

    def __getitem__(self, index):
        assert index or self.may_come.wait(60)
        return index


def test_batches_that_overtook_each_other_are_each_handed_out_once():
    numbers = LateFirst(12)

    def made():
        return DataLoader(numbers, num_workers=2, in_order=False)

    loader = made()
    batches = iter(loader)
    before = [next(batches) for _ in range(4)]
    state = loader.state_dict()
    numbers.may_come.set()
    again = made()
    again.load_state_dict(state)

    assert 0 in state["late"]
    assert sorted(plain(before) + plain(again)) == [[n] for n in range(12)]


@pytest.mark.parametrize("taken", [0, 1, 5, 8])
@pytest.mark.parametrize("kind", [Stream, StreamWithState])
def test_overtaking_over_an_iterable_dataset_loses_and_repeats_nothing(kind, taken):
    def made():
        return DataLoader(kind(9), num_workers=2, in_order=False)

    loader = made()
    batches = iter(loader)
    before = [next(batches) for _ in range(taken)]
    state = loader.state_dict()
    again = made()
    again.load_state_dict(state)

    assert sorted(plain(before) + plain(again)) == [[n] for n in range(9)]


@pytest.mark.parametrize("position", [0, 1, 4, 10])
@pytest.mark.parametrize("kept", [False, True])
def test_a_map_dataset_keeps_the_state_of_each_workers_copy(kept, position):
    def made():
        dataset = Remembering(20)
        return DataLoader(dataset, 2, num_workers=2, persistent_workers=kept, collate_fn=list)

    loader = made()
    batches = iter(loader)
    taken = [next(batches) for _ in range(position)]
    if position == 10:
        assert not list(batches)
    state = json.loads(json.dumps(loader.state_dict()))
    epochs = [list(loader if position == 10 else batches), list(loader)]
    again = made()
    again.load_state_dict(state)

    assert [list(again), list(again)] == epochs
    assert [index for batch in taken + epochs[0] for index, _ in batch][:20] == [*range(20)]
    loader.close()
    again.close()


def test_copies_of_a_map_dataset_with_a_state_keep_their_worker_count_unless_they_are_alike():
    def saved(batches):
        loader = DataLoader(Remembering(20), 2, num_workers=2, collate_fn=list)
        taken = iter(loader)
        for _ in range(batches):
            next(taken)
        return loader.state_dict()

    other = DataLoader(Remembering(20), 2, num_workers=1, collate_fn=list)

    with pytest.raises(StateError, match=r"of 2 workers, each with a state.* use num_workers=2"):
        other.load_state_dict(saved(3))
    other.load_state_dict(saved(4))
    assert next(iter(other)) == [[8, 4], [9, 5]]


def test_a_state_of_a_map_datasets_own_is_given_to_no_other():
    loader = DataLoader(Remembering(6))
    next(iter(loader))

    with pytest.raises(StateError, match="its dataset has no load_state_dict"):
        DataLoader(Numbers(6)).load_state_dict(loader.state_dict())


def test_a_state_loaded_after_iter_moves_running_workers():
    loader = DataLoader(Numbers(8), num_workers=2)
    batches = iter(loader)
    next(batches)
    state = loader.state_dict()
    plain([next(batches), next(batches)])

    loader.load_state_dict(state)

    assert plain(batches) == [[n] for n in range(1, 8)]
    assert plain(loader) == [[n] for n in range(8)]


class Seeds(Numbers):
    def __getitem__(self, index):
        info = get_worker_info()
        return info.id, info.num_workers, info.seed, torch.initial_seed()


class StreamInfo(Stream):
    start = 0

    def __iter__(self):
        assert get_worker_info().dataset is self
        yield self.start


def set_start(worker):
    get_worker_info().dataset.start = worker + 10


def test_workers_are_seeded_and_told_what_torch_tells_them():
    got = []
    for kind in (TorchLoader, DataLoader):
        torch.manual_seed(1)
        got.append(list(kind(Seeds(4), batch_size=None, num_workers=2)))

    assert got[0] == got[1]


def test_worker_init_fn_finds_the_users_dataset():
    loader = DataLoader(StreamInfo(4), num_workers=2, worker_init_fn=set_start)

    assert plain(loader) == [[10], [11]]


def fail(worker):
    raise LookupError(f"worker {worker} has no map")


class Failing(Numbers):
    def __getitem__(self, index):
        if index == 2:
            raise LookupError("sample 2 is torn")
        return index


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: DataLoader(Failing(4), num_workers=1), "sample 2 is torn"),
        (lambda: DataLoader(Stream(4), num_workers=1, worker_init_fn=fail), "worker 0 has no map"),
    ],
)
def test_errors_arrive_with_the_workers_traceback(make, message):
    with pytest.raises(LookupError, match=message) as caught:
        list(make())

    assert "Caught LookupError in DataLoader worker process 0" in str(caught.value)
    assert "Traceback (most recent call last)" in str(caught.value)


class Hanging(Numbers):
    def __getitem__(self, index):
        if index == 5:
            threading.Event().wait()
        return index


def test_a_hung_worker_is_shown_with_its_batch_and_stack(monkeypatch):
    # A busy machine may keep the worker from the rest of its stack, or from its first batch.
    monkeypatch.setattr(hung_workers, "_PATIENCE_S", 60.0)
    monkeypatch.setattr(hung_workers, "_QUIET_S", 3.0)
    batches = iter(DataLoader(Hanging(8), batch_size=2, num_workers=1, timeout=60))
    plain([next(batches), next(batches)])
    monkeypatch.setattr(batches, "_timeout", 1)

    with pytest.raises(RuntimeError, match="DataLoader timed out after 1 seconds") as caught:
        next(batches)

    said = str(caught.value)
    assert "has not given the batch of indices [4, 5]" in said
    assert "test_data_loader_workers.py" in said
    assert " in __getitem__" in said
    assert "resource_sharer" not in said


def ended(pids, limit_s=60):
    """Whether all processes end within the limit, those too that nobody has waited for yet."""
    until_s = time.monotonic() + limit_s
    living = [pid for pid in pids if is_alive(pid)]
    while living and time.monotonic() < until_s:
        time.sleep(0.05)
        living = [pid for pid in living if is_alive(pid)]
    return living == []


def is_alive(pid):
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


class Pids(Numbers):
    def __getitem__(self, index):
        return os.getpid()


def test_workers_end_when_the_loop_is_left_early():
    loader = DataLoader(Pids(100), num_workers=2)
    pids = set()
    for batch in loader:
        pids.add(batch.item())
        if len(pids) == 2:
            break

    assert ended(pids)
    assert loader.state_dict()["batches"] == 2


@pytest.mark.timeout(240)
def test_workers_end_at_once_whose_iterator_is_found_in_a_cycle(monkeypatch):
    """As one that Lightning's trainer holds: torch waits for each until it looks again by itself."""
    monkeypatch.setattr(_utils, "MP_STATUS_CHECK_INTERVAL", 600)
    batches = iter(DataLoader(Pids(100), num_workers=2))
    pids = {next(batches).item() for _ in range(2)}
    batches.itself = batches

    del batches
    gc.collect()

    assert ended(pids)


def test_workers_end_when_the_trainer_is_killed(warm_python):
    script = textwrap.dedent("""
        import time
        from tests.support.trainer.loaders import Numbers
        from trainer_integration import DataLoader
        batches = iter(DataLoader(Numbers(100), num_workers=2))
        print(*(worker.pid for worker in batches._workers), flush=True)
        time.sleep(600)
    """)
    command = [warm_python.path, "-c", script]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as trainer:
        pids = [int(word) for word in trainer.stdout.readline().split()]
        os.kill(trainer.pid, signal.SIGKILL)

    assert len(pids) == 2
    assert ended(pids)


@pytest.mark.parametrize("place", ["forked", "begun"])
def test_workers_end_whose_trainer_was_killed_before_torch_looked_for_it(warm_python, place):
    script = textwrap.dedent("""
        import os, select, sys, time
        from tests.support.trainer.loaders import Numbers
        from trainer_integration import DataLoader
        trainer = os.pidfd_open(os.getpid())
        def await_its_end(*_):
            select.select([trainer], [], [])
        if sys.argv[1] == "forked":
            os.register_at_fork(after_in_child=await_its_end)
            await_its_end_too = None
        else:
            await_its_end_too = await_its_end
        loader = DataLoader(Numbers(100), num_workers=2, worker_init_fn=await_its_end_too)
        batches = iter(loader)
        print(*(worker.pid for worker in batches._workers), flush=True)
        time.sleep(600)
    """)
    command = [warm_python.path, "-c", script, place]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as trainer:
        pids = [int(word) for word in trainer.stdout.readline().split()]
        os.kill(trainer.pid, signal.SIGKILL)

    assert len(pids) == 2
    assert ended(pids)


class OpensTheMix(IterableDataset):
    def __iter__(self):
        yield from omniload.open("mix.yaml")


@pytest.mark.parametrize("kind", [TorchLoader, DataLoader])
def test_a_mix_opened_in_a_worker_is_refused_by_name(kind):
    with pytest.raises(Exception, match="the mix is opened in worker 0 of 2 of torch's DataLoader"):
        list(kind(OpensTheMix(), num_workers=2))

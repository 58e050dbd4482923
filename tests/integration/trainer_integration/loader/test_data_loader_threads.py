"""workers="thread": torch's batches in torch's order, made by threads of this process."""

import gc
import os
import threading
import warnings

import pytest
import torch
from torch.utils.data import DataLoader as TorchLoader

from omniload.base.errors import ConfigError, StateError
from tests.support.trainer.loaders import (
    Numbers,
    Remembering,
    Stream,
    plain,
    resumed_equals_unbroken,
)
from trainer_integration import DataLoader

pytestmark = [
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),
    pytest.mark.usefixtures("leaves_nothing_behind"),
]


def threaded(length=13, size=3, **keywords):
    return DataLoader(Numbers(length), size, num_workers=2, workers="thread", **keywords)


@pytest.mark.parametrize("size", [3, None])
def test_the_batches_are_torchs(size):
    torch.manual_seed(1)
    theirs = TorchLoader(Numbers(13), size, shuffle=True, num_workers=2)
    expected = [plain(theirs), plain(theirs)]
    torch.manual_seed(1)
    ours = threaded(size=size, shuffle=True)

    assert [plain(ours), plain(ours)] == expected


@pytest.mark.parametrize("position", [0, 1, 4, 5])
def test_the_place_is_of_the_batches_handed_out(position):
    resumed_equals_unbroken(
        lambda: TorchLoader(Numbers(13), 3, shuffle=True, num_workers=2),
        lambda: threaded(shuffle=True),
        lambda: DataLoader(Numbers(13), 3, shuffle=True),
        epoch=1,
        position=position,
    )


def epochs_of(loader):
    """Return two epochs, and what follows one that is left after its first batch."""
    whole = [plain(loader), plain(loader)]
    left = plain([next(iter(loader))])
    return [*whole, left, plain(loader)]


def test_kept_threads_make_every_epoch_as_torchs_workers_do():
    torch.manual_seed(1)
    expected = epochs_of(
        TorchLoader(Numbers(13), 3, shuffle=True, num_workers=2, persistent_workers=True)
    )
    torch.manual_seed(1)

    with threaded(shuffle=True, persistent_workers=True) as ours:
        assert epochs_of(ours) == expected


def test_a_closed_loader_gives_no_batch_of_kept_threads_and_another_epoch_when_asked():
    with threaded(13, 1, persistent_workers=True, timeout=60) as loader:
        batches = iter(loader)
        next(batches)
        loader.close()

        with pytest.raises(RuntimeError, match="the loader was closed: iterate it again"):
            list(batches)
        assert len(list(loader)) == 13


@pytest.mark.parametrize("position", [1, 5])
def test_kept_threads_resume(position):
    resumed_equals_unbroken(
        lambda: TorchLoader(Numbers(13), 3, shuffle=True, num_workers=2, persistent_workers=True),
        lambda: threaded(shuffle=True, persistent_workers=True),
        lambda: threaded(shuffle=True, persistent_workers=True),
        epoch=1,
        position=position,
    )


class Together(Numbers):
    """No sample comes before another one is asked for."""

    def __init__(self, length):
        super().__init__(length)
        self.both = threading.Barrier(2, timeout=60)

    def __getitem__(self, index):
        self.both.wait()
        return os.getpid()


def test_threads_work_at_the_same_time_and_in_this_process():
    loader = DataLoader(Together(4), num_workers=2, workers="thread")

    assert plain(loader) == [[os.getpid()]] * 4


class Torn(Numbers):
    def __getitem__(self, index):
        if index == 2:
            raise TimeoutError("sample 2 is late")
        return index


def test_an_error_is_raised_for_its_batch_and_the_next_one_follows():
    batches = iter(DataLoader(Torn(4), num_workers=2, workers="thread", timeout=30))
    before = plain([next(batches), next(batches)])
    with pytest.raises(TimeoutError, match="sample 2 is late"):
        next(batches)

    assert before + plain(batches) == [[0], [1], [3]]


class Hanging(Numbers):
    def __init__(self, length):
        super().__init__(length)
        self.go_on = threading.Event()

    def __getitem__(self, index):
        if index == 1:
            self.go_on.wait(60)
        return index


def test_a_hung_thread_is_shown_with_its_batch_and_stack(monkeypatch):
    dataset = Hanging(4)
    batches = iter(DataLoader(dataset, num_workers=2, workers="thread", timeout=60))
    next(batches)
    # Only now: on a busy machine a first batch may take longer.
    monkeypatch.setattr(batches, "_timeout", 1)
    with pytest.raises(
        RuntimeError, match=r"timed out after 1 seconds: .* of indices \[1\]"
    ) as told:
        next(batches)
    dataset.go_on.set()

    assert "test_data_loader_threads.py" in str(told.value)
    assert " in __getitem__" in str(told.value)
    assert plain(batches) == [[1], [2], [3]]


def test_worker_init_fn_is_called_in_each_thread_and_its_error_is_told():
    begun = []
    plain(threaded(worker_init_fn=begun.append))

    assert sorted(begun) == [0, 1]

    def fail(number):
        raise LookupError(f"thread {number} has no map")

    with pytest.raises(LookupError, match="has no map") as told:
        plain(threaded(worker_init_fn=fail))
    del told
    # The traceback held the iterator, and the thread that has raised it may hold it for a moment longer.
    for thread in threading.enumerate():
        while thread.name.startswith("omniload-loader") and thread.is_alive():
            gc.collect()
            thread.join(0.01)


def test_the_state_of_a_dataset_that_threads_read_ahead_in_is_of_no_batch():
    loader = DataLoader(Remembering(8), num_workers=2, workers="thread")
    next(iter(loader))

    with pytest.raises(
        StateError, match=r"Remembering has a state of its own, and workers='thread'"
    ):
        loader.state_dict()


def test_an_iterator_left_early_ends_its_threads():
    batches = iter(threaded(length=1000))
    next(batches)
    del batches


def test_threads_move_to_a_state_loaded_meanwhile():
    loader = threaded(length=6, size=1)
    batches = iter(loader)
    next(batches)
    state = loader.state_dict()
    next(batches)
    loader.load_state_dict(state)

    assert plain(batches) == [[n] for n in range(1, 6)]
    with pytest.raises(StateError):
        loader.load_state_dict({"version": 99})


@pytest.mark.parametrize(
    ("dataset", "keywords", "message"),
    [
        (
            Numbers(3),
            {"workers": "fiber"},
            r"workers='fiber' is not one of \['process', 'thread'\]",
        ),
        (Numbers(3), {"on_hang": "wait"}, r"on_hang='wait' is not one of"),
        (
            Stream(3),
            {"workers": "thread"},
            "is for map datasets, found the iterable dataset Stream",
        ),
        (Stream(3), {"on_hang": "replace"}, "on_hang='replace' is for map datasets"),
        (Numbers(3), {"on_hang": "replace"}, "found num_workers=0, timeout=0 and in_order=True"),
        (
            Numbers(3),
            {"on_hang": "replace", "workers": "thread", "num_workers": 1, "timeout": 1},
            "cannot kill a thread",
        ),
        ("mix.yaml", {"workers": "thread"}, "does not go with a mix"),
    ],
)
def test_what_does_not_go_together_is_refused_by_name(dataset, keywords, message):
    with warnings.catch_warnings(), pytest.raises(ConfigError, match=message):
        DataLoader(dataset, **keywords)

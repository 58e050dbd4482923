"""Batches through shared memory from real workers: torch's, held as long as they are used, and no leftovers."""

import os
import signal
import subprocess
import textwrap

import psutil
import pytest
import torch
from torch.utils.data import DataLoader as TorchLoader
from torch.utils.data import Dataset

from tests.support.trainer.loaders import plain, torch_files
from trainer_integration import DataLoader

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")


class Rows(Dataset):
    """Sample ``i`` is 1,000 times ``i``, with some of other kinds."""

    def __init__(self, length):
        self.length = length

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        return {"row": torch.full((1000,), index), "name": str(index), "number": index}


def as_lists(batches):
    return [
        {key: part.tolist() if isinstance(part, torch.Tensor) else part for key, part in b.items()}
        for b in batches
    ]


@pytest.mark.parametrize(
    "keywords",
    [
        {"batch_size": 3, "num_workers": 2},
        {"batch_size": 3, "num_workers": 2, "persistent_workers": True},
        {"batch_size": None, "num_workers": 2},
    ],
    ids=str,
)
def test_all_batches_are_torchs_though_the_consumer_keeps_every_one(keywords):
    torch.manual_seed(1)
    loader = DataLoader(Rows(40), shuffle=True, **keywords)
    ours = [*loader, *loader]
    torch.manual_seed(1)
    theirs = TorchLoader(Rows(40), shuffle=True, **keywords)

    assert as_lists(ours) == as_lists([*theirs, *theirs])


def test_a_worker_of_a_fork_server_maps_the_same_memory():
    loader = DataLoader(Rows(6), 2, num_workers=1, multiprocessing_context="forkserver")
    batches = iter(loader)
    kept = list(batches)

    assert as_lists(kept) == as_lists(TorchLoader(Rows(6), 2))
    assert {row["row"].is_shared() for row in kept} == {False}


def test_a_dropped_batch_makes_room_for_the_next():
    loader, places = DataLoader(Rows(120), 2, num_workers=1), set()
    for batch in loader:
        places.add(batch["row"].data_ptr())

    assert len(places) <= 2 + loader.prefetch_factor


def test_batches_outlive_their_workers():
    kept = [batch["row"] for batch in DataLoader(Rows(12), 2, num_workers=2)]

    assert [row[0, 0].item() for row in kept] == [0, 2, 4, 6, 8, 10]


def test_no_file_is_opened_per_batch():
    batches = iter(DataLoader(Rows(60), 2, num_workers=1))
    next(batches)
    before = psutil.Process().num_fds()
    kept = [batch["row"] for batch in batches]

    assert len(kept) == 29
    assert psutil.Process().num_fds() <= before


def test_memory_that_is_refused_leaves_torchs_way(monkeypatch, caplog):
    def refused(*_):
        raise OSError("no memory to map")

    monkeypatch.setattr(os, "memfd_create", refused)

    assert [b["row"][0, 0].item() for b in DataLoader(Rows(6), 2, num_workers=1)] == [0, 2, 4]
    assert (
        "batches come torch's way, for there is no memory to share: no memory to map" in caplog.text
    )


@pytest.mark.parametrize("killed", ["trainer", "worker"])
def test_a_kill_leaves_nothing_in_dev_shm(warm_python, killed):
    script = textwrap.dedent("""
        import os, sys
        from tests.integration.trainer_integration.loader.test_data_loader_transport import Rows
        from trainer_integration import DataLoader
        batches = iter(DataLoader(Rows(10_000), 2, num_workers=2))
        kept = [next(batches) for _ in range(5)]
        print(*(worker.pid for worker in batches._workers), os.getpid(), flush=True)
        sys.stdin.readline()
        for kept in batches: pass
    """)
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen([warm_python.path, "-c", script], text=True, **pipes) as trainer:
        pids = [int(word) for word in trainer.stdout.readline().split()]
        workers = [psutil.Process(pid) for pid in pids[:-1]]
        os.kill(trainer.pid if killed == "trainer" else pids[0], signal.SIGKILL)
        said = trainer.communicate("go\n" if killed == "worker" else None, timeout=60)[1]

    assert psutil.wait_procs(workers, timeout=60)[1] == []
    assert torch_files(pids) == []
    assert ("exited unexpectedly" in said or "is killed by signal" in said) == (killed == "worker")


def failing(batch):
    raise LookupError("no collating today")


def test_an_error_of_the_users_collate_keeps_its_kind():
    with pytest.raises(LookupError, match="no collating today"):
        plain(DataLoader(Rows(4), num_workers=1, collate_fn=failing))


class Unpicklable(Rows):
    def __getitem__(self, index):
        return lambda: index


def first(batch):
    return batch[0]


def test_what_cannot_be_sent_is_told_and_not_waited_for():
    with pytest.raises(Exception, match="pickle"):
        plain(DataLoader(Unpicklable(4), num_workers=1, collate_fn=first, timeout=60))

"""on_hang="replace": a worker that hangs or dies, and the batches that there would have been."""

import os
import signal
import threading
from pathlib import Path

import psutil
import pytest
import torch

from tests.support.trainer.loaders import Numbers, Remembering, plain
from trainer_integration import DataLoader

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")


class Once(Numbers):
    """Sample 5 hangs, or kills its worker, the first time that it is asked for."""

    def __init__(self, length, mark, how):
        super().__init__(length)
        self.mark, self.how = mark, how

    def __getitem__(self, index):
        if index == 5 and not Path(self.mark).exists():
            Path(self.mark).touch()
            self.stop()
        return torch.full((1000,), index)

    def stop(self):
        if self.how == "hang":
            threading.Event().wait()
        os.kill(os.getpid(), signal.SIGSTOP if self.how == "stopped" else signal.SIGKILL)


def firsts(batches):
    return [batch[:, 0].tolist() for batch in batches]


@pytest.mark.parametrize("how", ["hang", "killed", "stopped"])
@pytest.mark.parametrize("kept", [False, True])
def test_all_batches_come_in_their_order(tmp_path, caplog, how, kept):
    dataset = Once(16, str(tmp_path / "mark"), how)
    # One that has died is seen before any limit; the others have to wait for it.
    limit_s = 60 if how == "killed" else 3
    loader = DataLoader(
        dataset, 2, num_workers=2, timeout=limit_s, on_hang="replace", persistent_workers=kept
    )
    held = list(loader)  # the old worker's blocks are not the new one's
    epochs = [firsts(held), firsts(loader), firsts(held)]

    assert epochs == [[[n, n + 1] for n in range(0, 16, 2)]] * 3
    # A busy machine may keep another worker for longer than the limit: it is replaced as well, which is no fault.
    said = [text for text in caplog.messages if how == "killed" or "indices [4, 5]" in text]
    assert len(said) == 1 or (said and how != "killed")
    assert ("has died (exit code -9)" in said[0]) == (how == "killed")
    assert how == "killed" or "has not given the batch of indices [4, 5]" in said[0]
    assert how != "hang" or " in stop" in said[0]
    loader.close()


class Always(Numbers):
    def __getitem__(self, index):
        if index == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        return index


def test_a_sample_that_always_stops_its_worker_is_named():
    loader = DataLoader(Always(8), 2, num_workers=1, timeout=60, on_hang="replace")

    with pytest.raises(
        RuntimeError, match=r"3 workers have stopped at the batch of indices \[2, 3\]"
    ):
        plain(loader)


def test_the_place_is_saved_through_a_replacement(tmp_path):
    def made():
        dataset = Once(16, str(tmp_path / "mark"), "killed")
        return DataLoader(dataset, 2, num_workers=2, timeout=60, on_hang="replace")

    loader = made()
    batches = iter(loader)
    before = firsts([next(batches) for _ in range(4)])
    again = made()
    again.load_state_dict(loader.state_dict())

    assert before + firsts(again) == [[n, n + 1] for n in range(0, 16, 2)]


class RememberingOnce(Remembering):
    """Sample 5 kills its worker the first time that it is asked for."""

    def __init__(self, length, mark):
        super().__init__(length)
        self.mark = mark

    def __getitem__(self, index):
        if index == 5 and not Path(self.mark).exists():
            Path(self.mark).touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitem__(index)


def test_a_new_worker_begins_with_the_state_that_the_dataset_had(tmp_path):
    dataset = RememberingOnce(16, str(tmp_path / "mark"))
    keywords = {"num_workers": 2, "collate_fn": list}
    loader = DataLoader(dataset, 1, timeout=60, on_hang="replace", **keywords)

    assert list(loader) == list(DataLoader(Remembering(16), 1, **keywords))


def test_no_worker_is_left(tmp_path):
    loader = DataLoader(
        Once(16, str(tmp_path / "mark"), "hang"), 2, num_workers=2, timeout=2, on_hang="replace"
    )
    before = set(psutil.Process().children(recursive=True))
    for batch in loader:
        if batch[0, 0] == 4:
            break
    left = set(psutil.Process().children(recursive=True)) - before

    assert psutil.wait_procs(left, timeout=60)[1] == []

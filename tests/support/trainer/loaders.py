"""Datasets and oracles for tests of the drop-in DataLoader."""

from collections.abc import Iterable
from pathlib import Path

import torch
from torch.utils.data import Dataset, IterableDataset, get_worker_info

from trainer_integration.loader.transport.sealing import DirectContext

__all__ = [
    "Drawing",
    "Numbers",
    "Remembering",
    "Stream",
    "StreamWithState",
    "Turning",
    "came_from",
    "plain",
    "resumed_equals_unbroken",
    "torch_files",
]

_WAIT_S = 60


class Numbers(Dataset):
    """Sample ``i`` is ``i``; ``loaded`` lists the samples that this process made."""

    def __init__(self, length):
        self.length, self.loaded = length, []

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        self.loaded.append(index)
        return index


class Remembering(Dataset):
    """Sample ``i`` is ``i`` and the number of samples that this copy made before; its state is the same object."""

    def __init__(self, length):
        self.length, self.held = length, {"made": 0}

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        self.held["made"] += 1
        return [index, self.held["made"] - 1]

    def state_dict(self):
        return self.held

    def load_state_dict(self, state):
        self.held = dict(state)


class Stream(IterableDataset):
    """The numbers below ``length``, dealt to the workers in rotation."""

    def __init__(self, length):
        self.length, self.at, self.resume = length, 0, None

    def __iter__(self):
        info = get_worker_info()
        mine = range(self.length) if info is None else range(info.id, self.length, info.num_workers)
        self.at, self.resume = self.resume or 0, None
        while self.at < len(mine):
            self.at += 1
            yield mine[self.at - 1]


class StreamWithState(Stream):
    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.resume = state["at"]


class Turning(IterableDataset):
    """Its own iterator: ``__iter__`` begins anew and makes the object that a state is loaded into."""

    def __init__(self, length):
        self.length = length

    def __iter__(self):
        info = get_worker_info()
        first, step = (0, 1) if info is None else (info.id, info.num_workers)
        self.place = {"next": first, "step": step}
        return self

    def __next__(self):
        if self.place["next"] >= self.length:
            raise StopIteration
        self.place["next"] += self.place["step"]
        return self.place["next"] - self.place["step"]

    def state_dict(self):
        return dict(self.place)

    def load_state_dict(self, state):
        self.place.update(state)


class Drawing(IterableDataset):
    """Random numbers; its iterators know how many remain, and the state of torch's generator."""

    def __init__(self, length):
        self.length = length

    def __iter__(self):
        return _Draws(self.length)


class _Draws:
    def __init__(self, left):
        self.left = left

    def __iter__(self):
        return self

    def __next__(self):
        if not self.left:
            raise StopIteration
        self.left -= 1
        return int(torch.randint(1 << 30, ()))

    def state_dict(self):
        return {"left": self.left, "generator": torch.get_rng_state().tolist()}

    def load_state_dict(self, state):
        self.left = state["left"]
        torch.set_rng_state(torch.tensor(state["generator"], dtype=torch.uint8))


def plain(batches):
    """Return batches as lists, which can be compared."""
    return [b.tolist() if isinstance(b, torch.Tensor) else b for b in batches]


def resumed_equals_unbroken(oracle, make, resume, *, epoch, position):
    """Compare torch's loader in an unbroken run with ours saved and resumed at one place.

    Args:
        oracle: Makes torch's loader.
        make: Makes ours, which saves.
        resume: Makes ours, which resumes.
        epoch: Epoch in which the state is saved; another epoch follows.
        position: Batches handed out before the save.
    """
    torch.manual_seed(3)
    theirs = oracle()
    unbroken = [plain(theirs) for _ in range(epoch + 2)]
    torch.manual_seed(3)
    loader = make()
    for expected in unbroken[:epoch]:
        assert plain(loader) == expected
    batches = iter(loader)
    assert plain([next(batches) for _ in range(position)]) == unbroken[epoch][:position]
    state, globally = loader.state_dict(), torch.get_rng_state()
    del batches
    # This stands for another process: its generators have other states, and the trainer restores the global one.
    torch.manual_seed(99)
    again = resume()
    again.load_state_dict(state)
    torch.set_rng_state(globally)
    assert plain(again) == unbroken[epoch][position:]
    assert plain(again) == unbroken[epoch + 1]


def put_all(queue, sizes):
    for number, size in enumerate(sizes):
        queue.put((number, b"x" * size))


def came_from(context, sizes):
    """Put messages of these sizes in a worker; return number and size of each message that arrived."""
    queue = DirectContext(context).Queue()
    worker = context.Process(target=put_all, args=(queue, sizes))
    worker.start()
    try:
        came = [queue.get(timeout=_WAIT_S) for _ in sizes]
    finally:
        worker.join(_WAIT_S)
    return [(number, len(data)) for number, data in came]


def torch_files(pids: Iterable[int]) -> list[str]:
    """Return the files of these processes in torch's shared memory; other processes of the machine have their own."""
    own = tuple(f"torch_{pid}_" for pid in pids)
    return [path.name for path in Path("/dev/shm").iterdir() if path.name.startswith(own)]

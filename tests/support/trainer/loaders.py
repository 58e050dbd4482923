"""Datasets and oracles for tests of the drop-in DataLoader."""

import torch
from torch.utils.data import Dataset, IterableDataset, get_worker_info

__all__ = ["Numbers", "Stream", "StreamWithState", "plain", "resumed_equals_unbroken"]


class Numbers(Dataset):
    """Sample ``i`` is ``i``; ``loaded`` lists those that this process made."""

    def __init__(self, length):
        self.length, self.loaded = length, []

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        self.loaded.append(index)
        return index


class Stream(IterableDataset):
    """The numbers below ``length``, dealt to workers in turn."""

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


def plain(batches):
    """Return batches as lists, which compare."""
    return [b.tolist() if isinstance(b, torch.Tensor) else b for b in batches]


def resumed_equals_unbroken(oracle, make, resume, *, epoch, position):
    """Compare torch's loader run unbroken with ours saved and resumed at one place.

    Args:
        oracle: Makes torch's loader.
        make: Makes ours, which saves.
        resume: Makes ours, which resumes.
        epoch: Epoch that the state is taken in; another follows it.
        position: Batches handed out before.
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
    # Another process: its generators stand elsewhere, and the trainer restores the global one.
    torch.manual_seed(99)
    again = resume()
    again.load_state_dict(state)
    torch.set_rng_state(globally)
    assert plain(again) == unbroken[epoch][position:]
    assert plain(again) == unbroken[epoch + 1]

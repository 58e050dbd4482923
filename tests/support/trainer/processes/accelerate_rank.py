"""One rank of two under accelerate: its batches, in an unbroken and a resumed run."""

import sys
from pathlib import Path

import accelerate
import pytest
import torch
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import DataLoaderConfiguration
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.data import DataLoader as TorchLoader
from torch.utils.data import get_worker_info

import omniload
from omniload.base.errors import StateError
from tests.support.trainer.loaders import Numbers, Stream, plain
from trainer_integration import DataLoader
from trainer_integration.hosts.accelerate import Accelerator


class Seeds(Numbers):
    """Samples with the seed of the worker that made them."""

    def __getitem__(self, index):
        return torch.tensor([index, get_worker_info().seed])


TP = "tp"
"""The axis tp, which accelerate's configuration does not have: both ranks are along it."""
CASES = {
    "workers' seeds": ({}, lambda kind: kind(Seeds(12), 2, shuffle=True, num_workers=1)),
    # 23 samples in batches of 2 over two ranks: the last batch is filled up from the first.
    "even": ({}, lambda kind: kind(Numbers(23), 2, shuffle=True)),
    "uneven": ({"even_batches": False}, lambda kind: kind(Numbers(24), 2, shuffle=True)),
    "seedable": ({"use_seedable_sampler": True}, lambda kind: kind(Numbers(23), 2, shuffle=True)),
    "split": ({"split_batches": True}, lambda kind: kind(Numbers(23), 4, shuffle=True)),
    # Only whole groups, because accelerate fills up the last one from the first group that it has seen in this
    # process.
    "dispatched": ({"dispatch_batches": True}, lambda kind: kind(Numbers(24), 2, shuffle=True)),
    "dispatched stream": ({}, lambda kind: kind(Stream(24), 2)),
    "dispatched and split": (
        {"dispatch_batches": True, "split_batches": True},
        lambda kind: kind(Stream(24), 4),
    ),
    "dealt stream": ({"dispatch_batches": False}, lambda kind: kind(Stream(23), 2)),
    # Ranks along tp have the same batches. If batches are dispatched, rank 0 takes them one at a time.
    "dispatched along tp": (
        {"dispatch_batches": True, TP: True},
        lambda kind: kind(Numbers(24), 2, shuffle=True),
    ),
    "dispatched stream along tp": ({TP: True}, lambda kind: kind(Stream(24), 2)),
    "along tp": (
        {TP: True, "use_seedable_sampler": True},
        lambda kind: kind(Numbers(24), 2, shuffle=True),
    ),
}


def prepared(kind, configuration, loader):
    AcceleratorState._reset_state()
    GradientState._reset_state()
    torch.manual_seed(5)
    settings = {name: value for name, value in configuration.items() if name != TP}
    host = kind(cpu=True, dataloader_config=DataLoaderConfiguration(**settings))
    if TP in configuration:
        # The mesh that parallelism_config= would make; accelerate refuses that option without accelerators.
        host.state.device_mesh = init_device_mesh("cpu", (2,), mesh_dim_names=(TP,))
    made = host.prepare(loader())
    torch.manual_seed(5 + host.process_index)  # workers of each rank have seeds of their own
    return host, made


def check(name, folder):
    """Compare epochs of accelerate's own loaders with ours, saved and loaded at every batch."""
    configuration, make = CASES[name]
    _, theirs = prepared(accelerate.Accelerator, configuration, lambda: make(TorchLoader))
    unbroken = [plain(theirs) for _ in range(3)]
    host, loader = prepared(Accelerator, configuration, lambda: make(DataLoader))
    assert plain(loader) == unbroken[0], name
    last = len(unbroken[1])
    places = (0, last - 2, last - 1)
    for number, batch in enumerate(loader):
        assert batch.tolist() == unbroken[1][number], (name, number)
        if number in places:
            host.save_state(folder / f"{name}-{number}")
    for number in places:
        again, resumed = prepared(Accelerator, configuration, lambda: make(DataLoader))
        again.load_state(folder / f"{name}-{number}")
        if number < last - 1:
            assert plain(resumed) == unbroken[1][number + 1 :], (name, number)
        assert plain(resumed) == unbroken[2], (name, number)


def check_mix(mix):
    """Check that a mix deals to ranks itself, and accelerate not again: together they get one process's steps."""
    with omniload.open(mix, rank=0, world_size=1, steps=4) as alone:
        steps = [rows_of(batch) for batch in alone]
    _, loader = prepared(Accelerator, {}, lambda: DataLoader(mix, steps=4))
    for number, batch in enumerate(loader):
        everyones = accelerate.utils.gather_object(rows_of(batch))
        assert sorted(everyones) == sorted(steps[number])
    loader.base_dataloader.close()


def rows_of(batch):
    return batch.tokens.tolist()


def check_missing(folder):
    """Check that a rank whose file is gone reports it and does not start from the beginning."""
    configuration, make = CASES["even"]
    host, _ = prepared(Accelerator, configuration, lambda: make(DataLoader))
    saved = folder / "even-0"
    if host.process_index == 1:
        (saved / "omniload_loaders_rank1.pt").unlink()
        with pytest.raises(StateError, match="none of rank 1"):
            host.load_state(saved)
    host.wait_for_everyone()


if __name__ == "__main__":
    place = Path(sys.argv[2])
    for case in CASES:
        check(case, place)
    check_missing(place)
    check_mix(Path(sys.argv[1]))
    torch.distributed.destroy_process_group()

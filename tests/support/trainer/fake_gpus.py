"""Absent GPUs: the parts of their path that run without one.

Torch's ``fake`` backend is a group whose other ranks do not exist. Its fake tensors have a device, a type and a
shape, and no numbers; torch without CUDA copies them to the host, and has no autograd for them. So layers are tested
on the meta device, which has no numbers either, and copies of tensors to the host are tested on fake tensors.
"""

import re
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore

from trainer_integration.moe.parallel.process_groups import ProcessGroups


def without_gpus(backend):
    """Return a backend that drops the data that GPUs send; like NCCL, that part accepts only tensors of GPUs."""
    return re.sub(r"(cuda:)?nccl", "cuda:fake", backend)


@contextmanager
def a_rank_of_many(dp, sp, *, device="cpu"):
    """Yield the groups of the first rank of a mesh whose other ranks do not exist: received values are arbitrary."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=dp * sp)
    try:
        yield ProcessGroups.of(dp, sp, device)
    finally:
        dist.destroy_process_group()


@contextmanager
def fake_tensors(monkeypatch):
    """Make tensors of ``cuda`` possible, without numbers; waits return at once."""
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        yield

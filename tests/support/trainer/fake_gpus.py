"""GPUs that are not there: what of their path runs without one.

Torch's ``fake`` backend is a group whose other ranks do not exist. Its fake tensors have a device, a type and a
shape, and no numbers; torch without CUDA copies them to the host, and has no autograd for them. So layers are tried
on the meta device, which has no numbers either, and what brings tensors to the host on fake ones.
"""

import re
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore

from trainer_integration.moe.parallel.process_groups import ProcessGroups


def without_gpus(backend):
    """Return a backend that loses what GPUs send; like NCCL, that part takes tensors of GPUs alone."""
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
    """Have tensors of ``cuda`` be made, without numbers; there is nothing to wait for."""
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        yield

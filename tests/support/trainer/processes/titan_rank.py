"""One of two ranks that save one DCP checkpoint: each resumes at its own place."""

import sys

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from tests.support.trainer.loaders import Numbers, plain
from trainer_integration import DataLoader
from trainer_integration.hosts.torchtitan import TitanLoader

if __name__ == "__main__":
    dist.init_process_group("gloo")
    rank = dist.get_rank()

    def make():
        generator = torch.Generator().manual_seed(rank)
        loader = DataLoader(Numbers(10), 1, shuffle=True, generator=generator)
        return TitanLoader(loader, dp_rank=rank, dp_world_size=2)

    loader = make()
    batches = iter(loader)
    for _ in range(2 + 3 * rank):
        next(batches)
    dcp.save({"dataloader": loader}, checkpoint_id=sys.argv[1])
    resumed = make()
    dcp.load({"dataloader": resumed}, checkpoint_id=sys.argv[1])
    rest = plain(resumed)
    assert rest == plain(batches)
    assert len(rest) == 8 - 3 * rank
    dist.destroy_process_group()

"""token_mean over real ranks: DistributedDataParallel's gradient is that of one rank with all tokens."""

import gc
import os
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch.multiprocessing import start_processes
from torch.nn.parallel import DistributedDataParallel

from tests.support.trainer.fork_server import forking
from trainer_integration import token_mean

_COUNTS = (3, 40)


def _tokens(rank):
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(_COUNTS[rank], 5, generator=generator)


def _model():
    torch.manual_seed(7)
    return torch.nn.Linear(5, 1)


def _losses(model, tokens):
    return model(tokens).square().sum()


def _gradient(rank):
    model = DistributedDataParallel(_model())
    token_mean(_losses(model, _tokens(rank)), _COUNTS[rank]).backward()
    return model.module.weight.grad


def _rank(rank, folder):
    # The loopback alone: a machine's name may lead elsewhere.
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    store = dist.FileStore(f"{folder}/store", 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    torch.save(_gradient(rank), f"{folder}/{rank}.pt")
    # A model is a ring of references and holds the group: were it left to the interpreter's end, a
    # thread of gloo that still lets go of its last work would find no interpreter, and abort.
    gc.collect()
    dist.destroy_process_group()


def test_the_gradient_of_unequal_ranks_is_that_of_one_rank_with_all_tokens():
    with tempfile.TemporaryDirectory() as folder:
        method = forking().get_start_method()
        start_processes(_rank, args=(folder,), nprocs=2, start_method=method)
        gradients = [torch.load(Path(folder, f"{rank}.pt")) for rank in range(2)]
    alone = _model()
    (_losses(alone, torch.cat([_tokens(0), _tokens(1)])) / sum(_COUNTS)).backward()

    torch.testing.assert_close(gradients[0], alone.weight.grad)
    torch.testing.assert_close(gradients[1], alone.weight.grad)

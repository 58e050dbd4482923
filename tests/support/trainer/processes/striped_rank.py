"""Ranks that save or load a striped checkpoint, as processes of their own.

They are forked from a server that has imported torch once, because an import takes seconds. The tensors ``rows`` and
``columns`` are sharded over the ranks by their first and second dimension; ``bias`` is not sharded.
"""

import contextlib
import os
import signal
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from fusefs.stores.local.store import LocalStore
from tests.support.trainer.fork_server import forking
from tests.support.trainer.moe_builders import (
    a_batch,
    a_config,
    a_microbatch,
    a_model,
    an_optimizer,
    rows_of,
)
from trainer_integration.checkpoint.place import StorePlace
from trainer_integration.checkpoint.striped.place import open_striped
from trainer_integration.checkpoint.striped.writer import (
    StripedCheckpoints,
    load_striped,
    save_striped,
)
from trainer_integration.moe.parallel.process_groups import ProcessGroups
from trainer_integration.training.step import train_step

STRIPING = {"striping": {"unit": 4096, "count": 4}, "plain_limit": 4096}
ROWS = 1000
PATIENCE_S = 120


@dataclass(frozen=True, kw_only=True)
class Job:
    """The work of all ranks of a group."""

    what: str
    """``save`` or ``load`` tensors, or a ``run``: a model with a checkpoint. Loads compare."""
    url: str
    world_size: int = 1
    pause_at: tuple[str, int] | None = None
    """A method of the local store, and the number of the call in which the rank waits to be killed."""
    config: dict = field(default_factory=lambda: STRIPING)
    environment: dict = field(default_factory=dict)


def full(rows=ROWS):
    whole = torch.arange(rows * 64, dtype=torch.float32).reshape(rows, 64)
    return {"rows": whole, "columns": whole, "bias": torch.ones(5)}


def empty(rows=ROWS):
    return {name: torch.zeros_like(tensor) for name, tensor in full(rows).items()}


def require_loads(files, folder):
    """Check that a checkpoint loads whole, here, without ranks."""
    target = empty()
    load_striped(target, files, folder)
    assert all(torch.equal(target[name], tensor) for name, tensor in full().items())


def _sharded(tensors, world_size):
    mesh = init_device_mesh("cpu", (world_size,))
    placed = {"rows": Shard(0), "columns": Shard(1), "bias": Replicate()}
    return {n: distribute_tensor(t, mesh, [placed[n]]) for n, t in tensors.items()}


def _pause_at(name, number, told):
    calls = []
    carry_out = getattr(LocalStore, name)

    def counted(store, path, *rest):
        calls.append(path)
        if len(calls) == number:
            told.send("paused")
            signal.sigwait({signal.SIGUSR1})
        return carry_out(store, path, *rest)

    setattr(LocalStore, name, counted)


def _keep_a_run(place):
    groups = ProcessGroups.of(dp=dist.get_world_size(), sp=1)
    checkpoints = StripedCheckpoints(place, a_config().model_dump(), keep=1, groups=groups)
    model = a_model()
    optimizer = an_optimizer(model)
    train_step(model, optimizer, a_batch(0, [a_microbatch(rows_of(0))]), groups)
    for step in (1, 2):
        checkpoints.save(step, model, optimizer, {"version": 1, "next": step})
    other = a_model(seed=5)

    restored = checkpoints.load(other, an_optimizer(other))

    assert (restored.step, restored.loader_state) == (2, {"version": 1, "next": 2})
    assert all(
        torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True)
    )


def _run(job, rank, rendezvous, told):
    torch.set_num_threads(1)
    os.environ.update({"GLOO_SOCKET_IFNAME": "lo", **job.environment})
    if job.pause_at is not None:
        _pause_at(*job.pause_at, told)
    dist.init_process_group(
        "gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=job.world_size
    )
    try:
        files, folder = open_striped(job.url, job.config)
        if job.what == "run":
            _keep_a_run(StorePlace(files, folder))
        elif job.what == "save":
            save_striped(_sharded(full(), job.world_size), files, folder, dist.group.WORLD)
        else:
            target = _sharded(empty(), job.world_size)
            load_striped(target, files, folder, dist.group.WORLD)
            wanted = _sharded(full(), job.world_size)
            for name, tensor in target.items():
                assert torch.equal(tensor.to_local(), wanted[name].to_local()), name
        told.send("done")
    finally:
        dist.destroy_process_group()


@contextlib.contextmanager
def ranks(job):
    """Start the ranks of a job; yield each process with its reports; leave none behind."""
    context = forking()
    started = []
    with tempfile.TemporaryDirectory() as folder:
        try:
            for rank in range(job.world_size):
                told, telling = context.Pipe(duplex=False)
                arguments = (job, rank, str(Path(folder) / "rendezvous"), telling)
                process = context.Process(target=_run, args=arguments)
                process.start()
                telling.close()
                started.append((process, told))
            yield started
        finally:
            for process, _ in started:
                process.kill()
                process.join()


def run(job):
    """Run a job to its end; every rank must get there."""
    with ranks(job) as started:
        for process, told in started:
            assert told.poll(PATIENCE_S)
            assert told.recv() == "done"
            process.join(PATIENCE_S)
            assert process.exitcode == 0

"""Work of a rank in the tests of the parallel layer; ``ALONE`` does the same without peers."""

import itertools
from pathlib import Path

import numpy as np
import torch
from torch.distributed.tensor import DTensor

from omniload.batch.slices import slice_for_cp
from tests.support.trainer.moe_builders import (
    a_batch,
    a_config,
    a_microbatch,
    an_optimizer,
    documents_of,
    rows_of,
)
from trainer_integration.checkpoint.checkpoints import Checkpoints
from trainer_integration.checkpoint.place import StorePlace
from trainer_integration.checkpoint.saving import BackgroundSaver, groups_for_saving
from trainer_integration.checkpoint.striped.place import open_striped
from trainer_integration.checkpoint.striped.writer import StripedCheckpoints
from trainer_integration.checkpoint.tensors import tensors_of
from trainer_integration.config import TrainConfig
from trainer_integration.moe.config import MoEShape
from trainer_integration.moe.inputs import ModelInputs
from trainer_integration.moe.model import is_of_experts
from trainer_integration.moe.parallel.process_groups import ProcessGroups
from trainer_integration.run.crossover_ranks import measured
from trainer_integration.run.joining import built_model
from trainer_integration.training.evaluation import evaluate
from trainer_integration.training.step import accumulate, train_step

ALONE = ProcessGroups()


def dp_place(groups):
    return (
        (0, 1) if groups.mesh is None else (groups.mesh.get_local_rank("dp"), groups.mesh.size(0))
    )


def farthest(found, expected):
    """Return the largest difference between values with the same name."""
    assert found.keys() == expected.keys()
    return max(float(np.abs(found[name] - expected[name]).max()) for name in expected)


def model_of(groups, *, transport="a2a", dtype=torch.float64, fsdp=False, weights=None, **changes):
    config = a_config(**({"init_std": 0.2, "num_kv_heads": 4} | changes))
    parallel = {"dp": dp_place(groups)[1], "sp": groups.sp.size, "fsdp": fsdp}
    shape = config.model_dump(include=set(MoEShape.model_fields))
    train = TrainConfig(
        version=1,
        mix="mix.yaml",
        steps=100,
        parallel=parallel | {"transport": transport},
        model=shape,
    )
    return built_model(train, config, groups, weights=weights).to(dtype)


def batch_of(groups, step, rows, length=32):
    """Return this rank's share of a step's rows."""
    place, size = dp_place(groups)
    microbatch = a_microbatch(rows[place::size], length)
    labels = sum(len(document) - 1 for row in rows for document in row)
    if groups.sp.size > 1:
        microbatch = slice_for_cp(microbatch, groups.sp.rank, groups.sp.size)
    return a_batch(step, [microbatch], loss_tokens=max(1, labels))


def whole(groups, tensors):
    """Return tensors by name, with the experts of all peers."""
    found = {}
    for name, tensor in tensors.items():
        shared_out = groups.sp.size > 1 and is_of_experts(name)
        held = tensor.detach()
        held = held.full_tensor() if isinstance(held, DTensor) else held
        found[name] = (groups.sp.gather(held, "test") if shared_out else held).numpy().copy()
    return found


def gradients(groups, *, rows=None, length=32, **changes):
    """Return the gradients of a step's objective, and the sums of the step."""
    model = model_of(groups, **changes)
    optimizer = an_optimizer(model)
    optimizer.clear()
    rows = rows_of(0) if rows is None else rows
    batch = batch_of(groups, 0, rows, length)
    sums = accumulate(model, batch, batch.loss_tokens)
    optimizer.sum_over(groups)
    totals = sums.over(groups)
    found = whole(groups, {name: p.grad for name, p in model.named_parameters()})
    return found, totals, optimizer.norm()


def losses(groups, *, steps=4, **changes):
    """Train in float32; return the results of all steps."""
    model = model_of(groups, dtype=torch.float32, **changes)
    optimizer = an_optimizer(model, lr=1e-2)
    return [
        train_step(model, optimizer, batch_of(groups, step, rows_of(step)), groups)
        for step in range(steps)
    ]


def traffic(groups, *, rows, length=32, dtype=torch.float32, **changes):
    """Return the bytes that one forward and backward sent, and each layer's choices of this rank's tokens."""
    model = model_of(groups, dtype=dtype, **changes)
    inputs = ModelInputs.of(batch_of(groups, 0, rows, length).microbatches[0], groups.sp)
    _, routings = model.hidden(inputs)
    choices = [routing.experts_NK.tolist() for routing in routings]
    groups.sp.traffic.clear()
    output = model(inputs)
    (output.token_loss + output.balance_loss).backward()
    return dict(groups.sp.traffic), choices


def leaks(groups, *, packings, **changes):
    """Return, for every packing, the documents that affect the outputs of its second one, by this rank's tokens."""
    model = model_of(groups, vocab_size=256, num_layers=2, **changes)
    found = []
    for lengths in packings:
        ids = np.arange(sum(map(sum, lengths)), dtype=np.int32)
        bounds = np.concatenate(([0], np.cumsum([n for row in lengths for n in row])))
        documents = [ids[a:b] for a, b in itertools.pairwise(bounds)]
        rows, at = [], 0
        for row in lengths:
            rows.append(documents[at : at + len(row)])
            at += len(row)
        inputs = ModelInputs.of(batch_of(groups, 0, rows).microbatches[0], groups.sp)
        target = documents[len(documents) // 2]
        mine = torch.isin(inputs.tokens_N, torch.from_numpy(target).long())
        model.zero_grad()
        hidden_ND = model.hidden(inputs)[0]
        generator = torch.Generator().manual_seed(1)
        weight_VD = torch.randn(256, hidden_ND.shape[1], generator=generator, dtype=hidden_ND.dtype)
        (hidden_ND * mine.unsqueeze(1) * weight_VD[inputs.tokens_N]).sum().backward()
        reached = groups.sp.summed(model.embedding_VD.grad.abs().sum(1)) > 0
        found.append([bool(reached[torch.from_numpy(d).long()].any()) for d in documents])
    return found


def random_packings(number, *, seed=0):
    """Return two rows of 32 tokens, filled with documents of any length."""
    rng = np.random.default_rng(seed)
    found = []
    for _ in range(number):
        rows = []
        for _ in range(2):
            row, room = [], int(rng.integers(20, 33))
            while room:
                row.append(int(rng.integers(1, min(room, 14) + 1)))
                room -= row[-1]
            rows.append(row)
        found.append(rows)
    return found


def full_rows(number, length=32, *, seed=0):
    return [
        documents_of([length // 2, length // 4, length // 4], seed=seed + r) for r in range(number)
    ]


def crossover(groups, *, top_ks):
    """Return this rank's measurements of both transports."""
    return measured(groups.sp, a_config(), 256, top_ks, 1)


def evaluated(groups, *, spec, **changes):
    """Return the losses of an evaluation mix."""
    model = model_of(groups, dtype=torch.float32, vocab_size=5000, **changes)
    return evaluate(model, spec, groups)


def evaluated_between_steps(groups, *, spec, **changes):
    """Train, evaluate, train; return losses, a rank's bytes before and after, and names in a checkpoint."""
    model = model_of(groups, dtype=torch.float32, vocab_size=5000, **changes)
    optimizer = an_optimizer(model, lr=1e-2)
    results = [train_step(model, optimizer, batch_of(groups, 0, rows_of(0)), groups)]
    before = kept_bytes(model.parameters())
    evaluate(model, spec, groups)
    after = kept_bytes(model.parameters())
    names = sorted(tensors_of(model, optimizer, groups))
    results.append(train_step(model, optimizer, batch_of(groups, 1, rows_of(1)), groups))
    return [r.figures.loss for r in results], (before, after), names


def kept_bytes(tensors):
    """Return the bytes of this rank's part of tensors."""
    kept = (t.to_local() if isinstance(t, DTensor) else t for t in tensors)
    return sum(t.untyped_storage().nbytes() for t in kept)


def held_bytes(groups, **changes):
    """Return the bytes of parameters, gradients and optimiser state that this rank has between steps."""
    model = model_of(groups, dtype=torch.float32, **changes)
    optimizer = an_optimizer(model)
    train_step(model, optimizer, batch_of(groups, 0, rows_of(0)), groups)
    averages = [t for state in optimizer.state.values() for t in state.values() if t.ndim]
    return kept_bytes(model.parameters()), optimizer.gradients.nbytes, kept_bytes(averages)


def trained(groups, *, steps, load=None, save=None, place=None, **changes):
    """Train, from a checkpoint or from nothing; return losses, and all values of a checkpoint.

    If a checkpoint is loaded, that is the model before training continued.
    """
    model = model_of(groups, dtype=torch.float32, **changes)
    optimizer = an_optimizer(model, lr=1e-2)
    if load is not None:
        with torch.no_grad():  # the loaded values must not have been there before
            for parameter in model.parameters():
                parameter.fill_(7.0)
        found = _checkpoints(groups, model, place).load(model, optimizer, step=load)
        assert found.step == load
        kept = _whole(tensors_of(model, optimizer, groups))
    first = load or 0
    results = [
        train_step(model, optimizer, batch_of(groups, step, rows_of(step)), groups)
        for step in range(first, first + steps)
    ]
    if save is not None:
        _checkpoints(groups, model, place).save(save, model, optimizer, {"version": 1})
    if load is None:
        kept = _whole(tensors_of(model, optimizer, groups))
    return [r.figures.loss for r in results], kept


SAVES = {
    "folder": "{folder}/plain",
    "striped": "omnifs://ckpt::file://{folder}/striped",
    "beside training": "{folder}/beside",
}
"""The target of each way of saving a checkpoint, in a folder."""


def saved_in_all_ways(groups, *, folder, **changes):
    """Train one step and save it in every way; return all that a checkpoint holds.

    The background save begins, the model is trained further, and then the save is awaited.
    """
    model = model_of(groups, dtype=torch.float32, **changes)
    optimizer = an_optimizer(model, lr=1e-2)
    places = {kind: place.format(folder=folder) for kind, place in SAVES.items()}
    train_step(model, optimizer, batch_of(groups, 0, rows_of(0)), groups)
    for kind in ("folder", "striped"):
        _checkpoints(groups, model, places[kind]).save(1, model, optimizer, {"version": 1})
    held = tensors_of(model, optimizer, groups)
    kept = _whole(held)
    beside = _checkpoints(groups_for_saving(groups), model, places["beside training"])
    saver = BackgroundSaver(beside)
    saver.start(1, held, {"version": 1}, {})
    train_step(model, optimizer, batch_of(groups, 0, rows_of(0)), groups)
    assert saver.finish().step == 1
    assert saver.finish() is None
    return kept


def _whole(held):
    full = {name: t.full_tensor() if isinstance(t, DTensor) else t for name, t in held.items()}
    return {name: t.detach().numpy().copy() for name, t in full.items()}


def _checkpoints(groups, model, place):
    identity = model.config.identity()
    if "://" not in place:
        return Checkpoints(Path(place), identity, groups=groups)
    return StripedCheckpoints(StorePlace(*open_striped(place)), identity, groups=groups)

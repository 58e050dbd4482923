"""Work of a rank in the tests of the vision model."""

from dataclasses import replace
from pathlib import Path

import torch.distributed as dist

from tests.support.trainer.moe_builders import a_config, an_optimizer
from trainer_integration.checkpoint.checkpoints import Checkpoints
from trainer_integration.config import TrainConfig
from trainer_integration.moe.config import MoEShape
from trainer_integration.moe.parallel.collectives import ALONE, Peers
from trainer_integration.run.joining import built_model
from trainer_integration.training.evaluation import evaluate
from trainer_integration.training.step import train_step
from trainer_integration.vision.config import VisionConfig, identity_of
from trainer_integration.vision.model import VisionInputs, VisionLanguageModel

VISION = {"patch": 4, "merge": 1, "dim": 16, "num_layers": 2, "hidden": 24, "init_std": 0.2}


def a_vision_model(dp_peers=ALONE, *, merge=1):
    return VisionLanguageModel(
        a_config(vocab_size=257, init_std=0.2),
        VisionConfig(**VISION | {"merge": merge}),
        dp_peers=dp_peers,
    ).double()


def gradients(groups, *, microbatches, merge=1):
    """Return the gradients of a step's summed loss over all ranks, and the embeddings that this rank sent away."""
    size = 1 if groups.dp is None else dist.get_world_size(groups.dp)
    rank = 0 if groups.dp is None else dist.get_rank(groups.dp)
    peers = ALONE if size == 1 else Peers(group=groups.dp, rank=rank, size=size)
    model = a_vision_model(peers, merge=merge)
    for microbatch in microbatches[rank]:
        model(VisionInputs.of_microbatch(microbatch, peers)).token_loss.backward()
    found = {}
    for name, parameter in model.named_parameters():
        gradient = parameter.grad
        if size > 1:
            dist.all_reduce(gradient, group=groups.dp)
        found[name] = gradient.numpy().copy()
    return found, peers.traffic["image embeddings"]


def trained(groups, *, batches, folder, fsdp=False, load=None, save=None, spec=None):
    """Train on batches ``[rank][step]``; return results, the losses of an evaluation and the embeddings sent away."""
    config = a_config(vocab_size=257, init_std=0.2)
    vision = VisionConfig(**VISION)
    train = TrainConfig(
        version=1,
        mix="mix.yaml",
        steps=100,
        parallel={"dp": len(batches), "fsdp": fsdp},
        model=config.model_dump(include=set(MoEShape.model_fields)),
    )
    model = built_model(train, config, groups, vision).double()
    optimizer = an_optimizer(model, lr=1e-2)
    checkpoints = Checkpoints(Path(folder), identity_of(config, vision), groups=groups)
    if load is not None:
        assert checkpoints.load(model, optimizer, step=load).step == load
    mine = batches[0 if groups.dp is None else dist.get_rank(groups.dp)]
    results = [train_step(model, optimizer, batch, groups) for batch in mine[load or 0 : save]]
    if save is not None:
        checkpoints.save(save, model, optimizer, {"version": 1})
    found = None if spec is None else evaluate(model, spec, groups).loss
    results = [replace(result, seconds_compute=0.0) for result in results]
    return results, found, model.dp_peers.traffic["image embeddings"]


def out_of_step(groups, *, microbatches):
    """Run a microbatch, a different one on the second rank; return the error."""
    peers = groups.dp_peers
    model = a_vision_model(peers)
    try:
        model(VisionInputs.of_microbatch(microbatches[peers.rank][peers.rank], peers))
    except Exception as error:  # noqa: BLE001 -- whatever it is
        return f"{type(error).__name__}: {error}"
    return None

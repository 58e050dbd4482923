"""What a rank does in the tests of the vision model."""

import torch.distributed as dist

from tests.support.trainer.moe_builders import a_config
from trainer_integration.moe.parallel.collectives import ALONE, Peers
from trainer_integration.vision.config import VisionConfig
from trainer_integration.vision.inputs import VisionInputs
from trainer_integration.vision.model import VisionLanguageModel

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

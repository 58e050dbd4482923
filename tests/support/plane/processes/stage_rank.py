"""One of four ranks, two stages of two tensor-parallel peers, that train a model of two layers. Prints what it had.

stage_rank.py MIX EVALUATED     each rank prints one line of JSON
"""

import sys

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import omniload
from tests.support.trainer.stages import embedding, finish, fresh, last_layer
from trainer_integration import DataLoader

MIX, EVALUATED = sys.argv[1:]
STEPS = 3


def columns_of(batch):
    """Return the tokens and the labels of a batch, or the messages that refuse them."""
    found = {}
    for name in ("tokens", "labels"):
        try:
            found[name] = getattr(batch, name).tolist()
        except omniload.OmniloadError as error:
            found[name] = str(error)
    return found


def evaluated():
    """Return what an evaluation beside the training hands out."""
    with omniload.open(EVALUATED, split="eval", mesh=mesh) as evaluation:
        return [columns_of(batch) for batch in evaluation]


def trained_on(batch, weight):
    """Run one step over the two stages: hidden states go on, and their gradients come back."""
    if stage == 0:
        hidden = embedding(weight, batch)
        dist.send(hidden.detach(), dist.get_rank() + 2)
        came = torch.empty_like(hidden)
        dist.recv(came, dist.get_rank() + 2)
        hidden.backward(came)
        return None
    hidden = torch.empty((*batch.shape, weight.shape[1]), dtype=weight.dtype)
    dist.recv(hidden, dist.get_rank() - 2)
    loss = last_layer(weight, hidden.requires_grad_(), batch)
    loss.backward()
    dist.send(hidden.grad, dist.get_rank() - 2)
    return float(loss.detach())


mesh = init_device_mesh("cpu", (1, 2, 2), mesh_dim_names=("dp", "pp", "tp"))
stage = mesh.get_coordinate()[1]
if dist.get_rank() in {
    0,
    2,
}:  # as of a trainer that ties the first and the last layer: others have fewer groups
    dist.new_group([0, 2], use_local_synchronization=True)
weight = fresh()[stage]
seen, losses, states, held_out = [], [], [], []
loader = DataLoader(MIX, mesh=mesh, steps=STEPS)
for step, batch in enumerate(loader):
    seen.append(columns_of(batch))
    losses.append(trained_on(batch, weight))
    states.append(loader.state_dict())
    if step == 1:
        held_out = evaluated()
loader.close()
finish(
    rank=dist.get_rank(),
    seen=seen,
    losses=losses,
    states=states,
    held_out=held_out,
    gradient=weight.grad,
)
dist.destroy_process_group()

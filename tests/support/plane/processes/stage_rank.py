"""One of the ranks of a mesh with two stages, which train a model of two layers. Prints its batches.

stage_rank.py MIX EVALUATED SIZES     sizes of dp, pp and tp, as 1,2,2; each rank prints one line of JSON
"""

import sys

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import omniload
from tests.support.trainer.stages import embedding, finish, fresh, last_layer
from trainer_integration import DataLoader

MIX, EVALUATED = sys.argv[1:3]
SIZES = tuple(map(int, sys.argv[3].split(",")))
STEPS = 3


def columns_of(batch):
    """Return the tokens and the labels of a batch, or the messages of their refusals."""
    found = {}
    for name in ("tokens", "labels"):
        try:
            found[name] = getattr(batch, name).tolist()
        except omniload.OmniloadError as error:
            found[name] = str(error)
    return found


def evaluated():
    """Return the batches of an evaluation during the training."""
    with omniload.open(EVALUATED, split="eval", mesh=mesh) as evaluation:
        return [columns_of(batch) for batch in evaluation]


def trained_on(batch, weight):
    """Run one step over the two stages: hidden states go forward, and their gradients come back."""
    if stage == 0:
        hidden = embedding(weight, batch)
        dist.send(hidden.detach(), partner)
        came = torch.empty_like(hidden)
        dist.recv(came, partner)
        hidden.backward(came)
        return None
    hidden = torch.empty((*batch.shape, weight.shape[1]), dtype=weight.dtype)
    dist.recv(hidden, partner)
    loss = last_layer(weight, hidden.requires_grad_(), batch)
    loss.backward()
    dist.send(hidden.grad, partner)
    return float(loss.detach())


mesh = init_device_mesh("cpu", SIZES, mesh_dim_names=("dp", "pp", "tp"))
dp, stage, tp = mesh.get_coordinate()
partner = int(mesh.mesh[dp, 1 - stage, tp])
# As in a trainer that ties the first and the last layer: the other ranks have fewer groups.
if dist.get_rank() in {0, 2}:
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

"""One rank of a job whose images are dealt over all of its ranks: keeps what enters its first layer.

image_rank.py MIX FOLDER STEPS MESH...     each MESH is JSON: sizes by name, in order; the loaders take turns

A patch is its own embedding, so that what arrives tells where it is from. The exchange is torch's, over the world.
"""

import json
import os
import sys
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.nn.functional import all_to_all_single

import omniload
from trainer_integration.loader.data_loader import DataLoader

MIX, FOLDER, STEPS = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
VALUES = 48
RANK = int(os.environ["RANK"])


def layer_inputs(microbatch):
    """Return the tokens of a microbatch, and the embedding at each: zeros where it has none."""
    encoding = microbatch.encoding
    pixels = encoding.patches.float().reshape(-1, VALUES).requires_grad_()
    made = pixels if encoding.order is None else pixels[encoding.order]
    room = torch.empty(sum(encoding.receives), VALUES)
    arrived = all_to_all_single(room, made, encoding.receives, encoding.sends)
    placed = torch.zeros(microbatch.tokens.numel(), VALUES)
    placed = placed.index_copy(0, encoding.places, arrived)
    # Of ranks with the same rows one has embeddings: a gradient comes back once, not from each of them.
    placed.sum().backward()
    assert bool((pixels.grad == 1).all())
    return microbatch.tokens.numpy(), placed.detach().numpy()


dist.init_process_group("gloo")
for number, given in enumerate(sys.argv[4:]):
    names, sizes = zip(*json.loads(given).items(), strict=True)
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=names)
    open_loader = DataLoader if number % 2 else omniload.open
    kept, encoded = [], []
    with open_loader(MIX, mesh=mesh, steps=STEPS) as loader:
        for batch in loader:
            for microbatch in batch.microbatches:
                kept += layer_inputs(microbatch)
                encoded.append(len(microbatch.encoding))
    place = dict(zip(names, mesh.get_coordinate(), strict=True))
    np.savez(FOLDER / f"{number}-{RANK}.npz", *kept, place=json.dumps(place), encoded=encoded)
    dist.barrier()
dist.destroy_process_group()

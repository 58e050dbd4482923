"""One rank of a job whose images are dealt over all its ranks; it saves the input of its first layer.

image_rank.py MIX FOLDER STEPS MESH...     each MESH is JSON: sizes by name, in order; the loaders alternate

A patch is its own embedding, so the received values show their origin. The loop is the one that the page prints.
"""

import json
import os
import sys
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import omniload
from trainer_integration.loader.data_loader import DataLoader

MIX, FOLDER, STEPS = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
VALUES = 48
RANK = int(os.environ["RANK"])


PAGE = Path(__file__).parents[4] / "docs/how-to/data/image-encoder.md"
LOOP = [block for block in PAGE.read_text().split("```")[1::2] if "torch.distributed." in block]
ENCODER = torch.nn.Linear(VALUES, VALUES, bias=False)
torch.nn.init.eye_(ENCODER.weight)


def layer_inputs(microbatch, tp_group):
    """Return the tokens of a microbatch, and the embedding at each or zeros, by the printed loop."""
    first = dist.get_global_rank(tp_group, 0)
    found = {
        "encoder": lambda patches, _: ENCODER(patches),
        "encoding": microbatch.encoding,
        "inputs": torch.full((microbatch.tokens.numel(), VALUES), -1.0),
        "rank": RANK,
        "first": first,
        "tp_group": tp_group,
        "torch": torch,
    }
    exec("\n".join(LOOP), found)
    ENCODER.zero_grad()
    found["made"].retain_grad()
    found["hidden"].sum().backward()
    # Only one of the ranks with the same rows has embeddings, so a gradient comes back once and not from each rank.
    assert bool((found["made"].grad == 1).all())
    assert bool((found["hidden"] == found["spread"]).all())
    placed = ((found["inputs"] + 1) * 127.5).round()
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
                kept += layer_inputs(microbatch, mesh.get_group("tp"))
                encoded.append(len(microbatch.encoding))
    place = dict(zip(names, mesh.get_coordinate(), strict=True))
    np.savez(FOLDER / f"{number}-{RANK}.npz", *kept, place=json.dumps(place), encoded=encoded)
    dist.barrier()
dist.destroy_process_group()
# Threads of gloo outlive their groups, and torch aborts a process whose threads still free a tensor at its exit.
os._exit(0)

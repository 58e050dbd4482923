"""Processes of torch that share rows exchange embeddings: each lands where one rank of all the rows would have it."""

import json

import numpy as np
import pytest
import yaml

from omniload.actors.local.plane import LocalPlane
from omniload.actors.plane import PlaneSpec
from omniload.batch.slices import cp_indices
from omniload.client import Client
from omniload.plan.place_tree import ClientPlaceTree
from tests.support.drawn import a_drawn_mix, patches_by_row
from tests.support.trainer.host_ranks import run_ranks

pytestmark = pytest.mark.ray

STEPS = 3


def alone(folder):
    """Return the patches of each row, as one rank with a mix that deals no image has them."""
    mix = a_drawn_mix(folder, rows=4, balance={"strategy": "balanced"})
    with LocalPlane(PlaneSpec(mix=mix, base_dir=folder, tree=ClientPlaceTree.of())) as plane:
        client = Client(plane.handle(0))
        return patches_by_row([client.next_batch() for _ in range(STEPS)])


def kept_by(folder, number, rank):
    """Return what a rank kept: its place on the mesh, tokens and embeddings of its rows, counts of images encoded."""
    with np.load(folder / f"{number}-{rank}.npz") as kept:
        arrays = [kept[f"arr_{i}"] for i in range(len(kept.files) - 2)]
        return json.loads(str(kept["place"])), arrays[::2], arrays[1::2], kept["encoded"]


# A mesh with tp before dp numbers its ranks in another order than their places along dp.
def test_embeddings_of_four_processes_land_where_one_rank_has_them(warm_python, tmp_path):
    expected = alone(tmp_path)
    mix = a_drawn_mix(tmp_path, rows=4, balance={"strategy": "hybrid"})
    file = tmp_path / "mix.yaml"
    file.write_text(yaml.safe_dump(mix.model_dump(mode="json", exclude_none=True)))
    meshes = [{"tp": 2, "dp": 2}, {"cp": 2, "tp": 2}]

    words = [str(file), str(tmp_path), str(STEPS), *map(json.dumps, meshes)]
    run_ranks(warm_python.path, "image_rank.py", 4, *words, env=warm_python.for_launchers)

    for number, mesh in enumerate(meshes):
        cp = mesh.get("cp", 1)
        rows, counts = {}, []
        for rank in range(4):
            place, tokens, embeddings, encoded = kept_by(tmp_path, number, rank)
            counts.append(encoded)
            if place["tp"]:
                assert not any(each.any() for each in embeddings)
                continue
            for i, (part, placed) in enumerate(zip(tokens, embeddings, strict=True)):
                held = rows.setdefault((i, place.get("dp", 0)), {})
                held[place.get("cp", 0)] = part, placed.reshape(*part.shape, 48)
        found = {}
        for slices in rows.values():
            num_rows, columns = slices[0][0].shape
            whole = np.zeros((num_rows, columns * cp), np.int32)
            placed = np.zeros((*whole.shape, 48), np.uint8)
            for c, (part, embeddings) in slices.items():
                at = cp_indices(columns * cp, c, cp)
                whole[:, at], placed[:, at] = part, embeddings
            found |= {row.tobytes(): placed[r] for r, row in enumerate(whole)}
        assert found.keys() == expected.keys()
        assert all(np.array_equal(found[row], expected[row]) for row in expected)
        # Every rank encodes, also one that is sent nothing.
        assert np.sum(counts, 1).min() > 0
        # Some ranks have no image of a microbatch: their encoder and exchanges run all the same, there and back.
        assert np.min(counts) == 0
    assert any(patches.any() for patches in expected.values())

"""Runs with changes of the mix: opened with two loaders and a shadow, read, and replayed from their edits."""

from omniload.actors.local.plane import LocalPlane
from omniload.actors.plane import PlaneSpec
from omniload.batch.digest import batch_digest, combined
from omniload.client import Client
from omniload.mix.config import load_mix
from omniload.plan.place_tree import ClientPlaceTree

AHEAD = 4
"""Steps that are built ahead."""


def a_spec(mix_path, *, dp=1, readers=None, **changes):
    mix, base_dir = load_mix(mix_path)
    runtime = mix.runtime.model_copy(update={"prefetch_steps": AHEAD, "loaders": 2, "shadows": 1})
    loader = mix.loader.model_copy(update={"readers": readers or {}})
    mix = mix.model_copy(update={"runtime": runtime, "loader": loader})
    return PlaneSpec(mix=mix, base_dir=base_dir, tree=ClientPlaceTree.of(dp=dp), **changes)


def taken_by(clients, count):
    return [combined(batch_digest(c.next_batch()) for c in clients) for _ in range(count)]


def replayed(spec, count):
    with LocalPlane(spec) as plane, Client(plane.handle(0)) as client:
        return taken_by([client], count)

"""Runs of one process: the steps of all ranks of a plane, or one rank with a plane of its own."""

from typing import Any

from omniload.actors.local.plane import LocalPlane
from omniload.actors.plane import PlaneSpec
from omniload.batch.digest import batch_digest
from omniload.client import Client
from omniload.plan.place_tree import ClientPlaceTree
from tests.support.plane.resume import assert_resumes_exactly

__all__ = ["OneRank", "a_spec", "require_resumed_exactly", "steps_of"]


class OneRank(Client):
    """Rank 0 of a plane of its own, which is closed with it."""

    def __init__(self, plane):
        super().__init__(plane.handle(0))
        self._plane = plane

    def __next__(self):
        batch = self.next_batch()
        if batch is None:
            raise StopIteration
        return batch

    def close(self):
        super().close()
        self._plane.close()


def a_spec(folder, mix, *, dp=1, cp=1, **changes: Any):
    """Return the specification of a plane of a mix, for ranks along dp and cp unless ``tree`` says otherwise."""
    changes.setdefault("tree", ClientPlaceTree.of(dp=dp, cp=cp))
    return PlaneSpec(mix=mix, base_dir=folder, **changes)


def steps_of(spec, num_steps=4):
    """Return the batches of all ranks, step by step."""
    with LocalPlane(spec) as plane:
        clients = [Client(plane.handle(rank)) for rank in range(spec.tree.size_of("dp"))]
        return [[client.next_batch() for client in clients] for _ in range(num_steps)]


def require_resumed_exactly(folder, mix, num_steps=6):
    """Check that one rank of a mix resumes exactly from the state before each of ``num_steps`` steps."""

    def make(state):
        return OneRank(LocalPlane(a_spec(folder, mix, state=state)))

    assert_resumes_exactly(make, batch_digest, num_items=num_steps)

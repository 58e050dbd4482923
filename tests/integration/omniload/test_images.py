"""Mixes of drawn images over files: the same steps for any ranks, digests that cover pixels, exact resume."""

import numpy as np
import pytest

from omniload.actors.local.plane import LocalPlane
from omniload.actors.plane import PlaneSpec
from omniload.batch.digest import batch_digest, combined, microbatch_digest
from omniload.batch.images import images_of, places_of
from omniload.batch.wire import from_bytes, to_bytes
from omniload.client import Client
from omniload.plan.place_tree import ClientPlaceTree
from tests.support.drawn import PLACEHOLDER, a_drawn_mix
from tests.support.plane.resume import assert_resumes_exactly

pytestmark = pytest.mark.usefixtures("leaves_nothing_behind")


class Rank(Client):
    """A client in the form that the resume harness wants."""

    def __init__(self, plane):
        super().__init__(plane.handle(0))
        self._plane = plane

    def __next__(self):
        return self.next_batch()

    def close(self):
        super().close()
        self._plane.close()


def a_spec(folder, mix, **changes):
    changes.setdefault("tree", ClientPlaceTree.of())
    return PlaneSpec(mix=mix, base_dir=folder, **changes)


def steps_of(spec, num_steps=4):
    with LocalPlane(spec) as plane:
        clients = [Client(plane.handle(rank)) for rank in range(spec.tree.size_of("dp"))]
        return [[client.next_batch() for client in clients] for _ in range(num_steps)]


def test_every_placeholder_has_its_image_and_any_ranks_train_on_the_same(tmp_path):
    mix = a_drawn_mix(tmp_path)
    alone = steps_of(a_spec(tmp_path, mix))
    three = steps_of(a_spec(tmp_path, mix, tree=ClientPlaceTree.of(dp=3)))

    def digests(steps):
        return [combined(batch_digest(batch) for batch in step) for step in steps]

    assert digests(alone) == digests(three)
    assert len(set(digests(alone))) == 4
    for step in three:
        for microbatch in (m for batch in step for m in batch.microbatches):
            flat = microbatch.tokens_RT.reshape(-1)
            marked = np.zeros(len(flat), np.bool_)
            for (first, count), image in zip(
                places_of(microbatch).tolist(), images_of(microbatch), strict=True
            ):
                marked[first : first + count] = True
                assert count == image.grid[0] * image.grid[1]
                assert len(image.values_V) == count * 48
            assert np.array_equal(marked, flat == PLACEHOLDER)


def test_a_run_resumes_exactly_before_every_step(tmp_path):
    mix = a_drawn_mix(tmp_path)

    assert_resumes_exactly(
        lambda state: Rank(LocalPlane(a_spec(tmp_path, mix, state=state))),
        batch_digest,
        num_items=6,
    )


def test_a_digest_covers_pixels_and_grids_and_the_wire_keeps_both(tmp_path):
    mix = a_drawn_mix(tmp_path, sources=["captions"])
    ((batch,),) = steps_of(a_spec(tmp_path, mix), num_steps=1)
    again = from_bytes(to_bytes(batch))
    assert batch_digest(again) == batch_digest(batch)
    rows = next(m for m in batch.microbatches if len(m.columns_K["images"].values_V))
    before = microbatch_digest(rows)

    for name in ("images", "grids"):
        column = rows.columns_K[name]
        changed = column.values_V.copy()
        if name == "images":
            changed[-1] ^= 1
        else:
            changed[:2] = changed[1::-1]
        other = type(column)(values_V=changed, offsets=column.offsets)
        replaced = type(rows)(
            **{f: getattr(rows, f) for f in rows.__slots__ if f != "columns_K"},
            columns_K={**rows.columns_K, name: other},
        )
        square = name == "grids" and column.values_V[0] == column.values_V[1]
        assert square or microbatch_digest(replaced) != before

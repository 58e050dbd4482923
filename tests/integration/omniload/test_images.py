"""Mixes of drawn images over files: the same steps for any ranks, digests that cover pixels, exact resume."""

from dataclasses import replace

import numpy as np
import pytest

from omniload.actors.local.plane import LocalPlane
from omniload.actors.plane import PlaneSpec
from omniload.base.errors import ConfigError
from omniload.batch.digest import batch_digest, combined, microbatch_digest
from omniload.batch.images import images_of, places_of
from omniload.batch.microbatch import from_bytes, to_bytes
from omniload.client import Client
from omniload.front.delivery import BatchForm
from omniload.front.rows import NumpyArrays
from omniload.mix.config import MixConfig
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
        replaced = replace(rows, columns_K={**rows.columns_K, name: other})
        square = name == "grids" and column.values_V[0] == column.values_V[1]
        assert square or microbatch_digest(replaced) != before


def dealt(folder, strategy, dp, **changes):
    balance = {"strategy": strategy, "linear": 1.0, "encoder_linear": 1.0}
    mix = a_drawn_mix(folder, balance=balance, **changes)
    return steps_of(a_spec(folder, mix, tree=ClientPlaceTree.of(dp=dp)))


def test_images_dealt_apart_from_rows_are_the_same_and_arrive_where_they_belong(tmp_path):
    alone, apart = dealt(tmp_path, "balanced", 3), dealt(tmp_path, "hybrid", 3)

    for ours, theirs in zip(alone, apart, strict=True):
        wanted, found = (combined(map(batch_digest, step)) for step in (ours, theirs))
        assert wanted == found
        for m in range(len(ours[0].microbatches)):
            shares = [batch.microbatches[m].encoding for batch in theirs]
            for rank, batch in enumerate(ours):
                arriving = []
                for origin, share in enumerate(shares):
                    values = [share.images_I[i] for i in range(len(share.images_I))]
                    ends = np.cumsum([len(value) // 48 for value in values])
                    stop = int(share.sends_W[: rank + 1].sum())
                    start = stop - int(share.sends_W[rank])
                    mine = [v for v, e in zip(values, ends, strict=True) if start < e <= stop]
                    assert sum(len(v) // 48 for v in mine) == shares[rank].receives_W[origin]
                    arriving += [patch for value in mine for patch in value.reshape(-1, 48)]
                rows = batch.microbatches[m]
                assert np.array_equal(rows.tokens_RT, theirs[rank].microbatches[m].tokens_RT)
                by_place = dict(zip(shares[rank].places_E.tolist(), arriving, strict=True))
                for (first, count), image in zip(
                    places_of(rows).tolist(), images_of(rows), strict=True
                ):
                    patches = image.values_V.reshape(-1, 48)
                    for k in range(count):
                        assert np.array_equal(by_place.pop(first + k), patches[k])
                assert not by_place
    # Something travelled: an image that stays at its rank proves nothing.
    assert any(
        share.sends_W.sum() > share.sends_W[rank]
        for step in apart
        for rank, batch in enumerate(step)
        for share in (m.encoding for m in batch.microbatches)
    )


def test_dealt_images_survive_the_wire(tmp_path):
    batch = dealt(tmp_path, "hybrid", 2)[0][1]

    again = from_bytes(to_bytes(batch))

    assert batch_digest(again) == batch_digest(batch)
    share, other = batch.microbatches[0].encoding, again.microbatches[0].encoding
    assert np.array_equal(share.places_E, other.places_E)
    assert share.receives_W.tolist() == other.receives_W.tolist()


def test_a_loop_is_told_where_dealt_images_are(tmp_path):
    a_drawn_mix(tmp_path)
    form = BatchForm(arrays=NumpyArrays())
    made = form.of(dealt(tmp_path, "hybrid", 2)[0][0])

    with pytest.raises(ConfigError, match=r"take microbatches\[i\]\.encoding"):
        _ = made.images
    encoding = made.microbatches[0].encoding
    assert sum(encoding.receives) == len(encoding.places)
    assert encoding.patches.shape == ((encoding.grids[:, 0] * encoding.grids[:, 1]).sum(), 48)
    plain = form.of(dealt(tmp_path, "balanced", 2)[0][0])
    assert plain.images.floats().dtype == np.float32
    with pytest.raises(ConfigError, match="come with their own images"):
        _ = plain.microbatches[0].encoding


@pytest.mark.parametrize(("micro_rows", "dp"), [(2, 1), (2, 2), (1, 1)])
def test_every_microbatch_says_what_its_rank_encodes_where_steps_have_no_image(
    tmp_path, micro_rows, dp
):
    (tmp_path / "words.txt").write_text("no image here, only words\n" * 400)
    mix = a_drawn_mix(tmp_path, rows=2, balance={"strategy": "hybrid"}, length=64)
    fields = mix.model_dump()
    fields["sources"]["words"] = {"type": "text", "path": "words.txt"}
    fields["mix"]["stages"][0]["weights"] = {"words": 400.0, "captions": 1.0, "pages": 1.0}
    fields["batch"]["micro_tokens"] = 64 * micro_rows
    steps = steps_of(
        a_spec(tmp_path, MixConfig.model_validate(fields), tree=ClientPlaceTree.of(dp=dp)), 8
    )
    form = BatchForm(arrays=NumpyArrays())

    arriving = [
        sum(len(made.encoding.places) for batch in step for made in form.of(batch).microbatches)
        for step in steps
    ]

    placeholders = [
        sum(int((m.tokens_RT == PLACEHOLDER).sum()) for batch in step for m in batch.microbatches)
        for step in steps
    ]
    assert arriving == placeholders
    assert 0 in arriving


@pytest.mark.parametrize("strategy", ["balanced", "hybrid"])
def test_one_rank_with_one_microbatch_has_its_images(tmp_path, strategy):
    batches = [b for step in dealt(tmp_path, strategy, 1, rows=1) for b in step]
    made = [BatchForm(arrays=NumpyArrays()).of(batch).microbatches for batch in batches]

    assert all(len(microbatches) == 1 for microbatches in made)
    key = "images" if strategy == "balanced" else "encoding"
    assert sum(len(getattr(microbatches[0], key)) for microbatches in made) > 0

"""Mixes of drawn images over files: the same steps for any ranks, digests that cover pixels, exact resume."""

from dataclasses import dataclass, field, replace

import numpy as np
import pytest
import yaml

import omniload
from omniload.actors.local.plane import LocalPlane
from omniload.base.errors import ConfigError
from omniload.batch.arrays import NumpyArrays
from omniload.batch.digest import batch_digest, combined, microbatch_digest
from omniload.batch.images import dealt_images, images_of, places_of
from omniload.batch.microbatch import Batch, rows_of
from omniload.batch.slices import cp_indices
from omniload.batch.stages import own_part
from omniload.batch.wire import from_bytes, to_bytes
from omniload.client import Client
from omniload.front.delivery import BatchForm
from omniload.machine.messages import ResizeAsked
from omniload.mix.config import MixConfig
from omniload.plan.place_tree import ClientPlaceTree
from tests.support.drawn import PLACEHOLDER, a_drawn_mix, are_all_placed, patches_by_row
from tests.support.plane.local_runs import a_spec, require_resumed_exactly, steps_of

pytestmark = pytest.mark.usefixtures("leaves_nothing_behind")


def test_every_placeholder_has_its_image_and_any_ranks_train_on_the_same(tmp_path):
    mix = a_drawn_mix(tmp_path)
    alone = steps_of(a_spec(tmp_path, mix))
    three = steps_of(a_spec(tmp_path, mix, dp=3))

    def digests(steps):
        return [combined(batch_digest(batch) for batch in step) for step in steps]

    assert digests(alone) == digests(three)
    assert len(set(digests(alone))) == 4
    for step in three:
        for microbatch in (m for batch in step for m in batch.microbatches):
            counts = places_of(microbatch)[:, 1].tolist()
            for count, image in zip(counts, images_of(microbatch), strict=True):
                assert count == image.grid[0] * image.grid[1]
                assert len(image.values_V) == count * 48
            assert are_all_placed(microbatch)


def test_a_rank_that_is_dealt_no_image_has_patches_of_the_same_depth(tmp_path):
    mix = a_drawn_mix(tmp_path, balance={"strategy": "hybrid"})
    batches = steps_of(a_spec(tmp_path, mix, tree=ClientPlaceTree.of(tp=16)), 2)
    depths, counts = set(), []
    for sent in (batch for step in batches for batch in step):
        for peer in range(16):
            batch = own_part(from_bytes(to_bytes(sent)), peer, ())
            for part in batch.microbatches:
                encoding = dealt_images(part, lambda array, dtype: array.astype(dtype))
                depths |= {encoding.patches.shape[1], encoding.floats().shape[1]}
                counts.append(len(encoding))

    assert depths == {48}
    assert min(counts) == 0 < max(counts)


def test_a_run_resumes_exactly_before_every_step(tmp_path):
    mix = a_drawn_mix(tmp_path)

    require_resumed_exactly(tmp_path, mix)


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
    return steps_of(a_spec(folder, mix, dp=dp))


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
    # Some image must travel, because an image that stays at its rank proves nothing.
    assert any(
        share.sends_W.sum() > share.sends_W[rank]
        for step in apart
        for rank, batch in enumerate(step)
        for share in (m.encoding for m in batch.microbatches)
    )


def after_all_to_all(shares, length):
    """Return the contents of each place in each rank's rows or slices, ``[N, 48]``; a patch is its embedding."""
    sent = []
    for share in shares:
        made = share.images_I.values_V.reshape(-1, 48)
        made = made if share.order_M is None else made[share.order_M]
        sent.append(np.split(made, np.cumsum(share.sends_W)[:-1]))
    held = []
    for rank, share in enumerate(shares):
        boxes = [boxes[rank] for boxes in sent]
        assert [len(box) for box in boxes] == share.receives_W.tolist()
        patches = np.zeros((length, 48), np.uint8)
        patches[share.places_E] = np.concatenate(boxes)
        held.append(patches)
    return held


@dataclass
class Exchanged:
    """Results of the all-to-alls of one step."""

    rows: dict = field(default_factory=dict)
    """The patch at each place of each row, by the row's tokens."""
    encoded: list = field(default_factory=list)
    """Keys of images that a rank encoded."""
    travelled: int = 0
    """Embeddings that went to another rank."""
    cut: int = 0
    """Shares whose embeddings are sent in another order than that in which they are made."""

    @classmethod
    def of(cls, tree, step):
        """Let the ranks of a tree exchange embeddings by hand, for batches by place along dp and cp."""
        made = cls()
        for m in range(len(step[0, 0].microbatches)):
            made.add(tree, {place: batch.microbatches[m] for place, batch in step.items()}, m)
        return made

    def add(self, tree, parts, m):
        own_W = [None] * tree.world_size
        for (d, c), part in parts.items():
            batch = Batch(step=m, microbatches=(part,), loss_tokens=1, imbalance=1.0, bound=1.0)
            for peer, rank in enumerate(tree.ranks_at(dp=d, cp=c)):
                # As a peer receives it: over the wire.
                (mine,) = own_part(from_bytes(to_bytes(batch)), peer, ()).microbatches
                own_W[rank] = mine.encoding
        self.encoded += [tuple(key) for share in own_W for key in share.keys_I4.tolist()]
        self.travelled += sum(
            int(share.sends_W.sum() - share.sends_W[rank]) for rank, share in enumerate(own_W)
        )
        self.cut += sum(share.order_M is not None for share in own_W)
        held_W = after_all_to_all(own_W, rows_of(parts[0, 0], "tokens").size)
        cp = tree.size_of("cp")
        for d in range(tree.size_of("dp")):
            num_rows, columns = rows_of(parts[d, 0], "tokens").shape
            tokens = np.zeros((num_rows, columns * cp), np.int32)
            patches = np.zeros((*tokens.shape, 48), np.uint8)
            for c in range(cp):
                at = cp_indices(columns * cp, c, cp)
                first, *others = tree.ranks_at(dp=d, cp=c)
                tokens[:, at] = rows_of(parts[d, c], "tokens")
                patches[:, at] = held_W[first].reshape(num_rows, columns, 48)
                assert not any(held_W[rank].any() for rank in others)
            self.rows |= {row.tobytes(): patches[r] for r, row in enumerate(tokens)}


def require_same_rows(exchanged, batches):
    """Require that each row has the same patches as on a single rank that encodes its own images."""
    expected = patches_by_row(batches)
    assert exchanged.rows.keys() == expected.keys()
    assert all(np.array_equal(exchanged.rows[row], expected[row]) for row in expected)
    images = sum(len(places_of(m)) for batch in batches for m in batch.microbatches)
    assert len(exchanged.encoded) == len(set(exchanged.encoded)) == images


def clients_of(plane, tree):
    return {
        (d, c): Client(plane.handle(d, c))
        for d in range(tree.size_of("dp"))
        for c in range(tree.size_of("cp"))
    }


HYBRID = {"strategy": "hybrid", "linear": 1.0, "encoder_linear": 1.0}


@pytest.mark.parametrize(
    "axes",
    [
        {"dp": 2, "tp": 2},
        {"cp": 2},
        {"pp": 2, "dp": 2, "cp": 2},
        {"tp": 2, "cp": 2, "dp": 1},
        {"cp": 2, "dp": 3},
    ],
    ids=str,
)
def test_images_dealt_over_ranks_that_share_rows_arrive_in_the_slice_that_holds_them(
    tmp_path, axes
):
    tree = ClientPlaceTree.from_sizes(axes)
    alone = dealt(tmp_path, "balanced", 1)
    mix = a_drawn_mix(tmp_path, balance=HYBRID)

    with LocalPlane(a_spec(tmp_path, mix, tree=tree)) as plane:
        clients = clients_of(plane, tree)
        steps = [{place: c.next_batch() for place, c in clients.items()} for _ in alone]

    exchanged = [Exchanged.of(tree, step) for step in steps]
    for made, step, batches in zip(exchanged, steps, alone, strict=True):
        require_same_rows(made, batches)
        if tree.size_of("cp") == 1:
            wanted, found = (combined(map(batch_digest, each)) for each in (batches, step.values()))
            assert found == wanted
    # Some images were dealt and travelled; if rows are cut, parts of images are sent out of order.
    assert sum(made.travelled for made in exchanged) > 0
    assert tree.size_of("cp") == 1 or sum(made.cut for made in exchanged) > 0


def test_cp_peers_that_come_to_a_running_plane_are_dealt_images_with_the_others(tmp_path):
    alone = dealt(tmp_path, "balanced", 1)
    runtime = {"prefetch_steps": 2, "elastic": True}
    mix = a_drawn_mix(tmp_path, balance=HYBRID, runtime=runtime)
    before, later = (ClientPlaceTree.of(dp=dp, cp=2) for dp in (1, 2))

    exchanged = []
    with LocalPlane(a_spec(tmp_path, mix, tree=before)) as plane:
        clients = clients_of(plane, before)
        for _ in range(2):
            step = {place: client.next_batch() for place, client in clients.items()}
            exchanged.append(Exchanged.of(before, step))
        for client in clients.values():
            client.resize(0, 2)
        asked = ResizeAsked(dp=2, step=2)
        clients |= {(1, c): Client(plane.handle(1, c, asked)) for c in range(2)}
        for _ in range(2):
            step = {place: client.next_batch() for place, client in clients.items()}
            exchanged.append(Exchanged.of(later, step))

    for made, batches in zip(exchanged, alone, strict=True):
        require_same_rows(made, batches)


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
    assert np.array_equal(plain.images.floats(0.4, 0.2), plain.images.floats([0.4] * 3, (0.2,) * 3))
    with pytest.raises(ConfigError, match=r"mean is \[0.4, 0.5\]; give one number, or 3"):
        plain.images.floats(mean=[0.4, 0.5])
    with pytest.raises(ConfigError, match="come with their own images"):
        _ = plain.microbatches[0].encoding


def test_a_loop_of_cp_peers_is_told_where_images_are(tmp_path):
    form = BatchForm(arrays=NumpyArrays())
    made = {}
    for strategy in ("balanced", "hybrid"):
        mix = a_drawn_mix(tmp_path, balance={"strategy": strategy}, length=128)
        spec = a_spec(tmp_path, mix, cp=2)
        with LocalPlane(spec) as plane:
            clients = [Client(plane.handle(0, c)) for c in range(2)]
            made[strategy] = [form.of(client.next_batch()) for _ in range(3) for client in clients]

    with pytest.raises(ConfigError, match=r"use cp 1, or balance\.strategy hybrid"):
        _ = made["balanced"][0].images
    with pytest.raises(ConfigError, match=r"take microbatches\[i\]\.encoding"):
        _ = made["hybrid"][0].images
    encodings = [part.encoding for batch in made["hybrid"] for part in batch.microbatches]
    assert any(encoding.order is not None for encoding in encodings)
    for encoding in encodings:
        if encoding.order is not None:
            assert sorted(encoding.order.tolist()) == list(range(sum(encoding.sends)))


def test_a_share_of_other_ranks_than_the_mesh_has_is_refused(tmp_path):
    share = dealt(tmp_path, "hybrid", 2)[0][0].microbatches[0].encoding

    with pytest.raises(ValueError, match="dealt to 2 ranks, and 3 are numbered"):
        share.numbered((0, 2, 1))


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
    steps = steps_of(a_spec(tmp_path, MixConfig.model_validate(fields), dp=dp), 8)
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


def test_rows_without_an_image_have_patches_of_the_same_depth(tmp_path):
    mix = a_drawn_mix(tmp_path, sources=["captions"]).model_dump(mode="json")
    (tmp_path / "web.jsonl").write_text('{"text": "words alone"}\n' * 40)
    mix["sources"]["web"] = {"type": "jsonl", "path": "web.jsonl"}
    later = {"from_step": 1, "weights": {"captions": 1.0}}
    mix["mix"] = {"stages": [{"from_step": 0, "weights": {"web": 1.0}}, later]}
    (tmp_path / "mix.yaml").write_text(yaml.safe_dump(mix))

    with omniload.open(tmp_path / "mix.yaml", steps=2, arrays="numpy") as loader:
        first, second = loader

    assert len(first.images) == 0 < len(second.images)
    for rows in (first, *first.microbatches):
        assert rows.images.patches.shape == rows.images.floats([0.4] * 3).shape == (0, 48)

"""Mixes whose images are cut into tiles: everything after the source loader treats a tile as an image."""

from collections import Counter

import numpy as np
import pytest

from omniload.batch.digest import batch_digest, combined
from omniload.batch.images import dealt_images, images_of
from tests.support.drawn import a_drawn_mix, are_all_placed, patches_by_row
from tests.support.plane.edits.mix_commands import json_of, run_mix
from tests.support.plane.local_runs import a_spec, require_resumed_exactly, steps_of

pytestmark = pytest.mark.usefixtures("leaves_nothing_behind")

TILES = {
    "nearest": {"size": 8, "max_tiles": 4, "before_tile": "[{row},{column}]", "after_row": ";"},
    "edge": {"size": 8, "longest_edge": 16, "thumbnail": "first", "before_thumbnail": "all"},
}


def a_tiled_mix(folder, tiles="nearest", **changes):
    return a_drawn_mix(folder, tiles=TILES[tiles], length=96, **changes)


@pytest.mark.parametrize("tiles", TILES)
def test_every_tile_has_its_place_and_any_ranks_train_on_the_same(tmp_path, tiles):
    mix = a_tiled_mix(tmp_path, tiles)
    alone = steps_of(a_spec(tmp_path, mix))
    three = steps_of(a_spec(tmp_path, mix, dp=3))

    for ours, theirs in zip(alone, three, strict=True):
        assert combined(map(batch_digest, ours)) == combined(map(batch_digest, theirs))
    counts = []
    for rows in (m for step in three for batch in step for m in batch.microbatches):
        assert are_all_placed(rows)
        images = list(images_of(rows))
        assert all(image.grid == (2, 2) for image in images)
        counts += Counter(tuple(image.key.tolist()) for image in images).values()
    assert max(counts) > 4


@pytest.mark.parametrize("tiles", TILES)
def test_a_run_of_tiles_resumes_exactly_before_every_step(tmp_path, tiles):
    mix = a_tiled_mix(tmp_path, tiles)

    require_resumed_exactly(tmp_path, mix, 5)


def test_tiles_of_one_image_are_dealt_to_several_ranks_and_arrive_where_they_belong(tmp_path):
    alone, apart = (
        steps_of(
            a_spec(
                tmp_path,
                a_tiled_mix(
                    tmp_path, balance={"strategy": strategy, "linear": 1, "encoder_linear": 1}
                ),
                dp=3,
            )
        )
        for strategy in ("balanced", "hybrid")
    )

    spread = 0
    for ours, theirs in zip(alone, apart, strict=True):
        assert combined(map(batch_digest, ours)) == combined(map(batch_digest, theirs))
        expected, found = patches_by_row(ours), {}
        for m in range(len(theirs[0].microbatches)):
            shares = [batch.microbatches[m].encoding for batch in theirs]
            owners = {}
            for rank, share in enumerate(shares):
                for key in share.keys_I4[:, :3].tolist():
                    owners.setdefault(tuple(key), set()).add(rank)
            spread += sum(len(ranks) > 1 for ranks in owners.values())
            sent = [
                np.split(s.images_I.values_V.reshape(-1, 48), np.cumsum(s.sends_W)[:-1])
                for s in shares
            ]
            for rank, batch in enumerate(theirs):
                tokens_RT = batch.microbatches[m].tokens_RT
                patches = np.zeros((tokens_RT.size, 48), np.uint8)
                patches[shares[rank].places_E] = np.concatenate([boxes[rank] for boxes in sent])
                for row, own in zip(tokens_RT, np.split(patches, len(tokens_RT)), strict=True):
                    found[row.tobytes()] = own
        assert found.keys() == expected.keys()
        assert all(np.array_equal(found[row], expected[row]) for row in expected)
    assert spread > 0


def test_a_loop_is_given_each_tile_as_an_image(tmp_path):
    ((batch,),) = steps_of(
        a_spec(tmp_path, a_tiled_mix(tmp_path, balance={"strategy": "hybrid"})), 1
    )

    for part in batch.microbatches:
        encoding = dealt_images(part, lambda array, dtype: array.astype(dtype))
        assert encoding.grids.tolist() == [[2, 2]] * len(encoding)
        assert len(encoding.patches) == 4 * len(encoding)
        assert sum(encoding.sends) == len(encoding.places)


def test_tools_look_at_tiles(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    mix = a_tiled_mix(tmp_path)
    path = tmp_path / "mix.yaml"
    path.write_text(mix.model_dump_json())

    checked = run_mix("check", path)
    found = json_of("stats", path, "--all", "--steps", 4)

    assert checked.exit_code == 0, checked.output
    lengths = [source["length"]["longest"] for source in found["sources"]]
    # A caption has some words and at most five images, of four tokens plus their marks each.
    assert min(lengths) > 5 * 4
    assert all(source["looked_at"] == source["records"] for source in found["sources"])

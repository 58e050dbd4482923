"""Ranks that keep a part of the model each (FSDP2) do what one rank does with all of it."""

from functools import cache

import numpy as np
import pytest

from omniload.actors.plane import PlaneSpec
from omniload.plan.place_tree import ClientPlaceTree
from tests.support.plane.corpora import a_corpus
from tests.support.trainer import moe_cases
from tests.support.trainer.moe_builders import documents_of
from tests.support.trainer.moe_cases import ALONE, farthest

pytestmark = pytest.mark.slow

MESHES = [(2, 1), (2, 2), (3, 1)]
"""Three ranks cut nothing of the model into equal parts."""
SHARDED, WHOLE = True, False


@pytest.fixture
def evaluation(tmp_path):
    mix = a_corpus(tmp_path, records=31, shards=1, longest=30, mix={"stop": "each_once"})
    return PlaneSpec(mix=mix, base_dir=tmp_path, tree=ClientPlaceTree.of())


@pytest.fixture(scope="module")
def unbroken():
    """Losses of three steps by one rank that saves nothing."""
    return [result.figures.loss for result in moe_cases.losses(ALONE, steps=3)]


@pytest.mark.parametrize(("dp", "sp"), MESHES)
def test_gradients_of_a_step_and_their_norm_are_those_of_one_rank(ranks, dp, sp):
    changes = {"expert_groups": 4, "z_weight": 0.01, "balance_weight": 0.1, "bias_rate": 0.01}
    expected, totals, norm = moe_cases.gradients(ALONE, **changes)

    for found, sums, found_norm in ranks.run(
        moe_cases.gradients, dp=dp, sp=sp, fsdp=True, **changes
    ):
        assert farthest(found, expected) <= 1e-10
        assert found_norm == pytest.approx(norm, rel=1e-12)
        assert sums.token_loss == pytest.approx(totals.token_loss, rel=1e-12)


@pytest.mark.parametrize(("dp", "sp"), MESHES)
def test_losses_and_norms_follow_those_of_one_rank_and_clipped_steps_too(ranks, dp, sp):
    expected = moe_cases.losses(ALONE)

    answers = ranks.run(moe_cases.losses, dp=dp, sp=sp, fsdp=True)

    assert min(r.figures.grad_norm for r in expected) > 1  # where clipping begins
    for results in answers:
        assert [r.figures.loss for r in results] == pytest.approx(
            [r.figures.loss for r in expected], abs=1e-5
        )
        norms = [r.figures.grad_norm for r in results]
        assert norms == pytest.approx([r.figures.grad_norm for r in expected], rel=1e-5)
        # A spike must be one to all ranks.
        assert norms == [r.figures.grad_norm for r in answers[0]]


@pytest.mark.parametrize("changes", [{"tied_embeddings": True}, {"top_k": 1}])
@pytest.mark.parametrize("rows", [[], [documents_of([9, 5])]])
def test_ranks_without_tokens_take_part(ranks, rows, changes):
    expected, _, _ = moe_cases.gradients(ALONE, rows=rows, **changes)

    for found, _, _ in ranks.run(moe_cases.gradients, dp=2, rows=rows, fsdp=True, **changes):
        assert farthest(found, expected) <= 1e-10


def test_a_rank_keeps_its_part_of_parameters_gradients_and_averages(ranks):
    (whole,) = {moe_cases.held_bytes(ALONE)}

    for found in ranks.run(moe_cases.held_bytes, dp=2, fsdp=True):
        assert found == tuple(size // 2 for size in whole)


@pytest.fixture(scope="module")
def saved_by(ranks, tmp_path_factory):
    """A function that returns where a mesh has saved its first step, in every way, and what that holds."""

    @cache
    def saved(dp, sp, fsdp):
        folder = tmp_path_factory.mktemp("saved")
        (folder / "striped").mkdir()
        case = moe_cases.saved_in_all_ways
        return folder, ranks.run(case, dp=dp, sp=sp, fsdp=fsdp, folder=folder)[0]

    return saved


@pytest.mark.parametrize("kind", moe_cases.SAVES)
@pytest.mark.parametrize(
    ("saved", "loaded"),
    [
        ((3, 1, SHARDED), (2, 2, SHARDED)),
        ((2, 2, SHARDED), (1, 1, WHOLE)),
        ((1, 2, WHOLE), (2, 1, SHARDED)),
    ],
)
def test_a_checkpoint_is_loaded_bit_by_bit_however_ranks_shard_it(
    ranks, saved_by, unbroken, kind, saved, loaded
):
    folder, kept = saved_by(*saved)
    arguments = {"steps": 2, "load": 1, "place": moe_cases.SAVES[kind].format(folder=folder)}
    dp, sp, fsdp = loaded

    if (dp, sp) == (1, 1):
        answers = [moe_cases.trained(ALONE, **arguments)]
    else:
        answers = ranks.run(moe_cases.trained, dp=dp, sp=sp, fsdp=fsdp, **arguments)

    for losses, tensors in answers:
        assert tensors.keys() == kept.keys()
        assert all(np.array_equal(tensors[name], kept[name]) for name in kept)
        assert losses == pytest.approx(unbroken[1:], abs=1e-5)


@pytest.mark.parametrize(("dp", "sp"), [(2, 2), (3, 1)])
def test_an_evaluation_is_that_of_one_rank(ranks, evaluation, dp, sp):
    expected = moe_cases.evaluated(ALONE, spec=evaluation)

    for found in ranks.run(moe_cases.evaluated, dp=dp, sp=sp, spec=evaluation, fsdp=True):
        assert found.labels == expected.labels
        assert found.loss == pytest.approx(expected.loss, abs=1e-5)


def test_after_an_evaluation_a_rank_keeps_its_part_alone_and_trains_on(ranks, evaluation):
    expected, _, names = moe_cases.evaluated_between_steps(ALONE, spec=evaluation)

    for losses, (before, after), held in ranks.run(
        moe_cases.evaluated_between_steps, dp=2, spec=evaluation, fsdp=True
    ):
        assert losses == pytest.approx(expected, abs=1e-5)
        assert after == before
        assert held == names

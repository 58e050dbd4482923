"""Meshes of up to four gloo ranks do what one rank does, and send what the formulas say."""

from functools import cache

import numpy as np
import pytest
import torch

from omniload.actors.plane import PlaneSpec
from omniload.plan.place_tree import ClientPlaceTree
from tests.support.plane.corpora import a_corpus
from tests.support.trainer import moe_cases
from tests.support.trainer.moe_cases import ALONE, farthest, full_rows, random_packings
from tests.support.trainer.moe_group import Ranks
from trainer_integration.moe.parallel.crossover_table import last_below

pytestmark = pytest.mark.slow

MESHES = [(2, 1), (3, 1), (4, 1), (1, 2), (2, 2), (1, 4)]


@pytest.fixture(scope="module")
def unbroken():
    """Losses of three steps by one rank that saves nothing."""
    return [result.figures.loss for result in moe_cases.losses(ALONE, steps=3)]


@pytest.mark.parametrize(("dp", "sp"), MESHES)
@pytest.mark.parametrize("transport", ["a2a", "ag_rs"])
def test_gradients_of_a_step_are_those_of_one_rank(ranks, dp, sp, transport):
    changes = {"expert_groups": 4, "z_weight": 0.01, "balance_weight": 0.1}
    expected, totals, norm = moe_cases.gradients(ALONE, **changes)

    answers = ranks.run(moe_cases.gradients, dp=dp, sp=sp, transport=transport, **changes)

    for found, sums, found_norm in answers:
        assert farthest(found, expected) <= 1e-10
        assert found_norm == pytest.approx(norm, rel=1e-12)
        assert sums.token_loss == pytest.approx(totals.token_loss, rel=1e-12)
        assert sums.balance_loss == pytest.approx(totals.balance_loss, rel=1e-12)
        assert sums.z_loss == pytest.approx(totals.z_loss, rel=1e-12)
        assert sums.entropy == pytest.approx(totals.entropy, rel=1e-12)
        assert torch.equal(sums.slots_LE, totals.slots_LE)


@pytest.mark.parametrize("transport", ["a2a", "ag_rs"])
def test_gradients_of_three_peers_are_those_of_one_rank(ranks, transport):
    """Of heads, experts and rows that three ranks can share out."""
    shape = {"dim": 24, "num_heads": 6, "num_kv_heads": 3, "num_experts": 6, "expert_groups": 3}
    expected, _, norm = moe_cases.gradients(ALONE, length=36, **shape)

    answers = ranks.run(moe_cases.gradients, sp=3, length=36, transport=transport, **shape)

    for found, _, found_norm in answers:
        assert farthest(found, expected) <= 1e-10
        assert found_norm == pytest.approx(norm, rel=1e-12)


@pytest.mark.parametrize(("dp", "sp"), MESHES)
def test_losses_follow_those_of_one_rank(ranks, dp, sp):
    expected = moe_cases.losses(ALONE)

    answers = ranks.run(moe_cases.losses, dp=dp, sp=sp)

    for results in answers:
        assert [r.figures.loss for r in results] == pytest.approx(
            [r.figures.loss for r in expected], abs=1e-5
        )
        assert [r.figures.balance_loss for r in results] == pytest.approx(
            [r.figures.balance_loss for r in expected], abs=1e-5
        )
        assert [r.figures.tokens for r in results] == [r.figures.tokens for r in expected]
        assert [r.flops for r in results] == pytest.approx([r.flops for r in expected])


@pytest.mark.parametrize("num_kv_heads", [1, 2])
def test_gradients_of_a_kv_head_that_several_ranks_hold_add_up(ranks, num_kv_heads):
    expected, _, _ = moe_cases.gradients(ALONE, num_kv_heads=num_kv_heads)

    answers = ranks.run(moe_cases.gradients, dp=1, sp=4, num_kv_heads=num_kv_heads)

    assert all(farthest(found, expected) <= 1e-10 for found, _, _ in answers)


@pytest.mark.parametrize("top_k", [1, 3])
@pytest.mark.parametrize("transport", ["a2a", "ag_rs"])
def test_dropped_choices_are_those_of_one_rank(ranks, transport, top_k):
    changes = {"capacity_factor": 1.0, "expert_groups": 4, "top_k": top_k}
    expected, totals, _ = moe_cases.gradients(ALONE, **changes)

    answers = ranks.run(moe_cases.gradients, dp=1, sp=4, transport=transport, **changes)

    assert totals.dropped > 10
    for found, sums, _ in answers:
        assert sums.dropped == totals.dropped
        assert farthest(found, expected) <= 1e-10


@pytest.mark.parametrize("rows", [[], [[]], [[np.arange(3, dtype=np.int32)]]])
def test_ranks_without_tokens_take_part(ranks, rows):
    expected, _, _ = moe_cases.gradients(ALONE, rows=rows)

    for transport in ("a2a", "ag_rs"):
        answers = ranks.run(moe_cases.gradients, dp=1, sp=4, rows=rows, transport=transport)

        assert all(farthest(found, expected) <= 1e-10 for found, _, _ in answers)


@pytest.mark.parametrize(("dp", "sp"), [(1, 2), (1, 4)])
def test_attention_sends_what_the_formula_says(ranks, dp, sp):
    rows, layers, width, per_kv = full_rows(2), 2, 16, 1

    answers = ranks.run(moe_cases.traffic, dp=dp, sp=sp, rows=rows)

    tokens = 2 * 32
    elements = layers * tokens / sp * (sp - 1) * width * (2 + 2 / per_kv) / sp
    for sent, _ in answers:
        assert sent["attention"] == 4 * elements
        assert sent["attention.backward"] == 4 * elements


def test_experts_of_all_to_all_send_what_the_row_map_counts(ranks):
    answers = ranks.run(moe_cases.traffic, dp=1, sp=4, rows=full_rows(2), transport="a2a")

    for rank, (sent, choices) in enumerate(answers):
        # Four experts on four ranks: expert e is rank e's.
        elsewhere = sum(e != rank for layer in choices for token in layer for e in token)
        back = sum(
            e == rank
            for other, (_, theirs) in enumerate(answers)
            if other != rank
            for layer in theirs
            for token in layer
            for e in token
        )
        row_bytes = 16 * 4
        assert sent["dispatch"] == sent["combine.backward"] == elsewhere * row_bytes
        assert sent["combine"] == sent["dispatch.backward"] == back * row_bytes


def test_experts_of_gather_and_scatter_send_every_token_to_every_rank_once_each_way(ranks):
    answers = ranks.run(moe_cases.traffic, dp=1, sp=4, rows=full_rows(2), transport="ag_rs")

    layers, tokens, width, n = 2, 2 * 32, 16, 4
    for sent, _ in answers:
        formula = 2 * layers * 4 * tokens * width * (n - 1) / n
        assert sent["dispatch"] + sent["combine"] == formula
        assert sent["dispatch.backward"] + sent["combine.backward"] == formula


@pytest.mark.parametrize(("dp", "sp", "number"), [(1, 2, 100), (1, 4, 8)])
def test_no_document_depends_on_another(ranks, dp, sp, number):
    packings = random_packings(number)

    answers = ranks.run(moe_cases.leaks, dp=dp, sp=sp, packings=packings)

    for reached in zip(*answers, strict=True):
        for of_rank in reached:
            assert of_rank == [d == len(of_rank) // 2 for d in range(len(of_rank))]


@pytest.fixture(scope="module")
def saved_by(ranks, tmp_path_factory):
    """A function that returns where a mesh has saved its first step, in every way, and what that holds."""

    @cache
    def saved(dp, sp):
        folder = tmp_path_factory.mktemp("saved")
        (folder / "striped").mkdir()
        if (dp, sp) == (1, 1):
            return folder, moe_cases.saved_in_all_ways(ALONE, folder=folder)
        return folder, ranks.run(moe_cases.saved_in_all_ways, dp=dp, sp=sp, folder=folder)[0]

    return saved


@pytest.mark.parametrize("kind", moe_cases.SAVES)
@pytest.mark.parametrize(
    ("saved", "loaded"),
    [
        ((2, 2), (1, 4)),
        pytest.param((1, 4), (1, 1), marks=pytest.mark.soak),
        ((1, 1), (2, 2)),
    ],
)
def test_a_checkpoint_of_any_mesh_is_loaded_bit_by_bit_on_any_other(
    ranks, saved_by, unbroken, kind, saved, loaded
):
    folder, kept = saved_by(*saved)
    arguments = {"steps": 2, "load": 1, "place": moe_cases.SAVES[kind].format(folder=folder)}
    dp, sp = loaded

    if (dp, sp) == (1, 1):
        answers = [moe_cases.trained(ALONE, **arguments)]
    else:
        answers = ranks.run(moe_cases.trained, dp=dp, sp=sp, **arguments)

    for losses, tensors in answers:
        assert tensors.keys() == kept.keys()
        assert all(np.array_equal(tensors[name], kept[name]) for name in kept)
        assert losses == pytest.approx(unbroken[1:], abs=1e-5)


def test_an_evaluation_is_the_same_on_every_mesh_also_where_shares_are_unequal(ranks, tmp_path):
    mix = a_corpus(tmp_path, records=30, shards=1, longest=30, mix={"stop": "each_once"})
    spec = PlaneSpec(mix=mix, base_dir=tmp_path, tree=ClientPlaceTree.of())
    expected = moe_cases.evaluated(ALONE, spec=spec)

    for dp, sp in MESHES:
        for found in ranks.run(moe_cases.evaluated, dp=dp, sp=sp, spec=spec):
            assert found.labels == expected.labels
            assert found.loss == pytest.approx(expected.loss, abs=1e-5)


def test_ranks_of_gpus_send_what_lies_on_the_host_too(tmp_path):
    """Figures of a step, sums of an evaluation, seals of a checkpoint: NCCL, alone, takes none of them."""
    mix = a_corpus(tmp_path, records=30, shards=1, longest=30, mix={"stop": "each_once"})
    spec = PlaneSpec(mix=mix, base_dir=tmp_path, tree=ClientPlaceTree.of())
    expected = moe_cases.evaluated(ALONE, spec=spec)
    saved, kept = moe_cases.trained(ALONE, steps=1, place=str(tmp_path / "alone"), save=1)

    with Ranks(2, device="cuda") as ranks:
        evaluations = ranks.run(moe_cases.evaluated, dp=1, sp=2, spec=spec)
        found = ranks.run(moe_cases.trained, dp=2, steps=1, place=str(tmp_path / "two"), save=1)

    assert all(e.labels == expected.labels for e in evaluations)
    for losses, tensors in found:
        assert losses == pytest.approx(saved, abs=1e-5)
        assert tensors.keys() == kept.keys()


def test_the_measured_bytes_of_the_transports_cross_where_a_token_has_as_many_experts_as_ranks(
    ranks,
):
    first, second = ranks.run(moe_cases.crossover, dp=1, sp=2, top_ks=(1, 2, 3))

    assert first == second
    assert [row.top_k for row in first] == [1, 2, 3]
    assert last_below({row.top_k: row.sent_bytes for row in first}) in (1, 2)
    assert all(seconds > 0 for row in first for seconds in row.seconds.values())

"""Gradients of a vision-language step are the same wherever its images are encoded."""

import re
from dataclasses import replace

import numpy as np
import pytest

from omniload.actors.local.plane import LocalPlane
from omniload.actors.plane import PlaneSpec
from omniload.batch.arrays import NumpyArrays
from omniload.client import Client
from omniload.front.batches.rows import PackedRows
from omniload.plan.place_tree import ClientPlaceTree
from tests.support.drawn import a_drawn_mix
from tests.support.trainer import vision_cases
from tests.support.trainer.moe_cases import ALONE, farthest
from trainer_integration.moe.parallel.collectives import Peers
from trainer_integration.vision.model import VisionInputs

pytestmark = pytest.mark.slow


STEPS = 4


def steps_of(folder, strategy, dp):
    """Return the batches of each rank."""
    mix = a_drawn_mix(folder, rows=4, balance={"strategy": strategy})
    with LocalPlane(PlaneSpec(mix=mix, base_dir=folder, tree=ClientPlaceTree.of(dp=dp))) as plane:
        clients = [Client(plane.handle(rank)) for rank in range(dp)]
        # Step by step: a plane runs ahead of its slowest rank by its window alone.
        steps = [[client.next_batch() for client in clients] for _ in range(STEPS)]
        return [list(batches) for batches in zip(*steps, strict=True)]


def a_step(folder, strategy, dp):
    return [batches[0].microbatches for batches in steps_of(folder, strategy, dp)]


def test_gradients_are_those_of_one_rank_wherever_images_are_encoded(ranks, tmp_path):
    expected, _ = vision_cases.gradients(ALONE, microbatches=a_step(tmp_path, "balanced", 1))
    assert all(np.abs(gradient).max() > 0 for gradient in expected.values())

    for strategy in ("balanced", "hybrid"):
        step = a_step(tmp_path, strategy, 2)
        answers = ranks.run(vision_cases.gradients, dp=2, microbatches=step)

        for found, _ in answers:
            assert farthest(found, expected) <= 1e-10
        travelled = sum(sent for _, sent in answers)
        assert (travelled > 0) == (strategy == "hybrid")


def figures_of(results):
    """What a step told, in one list of numbers."""
    return [
        figure
        for r in results
        for told in [r.figures]
        for figure in (r.step, told.loss, told.balance_loss, told.grad_norm, told.tokens, r.flops)
    ]


def test_a_run_goes_on_with_images_dealt_otherwise_sharded_or_whole(ranks, tmp_path):
    other = tmp_path / "evaluated"
    stages = [{"from_step": 0, "weights": {"captions": 1, "pages": 1}}]
    mix = a_drawn_mix(other, samples=5, mix={"stop": "each_once", "stages": stages})
    spec = PlaneSpec(mix=mix, base_dir=other, tree=ClientPlaceTree.of())
    alone = {"batches": steps_of(tmp_path, "balanced", 1), "folder": str(tmp_path / "one")}
    expected, losses, _ = vision_cases.trained(ALONE, **alone, spec=spec)
    dealt = {"batches": steps_of(tmp_path, "hybrid", 2), "folder": str(tmp_path / "two")}

    begun = ranks.run(vision_cases.trained, dp=2, **dealt, fsdp=True, save=2)
    ended = ranks.run(vision_cases.trained, dp=2, **dealt, load=2, spec=spec)

    for (first, _, _), (rest, found, _) in zip(begun, ended, strict=True):
        assert figures_of([*first, *rest]) == pytest.approx(figures_of(expected), abs=1e-9)
        assert found == pytest.approx(losses, abs=1e-9)
    assert min(sum(sent for *_, sent in begun), sum(sent for *_, sent in ended)) > 0


def test_a_rank_with_a_batch_of_another_step_is_told_of_before_embeddings_travel(ranks, tmp_path):
    steps = steps_of(tmp_path, "hybrid", 2)
    microbatches = [[b.microbatches[0] for b in batches] for batches in steps]

    errors = ranks.run(vision_cases.out_of_step, dp=2, microbatches=microbatches)

    assert all("StateError" in error and "batches of different steps" in error for error in errors)
    assert re.search(r"rank \d sends \d+ embeddings of images and rank \d expects", "".join(errors))


@pytest.mark.parametrize("strategy", ["balanced", "hybrid"])
def test_rows_of_a_loop_are_taken_as_their_microbatch_is(tmp_path, strategy):
    peers = Peers(rank=0, size=2)
    microbatches = [m for batches in a_step(tmp_path, strategy, 2) for m in batches]

    for microbatch in microbatches:
        rows = PackedRows(microbatch, NumpyArrays(), "shifted")
        found = VisionInputs.of_rows(rows, peers)
        expected = VisionInputs.of_microbatch(microbatch, peers)

        assert rows.deals_images == (strategy == "hybrid")
        for name in ("grids", "sends", "receives"):
            assert getattr(found, name) == getattr(expected, name), name
        for name in ("tokens_N", "labels_N", "positions_N", "patches_PV", "places_E"):
            assert getattr(found, name).equal(getattr(expected, name)), name
    assert len(found.patches_PV) > 0


def test_unshifted_labels_are_refused(tmp_path):
    (microbatch, *_), _ = a_step(tmp_path, "balanced", 2)

    with pytest.raises(ValueError, match="labels of the rows are unshifted"):
        VisionInputs.of_rows(PackedRows(microbatch, NumpyArrays(), "unshifted"))


def test_counts_that_do_not_fit_the_model_are_refused(tmp_path):
    microbatch = a_step(tmp_path, "hybrid", 1)[0][0]
    with pytest.raises(ValueError, match="sends to 1 ranks, and 2 data-parallel ranks"):
        VisionInputs.of_microbatch(microbatch, Peers(rank=0, size=2))

    share = replace(microbatch.encoding, places_E=microbatch.encoding.places_E[1:])
    with pytest.raises(ValueError, match=r"receives \d+ embeddings and has places for"):
        VisionInputs.of_microbatch(replace(microbatch, encoding=share))

    share = replace(microbatch.encoding, order_M=np.arange(3)[::-1])
    with pytest.raises(ValueError, match="in another order than they are made in"):
        VisionInputs.of_microbatch(replace(microbatch, encoding=share))

    model = vision_cases.a_vision_model(merge=2)
    with pytest.raises(ValueError, match=r"an encoder of merge 2 makes \d+ of these images"):
        model(VisionInputs.of_microbatch(microbatch))

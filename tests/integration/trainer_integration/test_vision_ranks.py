"""Gradients of a vision-language step are the same wherever its images are encoded."""

import numpy as np
import pytest

from omniload.actors.local.plane import LocalPlane
from omniload.actors.plane import PlaneSpec
from omniload.client import Client
from omniload.plan.place_tree import ClientPlaceTree
from tests.support.drawn import a_drawn_mix
from tests.support.trainer import vision_cases
from tests.support.trainer.moe_cases import ALONE
from tests.support.trainer.moe_group import Ranks

pytestmark = pytest.mark.slow


def a_step(folder, strategy, dp):
    mix = a_drawn_mix(folder, rows=4, balance={"strategy": strategy})
    with LocalPlane(PlaneSpec(mix=mix, base_dir=folder, tree=ClientPlaceTree.of(dp=dp))) as plane:
        return [Client(plane.handle(rank)).next_batch().microbatches for rank in range(dp)]


def farthest(found, expected):
    assert found.keys() == expected.keys()
    return max(float(np.abs(found[name] - expected[name]).max()) for name in expected)


def test_gradients_are_those_of_one_rank_wherever_images_are_encoded(tmp_path):
    expected, _ = vision_cases.gradients(ALONE, microbatches=a_step(tmp_path, "balanced", 1))
    assert all(np.abs(gradient).max() > 0 for gradient in expected.values())

    with Ranks(2) as ranks:
        for strategy in ("balanced", "hybrid"):
            step = a_step(tmp_path, strategy, 2)
            answers = ranks.run(vision_cases.gradients, dp=2, microbatches=step)

            for found, _ in answers:
                assert farthest(found, expected) <= 1e-10
            travelled = sum(sent for _, sent in answers)
            assert (travelled > 0) == (strategy == "hybrid")

import math

import torch

from tests.support.trainer.moe_builders import all_close
from trainer_integration.moe.norm import RMSNorm
from trainer_integration.moe.rope import Rotation


def scores_of(q_NHC, k_NHC, positions_N):
    rotation = Rotation.at(positions_N, q_NHC.shape[-1], 10_000.0)
    return torch.einsum("nhc,mhc->hnm", rotation.apply(q_NHC), rotation.apply(k_NHC))


def test_scores_depend_on_distance_only():
    torch.manual_seed(0)
    q, k = torch.randn(6, 2, 8), torch.randn(6, 2, 8)
    positions = torch.tensor([0, 1, 2, 5, 9, 30])

    near, far = scores_of(q, k, positions), scores_of(q, k, positions + 4000)

    assert all_close(near, far, 1e-3)
    assert not all_close(near, scores_of(q, k, 2 * positions), 1e-3)


def test_position_zero_turns_nothing_and_lengths_are_kept():
    torch.manual_seed(0)
    x = torch.randn(3, 2, 8)

    turned = Rotation.at(torch.tensor([0, 3, 100]), 8, 10_000.0).apply(x)

    assert torch.equal(turned[0], x[0])
    assert all_close(turned.norm(dim=-1), x.norm(dim=-1))


def test_the_first_pair_turns_by_one_radian_a_position():
    x = torch.zeros(1, 1, 4)
    x[0, 0, 0] = 1.0

    turned = Rotation.at(torch.tensor([2]), 4, 10_000.0).apply(x)

    assert all_close(turned[0, 0], torch.tensor([math.cos(2), 0.0, math.sin(2), 0.0]))


def test_norm_gives_unit_mean_square_times_its_weight():
    torch.manual_seed(0)
    norm = RMSNorm(16, 1e-6)
    with torch.no_grad():
        norm.weight_D.fill_(3.0)

    normed = norm(100 * torch.randn(5, 16))

    assert all_close(normed.square().mean(-1), torch.full((5,), 9.0), 1e-4)


def test_norm_agrees_with_torch():
    torch.manual_seed(0)
    x = torch.randn(7, 16)

    assert all_close(RMSNorm(16, 1e-5)(x), torch.nn.functional.rms_norm(x, (16,), eps=1e-5))

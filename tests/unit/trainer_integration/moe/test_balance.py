import dataclasses
import math

import numpy as np
import pytest
import torch

from tests.support.trainer.moe_builders import a_config, a_microbatch, all_close, documents_of
from trainer_integration.moe.balance import (
    balance_losses,
    figures_of,
    moved_bias_E,
    within_capacity,
)
from trainer_integration.moe.inputs import ModelInputs
from trainer_integration.moe.parallel.collectives import ALONE
from trainer_integration.moe.router import Routing


def inputs_of(lengths):
    """One row for each length, of one document."""
    rows = [documents_of([n]) if n else [] for n in lengths]
    return ModelInputs.of(a_microbatch(rows, max(lengths)))


def routing_of(probabilities_NE, top_k):
    chosen, experts = probabilities_NE.topk(top_k, dim=-1)
    return Routing(
        gates_NK=chosen / chosen.sum(-1, keepdim=True),
        experts_NK=experts,
        probabilities_NE=probabilities_NE,
        log_sums_N=torch.zeros(len(experts)),
    )


def losses_of(probabilities_NE, top_k, lengths, groups=4):
    """Balance losses of rows, each divided by its labels."""
    return balance_losses([routing_of(probabilities_NE, top_k)], inputs_of(lengths), ALONE, groups)


def test_even_load_has_balance_loss_one():
    probabilities = torch.full((8, 4), 0.2)
    probabilities[torch.arange(8), torch.arange(8) % 4] = 0.4

    assert losses_of(probabilities, 1, [8]).balance.item() / 7 == pytest.approx(1.0)


@pytest.mark.parametrize("groups", [1, 2, 4])
def test_all_tokens_at_one_expert_have_the_largest_balance_loss(groups):
    probabilities = torch.zeros(8, 4)
    probabilities[:, 2] = 1.0

    assert losses_of(probabilities, 1, [8], groups).balance.item() / 7 == pytest.approx(groups)


def test_experts_of_one_group_may_be_unevenly_busy():
    probabilities = torch.zeros(8, 4)
    probabilities[:4, 0] = probabilities[4:, 2] = 1.0

    assert losses_of(probabilities, 1, [8], 2).balance.item() / 7 == pytest.approx(1.0)
    assert losses_of(probabilities, 1, [8], 4).balance.item() / 7 == pytest.approx(2.0)


def test_a_row_has_the_same_balance_loss_whatever_shares_its_microbatch():
    torch.manual_seed(0)
    probabilities = torch.randn(10, 4).softmax(-1)

    together = losses_of(probabilities, 2, [4, 6])
    first, second = losses_of(probabilities[:4], 2, [4]), losses_of(probabilities[4:], 2, [6])

    assert all_close(together.balance, first.balance + second.balance, 1e-6)


def test_a_row_without_tokens_has_no_balance_loss():
    torch.manual_seed(0)
    probabilities = torch.randn(6, 4).softmax(-1)

    assert all_close(
        losses_of(probabilities, 1, [0, 6, 0]).balance, losses_of(probabilities, 1, [6]).balance
    )


@pytest.mark.parametrize("busy", [0, 3])
def test_descending_the_balance_loss_takes_probability_from_the_busy_expert(busy):
    logits = torch.zeros(12, 4)
    logits[:, busy] = 1.0
    logits.requires_grad_()

    losses_of(logits.softmax(-1), 1, [12]).balance.backward()

    assert (logits.grad[:, busy] > 0).all()
    assert (logits.grad.sum(0)[[e for e in range(4) if e != busy]] < 0).all()


def test_choices_of_least_probability_beyond_the_room_of_a_group_are_dropped():
    probabilities = torch.tensor(
        [[0.9, 0.1, 0, 0], [0.5, 0.5, 0, 0], [0.2, 0.8, 0, 0], [0.1, 0, 0.9, 0]]
    )
    routing = routing_of(probabilities, 1)

    # Four choices, two groups, room for two each; three want the first group.
    found = within_capacity(routing, inputs_of([4]), ALONE, 2, 1.0)

    assert found.kept_NK[:, 0].tolist() == [True, False, True, True]
    assert found.served_NK()[:, 0].tolist() == [0, 4, 1, 2]
    assert figures_of([found]).dropped == 1
    assert figures_of([found]).slots_LE.tolist() == [[1, 1, 1, 0]]


def test_of_equal_probabilities_the_earlier_token_stays():
    found = within_capacity(
        routing_of(torch.tensor([[1.0, 0, 0, 0]] * 6), 1), inputs_of([6]), ALONE, 2, 1.0
    )

    assert found.kept_NK[:, 0].tolist() == [True] * 3 + [False] * 3


def test_every_row_has_room_of_its_own():
    probabilities = torch.tensor([[1.0, 0, 0, 0]] * 6)

    found = within_capacity(routing_of(probabilities, 1), inputs_of([2, 4]), ALONE, 2, 1.0)

    assert found.kept_NK[:, 0].tolist() == [True, False, True, True, False, False]


def test_a_router_without_opinions_has_the_entropy_of_even_chances():
    figures = figures_of([routing_of(torch.full((6, 4), 0.25), 2)])

    assert figures.entropy.item() == pytest.approx(6 * math.log(4))
    assert figures.dropped == 0


def test_the_bias_moves_towards_idle_experts():
    bias = moved_bias_E(torch.zeros(3), torch.tensor([4, 1, 4]), 0.5)

    assert bias.tolist() == [-0.5, 0.5, -0.5]


def test_the_z_loss_is_the_mean_square_of_the_logarithmic_sums_times_labels():
    routing = dataclasses.replace(
        routing_of(torch.full((4, 4), 0.25), 1), log_sums_N=torch.tensor([1.0, 2.0, 3.0, 4.0])
    )

    losses = balance_losses([routing], inputs_of([4]), ALONE, 4)

    assert losses.z.item() == pytest.approx(3 * np.mean([1, 4, 9, 16]))


def test_a_number_of_groups_divides_the_experts():
    with pytest.raises(ValueError, match="expert_groups is 3, no divisor of num_experts 4"):
        a_config(expert_groups=3)

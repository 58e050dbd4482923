import pytest
import torch

from tests.support.moe_builders import a_config, a_microbatch, a_model, all_close, rows_of
from trainer_integration.moe.inputs import ModelInputs
from trainer_integration.moe.router import Router, Routing, balance_losses_R
from trainer_integration.moe.row_map import RowMap


def a_router(**changes):
    torch.manual_seed(0)
    router = Router(a_config(**changes))
    with torch.no_grad():
        router.weight_ED.normal_()
    return router


def routing_of(probabilities_NE, top_k):
    chosen, experts = probabilities_NE.topk(top_k, dim=-1)
    return Routing(
        gates_NK=chosen / chosen.sum(-1, keepdim=True),
        experts_NK=experts,
        probabilities_NE=probabilities_NE,
        row_map=RowMap.of(experts, probabilities_NE.shape[1]),
    )


def test_the_likeliest_experts_are_chosen_and_their_weights_sum_to_one():
    router = a_router()
    x = torch.randn(9, 16)

    routing = router(x)

    expected = (x @ router.weight_ED.t()).argsort(-1, descending=True)[:, :2]
    assert torch.equal(routing.experts_NK, expected)
    assert all_close(routing.gates_NK.sum(-1), torch.ones(9))
    assert (routing.gates_NK[:, 0] >= routing.gates_NK[:, 1]).all()


def test_one_expert_alone_has_its_probability_as_its_weight():
    router, x = a_router(top_k=1), torch.randn(9, 16)

    routing = router(x)

    # Switch Transformer, equations 1 and 2, by hand.
    exponentials = (x.double() @ router.weight_ED.double().t()).exp()
    expected = exponentials.amax(-1) / exponentials.sum(-1)
    assert all_close(routing.gates_NK[:, 0].double(), expected)
    assert torch.equal(routing.experts_NK[:, 0], exponentials.argmax(-1))


@pytest.mark.parametrize("top_k", [1, 2, 3, 4])
def test_the_token_loss_alone_trains_the_router_however_many_experts_see_a_token(top_k):
    def gradient(top_k):
        model = a_model(top_k=top_k)
        inputs = ModelInputs.of(a_microbatch(rows_of(0)))
        model(inputs).token_loss.backward()
        return torch.stack([b.router.weight_ED.grad.norm() for b in model.blocks])

    found, of_two = gradient(top_k), gradient(2)

    # A weight that is 1 whatever the logits leaves rounding alone: some 1e-7 of this.
    assert (found > 0.05 * of_two).all()


def test_a_token_never_chooses_an_expert_twice():
    routing = a_router(num_experts=3, top_k=3)(torch.randn(20, 16))

    assert torch.equal(routing.experts_NK.sort(-1).values, torch.arange(3).expand(20, 3))


def test_router_arithmetic_is_float32_for_bfloat16_tokens():
    routing = a_router()(torch.randn(4, 16, dtype=torch.bfloat16))

    assert routing.probabilities_NE.dtype == torch.float32
    assert routing.gates_NK.dtype == torch.float32


def test_even_load_has_balance_loss_one():
    probabilities = torch.full((8, 4), 0.2)
    probabilities[torch.arange(8), torch.arange(8) % 4] = 0.4

    losses = balance_losses_R(routing_of(probabilities, 1), torch.zeros(8, dtype=torch.int64), 1)

    assert all_close(losses, torch.ones(1))


def test_all_tokens_at_one_expert_have_the_largest_balance_loss():
    probabilities = torch.zeros(8, 4)
    probabilities[:, 2] = 1.0

    losses = balance_losses_R(routing_of(probabilities, 1), torch.zeros(8, dtype=torch.int64), 1)

    assert losses.tolist() == [4.0]


def test_a_row_has_the_same_balance_loss_whatever_shares_its_microbatch():
    torch.manual_seed(0)
    probabilities = torch.randn(10, 4).softmax(-1)
    rows = torch.tensor([0] * 4 + [1] * 6)

    together = balance_losses_R(routing_of(probabilities, 2), rows, 2)
    first = balance_losses_R(routing_of(probabilities[:4], 2), rows[:4], 1)
    second = balance_losses_R(routing_of(probabilities[4:], 2), rows[:6] * 0, 1)

    assert all_close(together, torch.cat((first, second)), 1e-6)


def test_a_row_without_tokens_has_no_balance_loss():
    losses = balance_losses_R(
        routing_of(torch.full((3, 4), 0.25), 1), torch.full((3,), 1, dtype=torch.int64), 3
    )

    assert losses[0] == 0
    assert losses[2] == 0
    assert losses[1] > 0


@pytest.mark.parametrize("busy", [0, 3])
def test_descending_the_balance_loss_takes_probability_from_the_busy_expert(busy):
    logits = torch.zeros(12, 4)
    logits[:, busy] = 1.0
    logits.requires_grad_()

    balance_losses_R(
        routing_of(logits.softmax(-1), 1), torch.zeros(12, dtype=torch.int64), 1
    ).sum().backward()

    assert (logits.grad[:, busy] > 0).all()
    assert (logits.grad.sum(0)[[e for e in range(4) if e != busy]] < 0).all()

import pytest
import torch

from tests.support.trainer.moe_builders import a_config, a_microbatch, a_model, all_close, rows_of
from trainer_integration.moe.inputs import ModelInputs
from trainer_integration.moe.router import Router


def a_router(**changes):
    torch.manual_seed(0)
    router = Router(a_config(**changes))
    with torch.no_grad():
        router.weight_ED.normal_()
    return router


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


def test_a_bias_decides_who_is_chosen_and_not_how_much_it_counts():
    router, x = a_router(top_k=1, bias_rate=0.1), torch.randn(9, 16)
    router.bias_E[2] = 10.0

    routing = router(x)

    assert (routing.experts_NK == 2).all()
    assert all_close(routing.gates_NK[:, 0], routing.probabilities_NE[:, 2])


def test_router_arithmetic_stays_float64():
    routing = a_router().double()(torch.randn(4, 16, dtype=torch.float64))

    assert routing.gates_NK.dtype == routing.log_sums_N.dtype == torch.float64

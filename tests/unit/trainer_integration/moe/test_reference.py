"""The model against a second one that shares no code with it, in float64."""

import pytest
import torch

from tests.support.trainer.moe_builders import a_microbatch, a_model, documents_of, rows_of
from tests.support.trainer.moe_reference import reference_losses
from trainer_integration.moe.inputs import ModelInputs

CASES = {
    "plain": {},
    "one expert a token": {"top_k": 1},
    "groups": {"expert_groups": 2, "top_k": 3},
    "drops": {"capacity_factor": 1.0, "expert_groups": 4, "top_k": 3},
    "tied, one kv head": {"tied_embeddings": True, "num_kv_heads": 1},
}


@pytest.mark.parametrize("case", CASES)
def test_losses_and_gradients_are_those_of_the_reference(case):
    model = a_model(**CASES[case]).double()
    rows = [*rows_of(0, num_rows=2), [], documents_of([1, 6], seed=9)]
    weights = {n: p.detach().clone().requires_grad_() for n, p in model.named_parameters()}

    found = model(ModelInputs.of(a_microbatch(rows)))
    (found.token_loss + 0.1 * found.balance_loss + 0.01 * found.z_loss).backward()
    token_loss, balance, z, dropped = reference_losses(weights, model.config, rows)
    (token_loss + 0.1 * balance + 0.01 * z).backward()

    assert found.token_loss.item() == pytest.approx(token_loss.item(), rel=1e-12)
    assert found.balance_loss.item() == pytest.approx(balance.item(), rel=1e-12)
    assert found.z_loss.item() == pytest.approx(z.item(), rel=1e-12)
    assert found.router.dropped == dropped
    assert (dropped > 0) == (case == "drops")
    for name, parameter in model.named_parameters():
        assert torch.allclose(parameter.grad, weights[name].grad, rtol=0, atol=1e-10), name

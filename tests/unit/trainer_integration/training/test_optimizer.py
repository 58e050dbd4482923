import math

import pytest
import torch

from omniload.base.errors import StateError
from tests.support.trainer.moe_builders import a_model, all_close, an_optimizer
from trainer_integration.config import OptimizerConfig
from trainer_integration.training.optimizer import FlatAdamW


def test_backward_adds_into_the_flat_gradient():
    model = a_model()
    optimizer = an_optimizer(model)
    optimizer.clear()

    for _ in range(2):
        model.embedding_VD.sum().backward()

    assert model.embedding_VD.grad.eq(2).all()
    assert optimizer.gradients.sum().item() == 2 * model.embedding_VD.numel()
    assert optimizer.gradients.numel() == sum(p.numel() for p in model.parameters())


def test_clearing_forgets_and_survives_a_dropped_gradient():
    model = a_model()
    optimizer = an_optimizer(model)
    optimizer.clear()
    model.embedding_VD.sum().backward()
    optimizer.adamw.zero_grad(set_to_none=True)

    optimizer.clear()
    model.embedding_VD.sum().backward()

    assert optimizer.gradients.sum().item() == model.embedding_VD.numel()


def test_a_long_gradient_is_cut_to_the_limit_and_a_short_one_is_left():
    model = a_model()
    optimizer = an_optimizer(model, clip_norm=3.0)

    optimizer.clear()
    optimizer.gradients.fill_(1.0)
    norm = optimizer.step(0)
    clipped = optimizer.gradients.norm().item()
    optimizer.clear()
    optimizer.gradients[0] = 2.0
    optimizer.step(1)

    assert norm == pytest.approx(math.sqrt(optimizer.gradients.numel()), rel=1e-5)
    assert clipped == pytest.approx(3.0, rel=1e-5)
    assert optimizer.gradients[0] == 2.0


def test_the_update_is_that_of_torchs_adamw():
    model, plain = a_model(), a_model()
    optimizer = FlatAdamW(model, OptimizerConfig(lr=0.01, warmup_steps=1, clip_norm=1e9), 10)
    reference = torch.optim.AdamW(
        [
            {"params": [p for p in plain.parameters() if p.ndim >= 2], "weight_decay": 0.1},
            {"params": [p for p in plain.parameters() if p.ndim < 2], "weight_decay": 0.0},
        ],
        lr=0.01,
        betas=(0.9, 0.95),
    )
    optimizer.clear()
    torch.manual_seed(0)
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        mine.grad.copy_(torch.randn_like(mine))
        theirs.grad = mine.grad.clone()

    optimizer.step(0)
    reference.step()

    assert all(
        all_close(a, b, 1e-6) for a, b in zip(model.parameters(), plain.parameters(), strict=True)
    )


@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_a_gradient_that_is_not_finite_stops_the_run_before_the_model_changes(poison):
    model = a_model()
    optimizer = an_optimizer(model)
    before = [p.detach().clone() for p in model.parameters()]
    optimizer.clear()
    optimizer.gradients[3] = poison

    with pytest.raises(StateError, match=r"gradient norm of step 7 is (nan|inf)"):
        optimizer.step(7)

    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))

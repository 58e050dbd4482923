import math
import sys

import pytest
import torch

from omniload.base.errors import StateError
from tests.support.trainer.moe_builders import (
    a_batch,
    a_microbatch,
    a_model,
    an_optimizer,
    rows_of,
)
from trainer_integration.checkpoint.tensors import tensors_of
from trainer_integration.config import OptimizerConfig
from trainer_integration.training.optimizer import FlatAdamW, lr_at
from trainer_integration.training.step import train_step


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
    model.zero_grad(set_to_none=True)

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


def test_updates_are_those_of_torchs_adamw_to_the_last_bit():
    model, plain = a_model(), a_model()
    config = OptimizerConfig(lr=0.01, warmup_steps=1, clip_norm=1e9, schedule="constant")
    optimizer = FlatAdamW(model, config, 10)
    reference = torch.optim.AdamW(
        [
            {"params": [p for p in plain.parameters() if p.ndim >= 2], "weight_decay": 0.1},
            {"params": [p for p in plain.parameters() if p.ndim < 2], "weight_decay": 0.0},
        ],
        lr=0.01,
        betas=(0.9, 0.95),
        fused=True,
    )
    torch.manual_seed(0)
    for step in range(3):
        optimizer.clear()
        for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            mine.grad.copy_(torch.randn_like(mine))
            theirs.grad = mine.grad.clone()
        optimizer.step(step)
        reference.step()

    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(mine, theirs)
        assert optimizer.state[mine].keys() == reference.state[theirs].keys()
        for name, value in optimizer.state[mine].items():
            assert torch.equal(value, reference.state[theirs][name]), name


def test_no_part_of_a_step_imports_torchs_compiler(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch._dynamo", None)  # an import of it fails
    model = a_model()
    optimizer = an_optimizer(model)

    result = train_step(model, optimizer, a_batch(0, [a_microbatch(rows_of(0))]))

    assert result.figures.grad_norm > 0
    assert all(state["step"] == 1 for state in optimizer.state.values())
    assert tensors_of(model, optimizer).keys() > {"optimizer.state.embedding_VD.exp_avg"}


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


CONFIG = OptimizerConfig(lr=1.0, warmup_steps=4, final_lr_ratio=0.1)


def test_the_rate_warms_up_in_equal_steps_to_its_peak():
    assert [lr_at(step, 20, CONFIG) for step in range(4)] == [0.25, 0.5, 0.75, 1.0]


def test_the_rate_then_falls_to_its_final_share_at_the_last_step_and_stays():
    rates = [lr_at(step, 20, CONFIG) for step in range(3, 20)]

    assert rates == sorted(rates, reverse=True)
    assert rates[-1] == pytest.approx(0.1)
    assert lr_at(500, 20, CONFIG) == pytest.approx(0.1)


def test_the_rate_is_half_way_down_in_the_middle():
    assert lr_at(11, 20, CONFIG) == pytest.approx(0.55)


@pytest.mark.parametrize("warmup", [0, 1, 5])
def test_every_rate_of_a_short_run_is_above_zero_and_at_most_the_peak(warmup):
    config = OptimizerConfig(lr=1.0, warmup_steps=warmup, final_lr_ratio=0.5)

    assert all(0 < lr_at(step, 5, config) <= 1.0 for step in range(5))


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ("linear", [1.0, 0.775, 0.55, 0.325, 0.1]),
        ("constant", [1.0] * 5),
        ("wsd", [1.0, 1.0, 1.0, 1.0, 0.1]),
    ],
)
def test_the_rate_follows_its_schedule_after_the_warm_up(schedule, expected):
    config = CONFIG.model_copy(update={"schedule": schedule})

    assert [lr_at(step, 20, config) for step in (3, 7, 11, 15, 19)] == pytest.approx(expected)


def test_the_rate_falls_in_a_straight_line_over_the_steps_that_are_given_for_it():
    config = CONFIG.model_copy(update={"schedule": "wsd", "decay_steps": 4})

    rates = [lr_at(step, 20, config) for step in range(14, 20)]

    assert rates == pytest.approx([1.0, 1.0, 0.775, 0.55, 0.325, 0.1])


@pytest.mark.parametrize("schedule", ["cosine", "linear", "constant", "wsd"])
def test_a_schedule_of_tokens_is_that_of_steps_where_every_step_has_as_many(schedule):
    steps = CONFIG.model_copy(update={"schedule": schedule, "decay_steps": 3})
    by_tokens = {"total_tokens": 20_000, "warmup_tokens": 4_000, "decay_tokens": 3_000}
    tokens = CONFIG.model_copy(update={"schedule": schedule, **by_tokens})

    for step in range(25):
        found = lr_at(step, 7, tokens, tokens=1000 * (step + 1))
        assert found == pytest.approx(lr_at(step, 20, steps))


def test_a_step_without_tokens_still_has_a_rate():
    config = OptimizerConfig(total_tokens=100, warmup_tokens=10)

    assert lr_at(0, 5, config, tokens=0) > 0

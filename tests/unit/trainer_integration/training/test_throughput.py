import json

import pytest
import torch

from omniload.batch.slices import slice_for_cp
from tests.support.trainer.moe_builders import (
    a_batch,
    a_config,
    a_microbatch,
    a_model,
    an_optimizer,
    documents_of,
)
from trainer_integration.moe.flops import cost_of
from trainer_integration.training.step import train_step
from trainer_integration.training.throughput import (
    StepProfile,
    model_flops,
    peak_flops_of,
    token_pairs,
)

ROWS = [documents_of([20, 5]), documents_of([32]), documents_of([1])]


def test_documents_count_by_their_squares_and_padding_does_not():
    whole = a_microbatch(ROWS)

    assert token_pairs(a_batch(0, [whole, whole])) == 2 * (400 + 25 + 1024 + 1)
    for peer in range(2):
        assert (
            token_pairs(a_batch(0, [slice_for_cp(whole, peer, 2)], loss_tokens=1))
            == 400 + 25 + 1024 + 1
        )


def test_a_step_reports_the_flops_that_its_documents_cost():
    linear, quadratic = cost_of(a_config())

    model = a_model()
    result = train_step(model, an_optimizer(model), a_batch(0, [a_microbatch(ROWS)]))

    costs = [linear * n + quadratic * n**2 for n in (20, 5, 32, 1)]
    assert result.flops == pytest.approx(sum(costs))
    assert model_flops(a_config(), 0, 0.0) == 0.0


def test_the_peak_of_a_device_is_as_given_or_unknown():
    assert peak_flops_of(torch.device("cpu"), 2.5) == 2.5e12
    assert peak_flops_of(torch.device("cpu")) is None


def traced_steps(file):
    events = json.loads(file.read_text())["traceEvents"]
    return sorted({e["name"] for e in events if str(e.get("name", "")).startswith("step ")})


def test_the_steps_of_the_range_are_in_the_trace_and_no_others(tmp_path):
    profile = StepProfile((2, 3), tmp_path / "profile", 1)
    told = []
    for step in range(5):
        with profile.step(step) as file:
            torch.ones(8) @ torch.ones(8)
        told.append(file)

    assert told == [None, None, None, tmp_path / "profile" / "rank-1-steps-2-3.json", None]
    assert traced_steps(told[3]) == ["step 2", "step 3"]


def test_a_run_that_ends_within_the_range_leaves_what_was_traced(tmp_path):
    profile = StepProfile((0, 9), tmp_path, 0)
    with profile.step(0):
        pass

    profile.close()

    (file,) = tmp_path.iterdir()
    assert traced_steps(file) == ["step 0"]


def test_a_range_that_is_never_reached_leaves_nothing(tmp_path):
    profile = StepProfile((7, 7), tmp_path / "profile", 0)
    with profile.step(0):
        pass
    profile.close()

    assert list(tmp_path.iterdir()) == []

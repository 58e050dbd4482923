"""Properties for any deal of rows, any schedule and any flipped bit."""

import math

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.examples import few
from tests.support.trainer.moe_builders import (
    a_batch,
    a_microbatch,
    a_model,
    all_close,
    an_optimizer,
    rows_of,
)
from trainer_integration.checkpoint.file_digests import FileDigest
from trainer_integration.config import OptimizerConfig
from trainer_integration.training.optimizer import lr_at
from trainer_integration.training.step import train_step

ROWS = rows_of(3, num_rows=5)
LABELS = sum(len(document) - 1 for row in ROWS for document in row)


def summed_gradient(deal, num_ranks, num_microbatches):
    """Return the gradient and the loss of all ranks; ``deal`` assigns each row."""
    gradient, loss = torch.zeros(()), 0.0
    for rank in range(num_ranks):
        microbatches = [
            a_microbatch([row for row, at in zip(ROWS, deal, strict=True) if at == (rank, micro)])
            for micro in range(num_microbatches)
        ]
        model = a_model()
        optimizer = an_optimizer(model, clip_norm=math.inf)
        result = train_step(model, optimizer, a_batch(0, microbatches, loss_tokens=LABELS))
        gradient, loss = gradient + optimizer.gradients, loss + result.figures.loss
    return gradient, loss


WHOLE_GRADIENT, WHOLE_LOSS = summed_gradient([(0, 0)] * len(ROWS), 1, 1)


# Derandomised: see test_moe_isolation.
@few(12, soak=250)
@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 1)), min_size=5, max_size=5))
def test_loss_and_gradient_do_not_depend_on_the_deal_of_rows(deal):
    gradient, loss = summed_gradient(deal, 3, 2)

    assert math.isclose(loss, WHOLE_LOSS, rel_tol=1e-6)
    assert all_close(gradient, WHOLE_GRADIENT, 1e-5)


@given(
    st.integers(1, 300),
    st.integers(0, 300),
    st.floats(0, 1),
    st.floats(1e-6, 10),
)
def test_the_learning_rate_stays_between_zero_and_its_peak_and_rises_then_falls(
    total, warmup, ratio, peak
):
    config = OptimizerConfig(lr=peak, warmup_steps=min(warmup, total), final_lr_ratio=ratio)

    rates = [lr_at(step, total, config) for step in range(total)]

    slack = peak * 1e-9
    assert all(0 <= rate <= peak + slack for rate in rates)
    turn = config.warmup_steps
    assert rates[:turn] == sorted(rates[:turn])
    assert all(a >= b - slack for a, b in zip(rates[turn:], rates[turn + 1 :], strict=False))
    if turn < total:
        assert math.isclose(rates[-1], peak * ratio, rel_tol=1e-9, abs_tol=slack)


@settings(deadline=None)
@given(st.binary(min_size=1, max_size=300), st.data())
def test_any_flipped_bit_changes_the_digest(tmp_path_factory, data, draw):
    file = tmp_path_factory.mktemp("digest") / "data"
    file.write_bytes(data)
    digest = FileDigest.of(file)
    bit = draw.draw(st.integers(0, 8 * len(data) - 1))
    spoilt = bytearray(data)
    spoilt[bit // 8] ^= 1 << bit % 8

    file.write_bytes(spoilt)

    assert digest.fault_in(file) is not None

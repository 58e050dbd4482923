"""The included model on a GPU, beside a second one in float64 that shares no code with it, and itself on a CPU."""

import copy
import warnings
from contextlib import contextmanager

import pytest
import torch

from omniload.batch.images import share_of
from tests.support.drawn import a_drawn_mix
from tests.support.plane.local_runs import a_spec, steps_of
from tests.support.trainer.gpus import GPU, needs_gpu
from tests.support.trainer.moe_builders import (
    a_batch,
    a_config,
    a_microbatch,
    an_optimizer,
    documents_of,
)
from tests.support.trainer.moe_reference import reference_losses
from trainer_integration.moe.inputs import ModelInputs
from trainer_integration.moe.model import MoETransformer
from trainer_integration.training.step import accumulate, train_step
from trainer_integration.vision.config import VisionConfig
from trainer_integration.vision.model import VisionInputs, VisionLanguageModel

pytestmark = needs_gpu

_SHAPE = {"dim": 128, "num_heads": 4, "num_kv_heads": 2, "hidden": 64, "init_std": 0.1}
_LENGTHS = ((90, 38), (1, 60, 7), (128,), (33, 95))
_LENGTH = 128


def rows_at(step=0):
    return [documents_of(lengths, seed=10 * step + r) for r, lengths in enumerate(_LENGTHS)]


def a_step_of(step=0):
    microbatches = [a_microbatch(rows_at(step)[part], _LENGTH) for part in (slice(2), slice(2, 4))]
    return a_batch(step, microbatches)


@contextmanager
def nobody_waits():
    """Fail whatever waits for the GPU."""
    torch.cuda.synchronize()
    with warnings.catch_warnings(action="ignore"):  # it says that it does not see every wait
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def gradients_of(model):
    return torch.cat([p.grad.double().cpu().flatten() for p in model.parameters()])


def cosine(found, expected):
    return float(torch.nn.functional.cosine_similarity(found, expected, dim=0))


@pytest.mark.parametrize("changes", [{}, {"capacity_factor": 1.0}, {"num_kv_heads": 4}])
def test_losses_and_gradients_are_those_of_the_reference(changes):
    config = a_config(**_SHAPE | changes)
    model = MoETransformer(config).to(GPU)
    weights = {n: p.detach().cpu().double().requires_grad_() for n, p in model.named_parameters()}

    found = model(ModelInputs.of(a_microbatch(rows_at(), _LENGTH), device=GPU))
    (found.token_loss + 0.1 * found.balance_loss).backward()
    token_loss, balance, _, _ = reference_losses(weights, config, rows_at())
    (token_loss + 0.1 * balance).backward()

    assert found.token_loss.item() == pytest.approx(token_loss.item(), rel=1e-5)
    assert found.balance_loss.item() == pytest.approx(balance.item(), rel=1e-5)
    expected = torch.cat([w.grad.flatten() for w in weights.values()])
    assert torch.allclose(gradients_of(model), expected, rtol=1e-3, atol=1e-4)


def test_in_bf16_one_kernel_attends_and_the_losses_are_near():
    wide = MoETransformer(a_config(**_SHAPE)).to(GPU)
    narrow = MoETransformer(wide.config, dtype=torch.bfloat16).to(GPU)
    rows = a_microbatch(rows_at(), _LENGTH)

    losses = [model(model.inputs_of(rows)).token_loss for model in (wide, narrow)]
    for loss in losses:
        loss.backward()

    assert (wide.takes_varlen, narrow.takes_varlen) == (False, True)
    assert losses[1].item() == pytest.approx(losses[0].item(), rel=1e-2)
    assert cosine(gradients_of(narrow), gradients_of(wide)) > 0.98


def test_forward_and_backward_wait_for_nothing_on_the_gpu():
    model = MoETransformer(a_config(**_SHAPE), dtype=torch.bfloat16).to(GPU)
    batch = a_step_of()
    accumulate(model, batch, 100)  # the first makes what is kept

    with nobody_waits():
        sums = accumulate(model, batch, 100)

    assert sums.figures[3].item() == sum(map(sum, _LENGTHS))


@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=["fp32", "bf16"])
def test_the_same_batches_give_the_same_weights_bit_by_bit(dtype):
    first = MoETransformer(a_config(**_SHAPE), dtype=dtype).to(GPU)
    again = copy.deepcopy(first)

    for model in (first, again):
        optimizer = an_optimizer(model)
        for step in range(4):
            train_step(model, optimizer, a_step_of(step))

    for (name, one), other in zip(first.named_parameters(), again.parameters(), strict=True):
        assert torch.equal(one, other), name


def test_a_run_learns_as_it_does_on_a_cpu():
    here = MoETransformer(a_config(**_SHAPE))
    there = copy.deepcopy(here).to(GPU)

    losses = []
    for model in (here, there):
        optimizer = an_optimizer(model)
        steps = [train_step(model, optimizer, a_step_of(step % 2)) for step in range(8)]
        losses.append([step.figures.loss for step in steps])

    assert losses[1] == pytest.approx(losses[0], rel=1e-4)
    assert losses[1][-1] < losses[1][0]


class TestImages:
    """Rows with images."""

    VISION = VisionConfig(patch=4, merge=1, dim=64, num_heads=4, num_layers=2, hidden=64)

    @pytest.fixture
    def rows(self, tmp_path):
        mix = a_drawn_mix(tmp_path, batch={"tokens": 512, "micro_tokens": 512})
        ((batch,),) = steps_of(a_spec(tmp_path, mix), 1)
        (rows,) = batch.microbatches
        assert len(share_of(rows, 0, 1).grids_I2) > 1
        return rows

    def models(self, dtype):
        config = a_config(**_SHAPE | {"vocab_size": 257})
        here = VisionLanguageModel(config, self.VISION)
        there = VisionLanguageModel(config, self.VISION, dtype=dtype).to(GPU)
        return here, there

    @pytest.mark.parametrize(
        ("dtype", "loss", "direction"), [(None, 1e-4, 0.9999), (torch.bfloat16, 1e-2, 0.97)]
    )
    def test_losses_and_gradients_are_those_of_a_cpu(self, rows, dtype, loss, direction):
        models = self.models(dtype)

        losses = [model(model.inputs_of(rows)).token_loss for model in models]
        for each in losses:
            each.backward()

        assert losses[1].item() == pytest.approx(losses[0].item(), rel=loss)
        for parts in ([m.encoder for m in models], models):
            here, there = map(gradients_of, parts)
            assert cosine(there, here) > direction

    def test_nothing_waits_for_the_gpu(self, rows):
        _, model = self.models(torch.bfloat16)
        model(model.inputs_of(rows)).token_loss.backward()

        with nobody_waits():
            inputs = model.inputs_of(rows)
            loss = model(inputs).token_loss
            loss.backward()

        assert isinstance(inputs, VisionInputs)
        assert len(inputs.grids) > 1
        assert loss.item() > 0

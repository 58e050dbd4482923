import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from omniload.base.errors import ConfigError
from omniload.batch.microbatch import CpSlice
from tests.support.trainer.moe_builders import (
    a_batch,
    a_microbatch,
    a_model,
    a_text,
    all_close,
    an_optimizer,
    rows_of,
)
from trainer_integration.config import SpikeGuardConfig
from trainer_integration.training import throughput
from trainer_integration.training.progress import TrainingProgress
from trainer_integration.training.step import train_step
from trainer_integration.training.throughput import PassTime


def trained(batches, *, seed=0):
    model = a_model(seed=seed)
    optimizer = an_optimizer(model, lr=1e-2)
    return model, [train_step(model, optimizer, batch) for batch in batches]


def figures(results):
    return [dataclasses.replace(result, seconds_compute=0.0, passes=()) for result in results]


def test_the_same_batches_give_the_same_results_to_the_last_bit():
    batches = [a_batch(step, [a_microbatch(rows_of(step))]) for step in range(3)]

    first, second = trained(batches), trained(batches)

    assert figures(first[1]) == figures(second[1])
    assert all(
        torch.equal(a, b)
        for a, b in zip(first[0].parameters(), second[0].parameters(), strict=True)
    )


@pytest.mark.parametrize("split", [[1, 3], [2, 2], [1, 1, 1, 1], [0, 4, 0]])
def test_training_does_not_depend_on_how_rows_are_dealt_to_microbatches(split):
    def microbatches_of(step):
        rows = rows_of(step)
        stops = np.cumsum(split)
        return [a_microbatch(rows[stop - n : stop]) for n, stop in zip(split, stops, strict=True)]

    whole = trained([a_batch(step, [a_microbatch(rows_of(step))]) for step in range(3)])
    parts = trained([a_batch(step, microbatches_of(step)) for step in range(3)])

    for a, b in zip(whole[1], parts[1], strict=True):
        assert b.figures.loss == pytest.approx(a.figures.loss, rel=1e-5)
        assert b.figures.balance_loss == pytest.approx(a.figures.balance_loss, rel=1e-5)
        assert b.figures.grad_norm == pytest.approx(a.figures.grad_norm, rel=1e-4)
        assert b.figures.tokens == a.figures.tokens
    assert all(
        all_close(a, b, 2e-4)
        for a, b in zip(whole[0].parameters(), parts[0].parameters(), strict=True)
    )


def test_the_gradients_of_two_ranks_add_up_to_that_of_one():
    """Ranks divide by the labels of the whole step, so the sum over ranks needs no mean."""
    rows = rows_of(0)
    whole = a_batch(0, [a_microbatch(rows)])
    sums = []
    for parts in ([rows], [rows[:1], rows[1:]]):
        total = 0
        for part in parts:
            model = a_model()
            optimizer = an_optimizer(model, clip_norm=1e9)
            batch = a_batch(0, [a_microbatch(part)], loss_tokens=whole.loss_tokens)
            train_step(model, optimizer, batch)
            total = total + optimizer.gradients
        sums.append(total)

    assert all_close(sums[1], sums[0], 1e-5)


def test_a_token_id_that_the_model_does_not_have_is_refused_with_it():
    model = a_model()
    largest = model.config.vocab_size
    part = a_microbatch(rows_of(0))
    part.tokens_RT[0, 0] = largest

    with pytest.raises(
        ConfigError, match=f"step 0 has token id {largest}, and the model {largest} embeddings"
    ):
        train_step(model, an_optimizer(model), a_batch(0, [part]))


def test_the_loss_is_the_mean_over_labels_not_over_microbatches():
    model = a_model()
    long, short = a_microbatch([rows_of(0)[2]]), a_microbatch([rows_of(0)[3]])
    losses = []
    for microbatches in ([long], [short], [long, short]):
        model = a_model()
        losses.append(train_step(model, an_optimizer(model), a_batch(0, microbatches)).figures.loss)

    assert losses[2] == pytest.approx((31 * losses[0] + 25 * losses[1]) / 56, rel=1e-6)


def test_each_microbatch_with_rows_is_timed_with_the_work_that_costs_go_by(monkeypatch):
    clock = iter(range(100))
    monkeypatch.setattr(throughput, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
    model = a_model()
    parts = [a_microbatch([[a_text(5), a_text(3)]]), a_microbatch([]), a_microbatch([[a_text(7)]])]

    result = train_step(model, an_optimizer(model), a_batch(0, parts))

    assert result.passes == (
        PassTime(tokens=8, squares=34, seconds=1),
        PassTime(tokens=7, squares=49, seconds=1),
    )


def test_a_rank_without_rows_changes_nothing_but_its_weight_decay():
    model = a_model()
    optimizer = an_optimizer(model, weight_decay=0.0)
    before = [p.detach().clone() for p in model.parameters()]

    result = train_step(model, optimizer, a_batch(0, [a_microbatch([]), a_microbatch([[]])]))

    assert result.passes == ()
    assert result.figures.loss == 0
    assert result.figures.tokens == 0
    assert result.figures.expert_imbalance == 0
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def test_loss_falls_and_figures_are_reported():
    text = a_text(32)
    model = a_model(init_std=0.05)
    optimizer = an_optimizer(model, lr=2e-2, steps=60)

    results = [
        train_step(model, optimizer, a_batch(step, [a_microbatch([[text]])])) for step in range(60)
    ]

    assert results[-1].figures.loss < results[0].figures.loss / 4
    assert results[5].step == 5
    assert results[5].figures.tokens == 32
    assert results[1].figures.lr == 2e-2
    assert 1 <= results[5].figures.expert_imbalance <= 4
    assert results[5].figures.grad_norm > 0
    assert results[5].seconds_compute > 0
    assert None not in dict(results[5].figures).values()


def test_the_weight_of_the_balance_loss_steers_the_router():
    def router_gradient(weight):
        model = a_model(balance_weight=weight)
        optimizer = an_optimizer(model, clip_norm=1e9)
        train_step(model, optimizer, a_batch(0, [a_microbatch(rows_of(0))]))
        return model.blocks[0].router.weight_ED.grad.clone()

    without, once, twice = (router_gradient(weight) for weight in (0.0, 0.5, 1.0))

    assert not all_close(without, once)
    assert all_close(twice - without, 2 * (once - without), 1e-4)


def test_a_slice_is_refused_where_nobody_shares_its_rows():
    empty = np.zeros((1, 0), np.int32)
    piece = CpSlice(
        tokens_RC=empty,
        labels_RC=empty,
        positions_RC=empty,
        indices_C=np.zeros(0, np.int64),
        cu_seqlens=np.zeros(1, np.int32),
        sources_D=np.zeros(0, np.int16),
        keys_K4=np.zeros((0, 4), np.int64),
    )
    model = a_model()
    batch = dataclasses.replace(a_batch(4, []), microbatches=(piece,))

    with pytest.raises(TypeError, match="a slice of its rows, and 1 sequence-parallel peers"):
        train_step(model, an_optimizer(model), batch)


def test_a_step_whose_gradient_leaps_leaves_the_model_as_it_was_and_the_next_trains_on():
    model = a_model()
    optimizer = an_optimizer(model)
    progress = TrainingProgress(SpikeGuardConfig(action="skip", window=10))
    batches = [a_batch(step, [a_microbatch(rows_of(step))]) for step in range(12)]
    for batch in batches[:10]:
        assert train_step(model, optimizer, batch, progress=progress).spike is None
    before = [p.detach().clone() for p in model.parameters()]

    # Losses are divided by one label in place of all.
    leaps = dataclasses.replace(batches[10], loss_tokens=1)
    result = train_step(model, optimizer, leaps, progress=progress)

    assert result.spike.norm == result.figures.grad_norm > 10 * result.spike.mean
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert train_step(model, optimizer, batches[11], progress=progress).spike is None
    assert not torch.equal(before[0], next(model.parameters()))
    tokens = sum(sum(map(len, row)) for step in range(12) for row in rows_of(step))
    assert progress.tokens == tokens


def test_a_schedule_of_tokens_goes_by_those_of_the_run():
    model = a_model()
    optimizer = an_optimizer(model, lr=1.0, total_tokens=10_000, warmup_tokens=1_000)
    progress = TrainingProgress(SpikeGuardConfig(), tokens=89)

    result = train_step(model, optimizer, a_batch(0, [a_microbatch(rows_of(0))]), progress=progress)

    assert progress.tokens == 89 + result.figures.tokens
    assert result.figures.lr == pytest.approx(progress.tokens / 1_000)

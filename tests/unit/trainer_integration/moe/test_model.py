import math

import numpy as np
import pytest
import torch
from torch.nn import functional

from omniload.batch.microbatch import IGNORE_LABEL
from tests.support.trainer.moe_builders import (
    a_microbatch,
    a_model,
    a_text,
    all_close,
    documents_of,
    rows_of,
)
from trainer_integration.moe import model as moe_model
from trainer_integration.moe.inputs import ModelInputs


def inputs_of(rows, length=32):
    return ModelInputs.of(a_microbatch(rows, length))


def test_padding_is_dropped_and_rows_keep_their_tokens():
    rows = [documents_of([3, 2], seed=1), documents_of([4], seed=2)]

    inputs = inputs_of(rows, length=8)

    assert inputs.num_tokens == 9
    assert inputs.tokens_N.tolist() == np.concatenate([*rows[0], *rows[1]]).tolist()
    assert inputs.rows_N.tolist() == [0] * 5 + [1] * 4
    assert inputs.positions_N.tolist() == [0, 1, 2, 0, 1, 0, 1, 2, 3]
    assert inputs.labels_in_rows_R().tolist() == [3.0, 3.0]


def test_documents_are_bounded_as_they_were_before_the_padding_went():
    inputs = inputs_of([documents_of([3, 2]), documents_of([4])], length=8)

    assert sum(count for count, _ in inputs.documents.groups) == 3
    assert inputs.documents.num_pairs >= 9 + 4 + 16


@pytest.mark.parametrize("num_rows", [0, 2])
def test_a_microbatch_of_nothing_but_padding_has_no_tokens(num_rows):
    inputs = inputs_of([[]] * num_rows)

    assert inputs.num_tokens == 0
    assert inputs.num_rows == num_rows


def test_a_model_without_opinions_loses_the_logarithm_of_the_vocabulary():
    inputs = inputs_of(rows_of(0))
    model = a_model(init_std=0.002)

    output = model(inputs)

    labels = int((inputs.labels_N != IGNORE_LABEL).sum())
    assert output.token_loss.item() / labels == pytest.approx(math.log(50), rel=1e-3)
    # Gates do nothing at the start, so the balance loss is near its value at even load.
    assert output.balance_loss.item() / labels == pytest.approx(1.0, abs=0.2)


@pytest.mark.parametrize("tied", [False, True])
def test_gradient_reaches_every_parameter(tied):
    model = a_model(tied_embeddings=tied)

    output = model(inputs_of(rows_of(0, num_rows=8)))
    (output.token_loss + output.balance_loss).backward()

    without = [n for n, p in model.named_parameters() if p.grad is None or not p.grad.any()]
    assert without == []


def test_equal_seeds_give_equal_weights_and_others_do_not():
    first, same, other = a_model(seed=1), a_model(seed=1), a_model(seed=2)

    assert all(
        torch.equal(a, b) for a, b in zip(first.parameters(), same.parameters(), strict=True)
    )
    assert not torch.equal(first.embedding_VD, other.embedding_VD)


def test_the_loss_is_that_of_the_logits():
    model, inputs = a_model(), inputs_of(rows_of(0))

    expected = torch.nn.functional.cross_entropy(
        model.logits(inputs), inputs.labels_N, ignore_index=IGNORE_LABEL, reduction="sum"
    )

    assert model(inputs).token_loss.item() == pytest.approx(expected.item(), rel=1e-6)


def test_every_token_is_computed_by_top_k_experts_in_every_layer():
    model, inputs = a_model(), inputs_of(rows_of(0))

    output = model(inputs)

    assert output.router.slots_LE.sum(1).tolist() == [2 * inputs.num_tokens] * 2


def test_loss_falls_on_a_text_that_can_be_learnt():
    model = a_model(init_std=0.05)
    inputs = inputs_of([[a_text(64)]], length=64)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(60):
        loss = model(inputs).token_loss / 63
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())

    assert losses[0] > 3.5
    assert losses[-1] < 0.5


def test_logits_of_a_document_do_not_depend_on_the_padding_of_its_row():
    model, document = a_model(), documents_of([9])

    tight, loose = inputs_of([document], length=9), inputs_of([document], length=32)

    assert all_close(model.logits(tight), model.logits(loose), 1e-6)


def summed_cross_entropy(x, weight, labels):
    labelled = torch.nonzero(labels != IGNORE_LABEL).squeeze(1)
    return moe_model.summed_cross_entropy(x, weight, labels, labelled)


@pytest.fixture
def case():
    torch.manual_seed(0)
    labels = torch.randint(0, 11, (13,))
    labels[[0, 5, 12]] = IGNORE_LABEL
    x = torch.randn(13, 6, requires_grad=True)
    weight = torch.randn(11, 6, requires_grad=True)
    return x, weight, labels


@pytest.fixture(params=[1, 25, 1 << 20], ids=["one_row", "two_rows", "all_rows"])
def chunk_logits(request, monkeypatch):
    monkeypatch.setitem(moe_model.CHUNK_LOGITS, "cpu", request.param)


@pytest.mark.usefixtures("chunk_logits")
def test_the_loss_and_its_gradients_are_those_of_all_logits_at_once(case):
    x, weight, labels = case
    x2, weight2 = x.detach().clone().requires_grad_(), weight.detach().clone().requires_grad_()

    loss = summed_cross_entropy(x, weight, labels)
    (loss / 7).backward()
    plain = functional.cross_entropy(x2 @ weight2.t(), labels, reduction="sum")
    (plain / 7).backward()

    assert loss.item() == pytest.approx(plain.item(), rel=1e-6)
    assert all_close(x.grad, x2.grad)
    assert all_close(weight.grad, weight2.grad)


def test_a_token_without_a_label_gets_no_gradient(case):
    x, weight, labels = case

    summed_cross_entropy(x, weight, labels).backward()

    assert x.grad[labels == IGNORE_LABEL].eq(0).all()


def test_nothing_to_predict_costs_nothing(case):
    x, weight, labels = case

    loss = summed_cross_entropy(x, weight, torch.full_like(labels, IGNORE_LABEL))
    loss.backward()

    assert loss.item() == 0
    assert weight.grad.eq(0).all()


def test_large_logits_do_not_overflow():
    x, weight = torch.tensor([[1e4]]), torch.tensor([[1.0], [-1.0]])

    assert summed_cross_entropy(x, weight, torch.tensor([0])).item() == 0
    assert summed_cross_entropy(x, weight, torch.tensor([1])).item() == pytest.approx(2e4)


def test_without_gradients_the_same_loss_comes_out(case):
    x, weight, labels = case

    with torch.no_grad():
        quiet = summed_cross_entropy(x, weight, labels)

    assert quiet.item() == summed_cross_entropy(x, weight, labels).item()
    assert not quiet.requires_grad

import pytest
import torch
from torch.nn import functional

from omniload.batch.microbatch import IGNORE_LABEL
from tests.support.trainer.moe_builders import all_close
from trainer_integration.moe import head


def summed_cross_entropy(x, weight, labels):
    labelled = torch.nonzero(labels != IGNORE_LABEL).squeeze(1)
    return head.summed_cross_entropy(x, weight, labels, labelled)


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
    monkeypatch.setattr(head, "CHUNK_LOGITS", request.param)


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

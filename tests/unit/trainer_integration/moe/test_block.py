import dataclasses
import math

import numpy as np
import pytest
import torch
from torch.nn import functional

from tests.support.trainer.moe_builders import a_config, a_microbatch, all_close, documents_of
from trainer_integration.moe.block import Attention, Experts, attend, grouped_gemm
from trainer_integration.moe.documents import DocumentGroups
from trainer_integration.moe.inputs import ModelInputs
from trainer_integration.moe.parallel.ep_transport import Local, RowMap, combine, dispatch
from trainer_integration.moe.rope import Rotation


def naive_attend(qkv_NXC, lengths, num_heads):
    """The plain model: one document, one head and one query at a time."""
    num_kv = (qkv_NXC.shape[1] - num_heads) // 2
    outputs, start = torch.zeros(len(qkv_NXC), num_heads, qkv_NXC.shape[2]), 0
    for length in lengths:
        for head in range(num_heads):
            kv = head // (num_heads // num_kv)
            for i in range(start, start + length):
                keys = qkv_NXC[start : i + 1, num_heads + kv]
                values = qkv_NXC[start : i + 1, num_heads + num_kv + kv]
                scores = keys @ qkv_NXC[i, head] / math.sqrt(qkv_NXC.shape[2])
                outputs[i, head] = scores.softmax(0) @ values
        start += length
    return outputs


def inputs_of(lengths):
    return ModelInputs.of(a_microbatch([documents_of(lengths)], sum(lengths)))


def groups_of(lengths):
    return DocumentGroups.of(np.concatenate(([0], np.cumsum(lengths))).astype(np.int32))


@pytest.mark.parametrize("lengths", [[9], [1], [4, 4, 4], [3, 11, 1, 5, 70], [70, 2, 90]])
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(4, 4), (4, 2), (4, 1)])
def test_attention_is_that_of_each_document_alone(lengths, num_heads, num_kv_heads):
    torch.manual_seed(0)
    qkv = torch.randn(sum(lengths), num_heads + 2 * num_kv_heads, 8)

    attended = attend(qkv, groups_of(lengths), num_heads)

    assert all_close(attended, naive_attend(qkv, lengths, num_heads), 1e-5)


def test_gradients_are_those_of_each_document_alone():
    torch.manual_seed(0)
    lengths = [3, 11, 1, 5]
    qkv = torch.randn(20, 8, 8, requires_grad=True)
    plain = qkv.detach().clone().requires_grad_()
    weight = torch.randn(20, 4, 8)

    attend(qkv, groups_of(lengths), 4).backward(weight)
    naive_attend(plain, lengths, 4).backward(weight)

    assert all_close(qkv.grad, plain.grad, 1e-4)


def test_no_tokens_attend_to_nothing():
    qkv = torch.randn(0, 8, 8)

    assert attend(qkv, groups_of([]), 4).shape == (0, 4, 8)


def test_a_token_sees_what_came_before_and_nothing_after():
    torch.manual_seed(0)
    attention = Attention(a_config())
    x = torch.randn(10, 16)
    rotation, inputs = Rotation.at(torch.arange(10), 4, 10_000.0), inputs_of([10])
    changed = x.clone()
    changed[6] += 1

    before, after = attention(x, rotation, inputs), attention(changed, rotation, inputs)

    assert torch.equal(before[:6], after[:6])
    assert not all_close(before[6:], after[6:])


def test_values_are_not_turned_by_position():
    torch.manual_seed(0)
    attention = Attention(a_config())
    x = torch.randn(1, 16)

    near = attention(x, Rotation.at(torch.tensor([0]), 4, 10_000.0), inputs_of([1]))
    far = attention(x, Rotation.at(torch.tensor([77]), 4, 10_000.0), inputs_of([1]))

    # A document of one token attends to its own value only, wherever it stands.
    assert all_close(near, far)


CHOICES = torch.tensor([[2, 0], [0, 3], [2, 3], [3, 2], [0, 2]])


def experts_with_weights(seed=0):
    torch.manual_seed(seed)
    experts = Experts(a_config())
    with torch.no_grad():
        for parameter in experts.parameters():
            parameter.normal_(0.0, 0.3)
    return experts


def dense(experts, x_ND, gates_NK, choices_NK):
    """The plain model: one token and one expert at a time."""
    outputs = []
    for x_D, gates_K, choices_K in zip(x_ND, gates_NK, choices_NK, strict=True):
        total = torch.zeros_like(x_D)
        for gate, e in zip(gates_K, choices_K.tolist(), strict=True):
            fc1, fc3 = experts.fc13_EXD[e].chunk(2)
            total = total + gate * (experts.fc2_EDF[e] @ (functional.silu(fc1 @ x_D) * (fc3 @ x_D)))
        outputs.append(total)
    return torch.stack(outputs)


def test_slots_are_sorted_by_expert_and_within_it_by_token():
    row_map = RowMap.of(CHOICES, 4)

    assert row_map.ends_E.tolist() == [3, 3, 7, 10]
    assert row_map.tokens_of_slots_S.tolist() == [0, 1, 4, 0, 2, 3, 4, 1, 2, 3]
    assert row_map.slots_of_tokens_NK[0].tolist() == [3, 0]


def test_every_slot_serves_the_choice_that_points_at_it():
    row_map = RowMap.of(CHOICES, 4)

    assert row_map.slots_of_tokens_NK.reshape(-1)[row_map.choices_of_slots_S].tolist() == list(
        range(10)
    )


def test_dispatch_then_combine_counts_each_token_once_per_expert():
    row_map = RowMap.of(CHOICES, 4)
    x = torch.randn(5, 3)

    assert all_close(combine(dispatch(x, row_map), row_map), 2 * x)


@pytest.mark.parametrize("way", [dispatch, combine])
def test_moving_rows_has_the_right_gradient(way):
    row_map = RowMap.of(CHOICES, 4)
    num_rows = 5 if way is dispatch else 10
    x = torch.randn(num_rows, 2, dtype=torch.float64, requires_grad=True)

    assert torch.autograd.gradcheck(lambda rows: way(rows, row_map), (x,))


def test_a_grouped_product_has_the_right_gradient_also_where_an_expert_is_idle():
    ends = torch.tensor([2, 2, 5], dtype=torch.int32)
    x = torch.randn(5, 4, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(3, 6, 4, dtype=torch.float64, requires_grad=True)

    assert torch.autograd.gradcheck(lambda a, b: grouped_gemm(a, b, ends), (x, weight))


def test_an_idle_expert_gets_a_gradient_of_zero():
    weight = torch.randn(2, 3, 4, requires_grad=True)

    ends = torch.tensor([0, 5], dtype=torch.int32)

    grouped_gemm(torch.randn(5, 4), weight, ends).square().sum().backward()

    assert weight.grad[0].eq(0).all()
    assert weight.grad[1].ne(0).any()


def test_experts_agree_with_one_token_at_a_time():
    experts = experts_with_weights()
    x, gates = torch.randn(5, 16), torch.rand(5, 2)

    found = experts(x, gates, CHOICES, Local(4, drops=False))

    assert all_close(found, dense(experts, x, gates, CHOICES))


def test_gradients_agree_with_one_token_at_a_time():
    experts, plain = experts_with_weights(), experts_with_weights()
    x, gates = torch.randn(5, 16, requires_grad=True), torch.rand(5, 2, requires_grad=True)
    x2, gates2 = x.detach().clone().requires_grad_(), gates.detach().clone().requires_grad_()
    weight = torch.randn(5, 16)

    experts(x, gates, CHOICES, Local(4, drops=False)).backward(weight)
    dense(plain, x2, gates2, CHOICES).backward(weight)

    assert all_close(x.grad, x2.grad, 1e-4)
    assert all_close(gates.grad, gates2.grad, 1e-4)
    assert all_close(experts.fc13_EXD.grad, plain.fc13_EXD.grad, 1e-4)
    assert all_close(experts.fc2_EDF.grad, plain.fc2_EDF.grad, 1e-4)


def test_no_tokens_pass_through_no_expert():
    experts = experts_with_weights()

    found = experts(
        torch.randn(0, 16),
        torch.rand(0, 2),
        torch.empty(0, 2, dtype=torch.int64),
        Local(4, drops=False),
    )

    assert found.shape == (0, 16)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_rows_beyond_the_last_expert_reach_nothing(dtype):
    """What a dropped choice leaves behind may be no number; it must not spread."""
    experts = experts_with_weights().to(dtype)
    x = torch.randn(5, 16, dtype=dtype, requires_grad=True)
    gates = torch.rand(5, 2, dtype=dtype, requires_grad=True)
    dropped = CHOICES.clone()
    dropped[3] = 4
    transport = PoisonedLocal(4, drops=True)

    found = experts(x, gates, dropped, transport)
    found.backward(torch.randn(5, 16, dtype=dtype))

    assert found[3].eq(0).all()
    assert x.grad[3].eq(0).all()
    assert gates.grad[3].eq(0).all()
    assert all(t.isfinite().all() for t in (found, x.grad, gates.grad, experts.fc13_EXD.grad))


class PoisonedLocal(Local):
    """Leaves no number in the rows of no expert, there and back."""

    def there(self, x_ND, gates_NK, experts_NK):
        slots = super().there(x_ND, gates_NK, experts_NK)
        return dataclasses.replace(slots, rows_SD=Poison.apply(slots.rows_SD, slots.ends_E))

    def back(self, rows_SD):
        return super().back(Poison.apply(rows_SD, self._row_map.ends_E))


class Poison(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows, ends):
        ctx.save_for_backward(ends)
        return poisoned(rows, ends)

    @staticmethod
    def backward(ctx, grad):
        return poisoned(grad, ctx.saved_tensors[0]), None


def poisoned(rows, ends):
    rows = rows.clone()
    rows[ends[-1] :] = math.nan
    return rows

import math

import numpy as np
import pytest
import torch

from tests.support.trainer.moe_builders import a_config, a_microbatch, all_close, documents_of
from trainer_integration.moe.block import Attention, attend
from trainer_integration.moe.documents import DocumentGroups
from trainer_integration.moe.inputs import ModelInputs
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

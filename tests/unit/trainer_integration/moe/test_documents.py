import numpy as np
import pytest
import torch

from trainer_integration.moe.documents import CALL_PAIRS, DocumentGroups, group_lengths


def bounds(lengths):
    return np.concatenate(([0], np.cumsum(lengths))).astype(np.int32)


def test_equal_lengths_share_one_call():
    assert group_lengths([8] * 100) == [(100, 8)]


def test_a_long_document_does_not_pad_a_short_one():
    assert group_lengths([1000, 10]) == [(1, 1000), (1, 10)]


def test_short_documents_of_mixed_lengths_share_calls():
    assert group_lengths([16, 12, 9, 8, 3, 1]) == [(6, 16)]


def test_no_documents_make_no_groups():
    assert group_lengths([]) == []
    assert DocumentGroups.of(np.array([0], np.int32)).groups == ()


def test_groups_end_where_padding_costs_more_than_a_call():
    waste = 100 * 100 - 90 * 90

    assert group_lengths([100, 90, 90], call_pairs=2 * waste) == [(3, 100)]
    assert group_lengths([100, 90, 90], call_pairs=2 * waste - 1) == [(2, 100), (1, 90)]


def test_one_document_and_documents_in_falling_order_of_equal_length_are_not_moved():
    assert DocumentGroups.of(bounds([7])).tokens_of_places_P is None
    assert DocumentGroups.of(bounds([8, 8, 8])).tokens_of_places_P is None


def test_padding_and_back_is_the_identity_with_the_gradient_of_one():
    documents = DocumentGroups.of(bounds([3, 1, 200, 5, 3]))
    x = torch.randn(212, 4, requires_grad=True)

    back = documents.unpad(documents.pad(x))
    back.backward(weight := torch.randn(212, 4))

    assert torch.equal(back, x)
    assert torch.equal(x.grad, weight)


def test_documents_are_whole_and_contiguous_in_their_places():
    documents = DocumentGroups.of(bounds([2, 4, 3]))

    places = documents.pad(torch.arange(9.0).unsqueeze(1)).squeeze(1).view(3, 4)

    assert documents.groups == ((3, 4),)
    assert places[0].tolist() == [2, 3, 4, 5]
    assert places[1, :3].tolist() == [6, 7, 8]
    assert places[2, :2].tolist() == [0, 1]


def test_empty_documents_take_no_place():
    documents = DocumentGroups.of(np.array([0, 3, 3, 5], np.int32))

    assert documents.groups == ((2, 3),)


@pytest.mark.parametrize("longest", [4, 64, 500])
def test_pairs_are_those_of_the_documents_and_at_most_one_call_a_group(longest):
    lengths = np.random.default_rng(longest).integers(1, longest + 1, 60)

    documents = DocumentGroups.of(bounds(lengths))

    least = int((lengths**2).sum())
    assert least <= documents.num_pairs <= least + CALL_PAIRS * len(documents.groups)

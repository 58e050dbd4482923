"""Documents do not affect each other, and the place of a row changes nothing."""

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.support.examples import few
from tests.support.trainer.moe_builders import a_microbatch, a_model, all_close, documents_of
from trainer_integration.moe.documents import CALL_PAIRS, DocumentGroups, group_lengths
from trainer_integration.moe.inputs import ModelInputs
from trainer_integration.moe.parallel.ep_transport import RowMap

MODEL = a_model()
# Derandomised, because rounding depends on the shapes of the products. Once in many thousand tokens, rounding would
# decide between two equally likely experts.

row_lengths = st.lists(st.integers(1, 20), min_size=1, max_size=6).filter(lambda x: sum(x) <= 64)
lengths_by_row = st.lists(row_lengths, min_size=1, max_size=4)


def rows_from(lengths):
    return [documents_of(row, seed=17 * r) for r, row in enumerate(lengths)]


def logits_by_document(rows):
    with torch.no_grad():
        logits = MODEL.logits(ModelInputs.of(a_microbatch(rows, 64)))
    return torch.split(logits, [len(document) for row in rows for document in row])


@few(16, soak=400)
@given(lengths_by_row, st.data())
def test_changing_one_document_never_changes_the_logits_of_another(lengths, data):
    rows = rows_from(lengths)
    before = logits_by_document(rows)
    flat = [(r, d) for r, row in enumerate(rows) for d in range(len(row))]
    target = data.draw(st.integers(0, len(flat) - 1))
    r, d = flat[target]
    rows[r][d] = (rows[r][d] + 1) % 50

    after = logits_by_document(rows)

    for i, (old, new) in enumerate(zip(before, after, strict=True)):
        assert all_close(old, new, 1e-5) == (i != target)


@few(16, soak=400)
@given(lengths_by_row, st.randoms(use_true_random=False))
def test_permuting_rows_permutes_the_outputs(lengths, random):
    rows = rows_from(lengths)
    order = random.sample(range(len(rows)), len(rows))
    starts = np.concatenate(([0], np.cumsum([len(row) for row in rows])))

    plain = logits_by_document(rows)
    moved = logits_by_document([rows[r] for r in order])

    expected = [plain[i] for r in order for i in range(starts[r], starts[r + 1])]
    assert all(all_close(a, b, 1e-5) for a, b in zip(moved, expected, strict=True))


@few(16, soak=300)
@given(lengths_by_row)
def test_packing_documents_changes_none_of_their_logits(lengths):
    rows = rows_from(lengths)

    packed = logits_by_document(rows)
    alone = [logits_by_document([[document]])[0] for row in rows for document in row]

    assert all(all_close(a, b, 1e-5) for a, b in zip(packed, alone, strict=True))


@given(st.lists(st.integers(1, 2000), max_size=200))
def test_groups_hold_every_document_and_waste_at_most_a_call_each(lengths):
    lengths = sorted(lengths, reverse=True)

    groups = group_lengths(lengths)

    assert sum(count for count, _ in groups) == len(lengths)
    start = 0
    for count, longest in groups:
        members = lengths[start : start + count]
        assert longest == members[0]
        assert sum(longest**2 - length**2 for length in members) <= CALL_PAIRS
        start += count


@given(st.lists(st.integers(0, 30), min_size=1, max_size=40))
def test_every_token_has_one_place_and_padding_comes_after_its_document(lengths):
    documents = DocumentGroups.of(np.concatenate(([0], np.cumsum(lengths))))
    num_tokens = sum(lengths)

    placed = documents.pad(torch.arange(num_tokens)) if num_tokens else torch.empty(0)

    assert len(placed) == sum(count * longest for count, longest in documents.groups)
    assert set(placed.tolist()) == set(range(num_tokens))


@given(st.integers(1, 3), st.integers(3, 9), st.integers(0, 40), st.integers(0, 1000))
def test_slots_are_a_permutation_sorted_by_expert(top_k, num_experts, num_tokens, seed):
    generator = torch.Generator().manual_seed(seed)
    choices = torch.rand(num_tokens, num_experts, generator=generator).topk(top_k).indices

    row_map = RowMap.of(choices, num_experts)

    sorted_experts = choices.reshape(-1)[row_map.choices_of_slots_S]
    assert sorted_experts.tolist() == sorted(choices.reshape(-1).tolist())
    assert sorted(row_map.slots_of_tokens_NK.reshape(-1).tolist()) == list(
        range(top_k * num_tokens)
    )
    assert row_map.ends_E[-1] == top_k * num_tokens

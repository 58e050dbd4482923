"""The order that torch draws is worked out without it, from the state of its generator."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from omniload.base.errors import StateError
from omniload.importing.torchdata import first_of_permutation


@given(
    st.integers(0, 1 << 40),
    st.integers(0, 1300),
    st.integers(1, 1500),
    st.floats(0, 1),
)
def test_a_permutation_is_that_of_torch_wherever_its_generator_stands(seed, before, total, part):
    generator = torch.Generator().manual_seed(seed)
    torch.randint(1 << 30, (before,), generator=generator)
    state = generator.get_state().tolist()

    found = first_of_permutation(total, int(part * total), state)

    due = torch.randperm(total, generator=generator)[: int(part * total)]
    assert found.tolist() == due.tolist()


def test_more_records_than_torch_permutes_in_this_way_are_refused():
    state = torch.Generator().get_state().tolist()

    with pytest.raises(StateError, match="has 214748364 records, and the order of 214748364 or"):
        first_of_permutation(((1 << 32) - 1) // 20, 1, state)

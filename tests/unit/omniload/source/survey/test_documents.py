"""A histogram of lengths against the lengths themselves."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from omniload.source.survey.documents import LengthHistogram, trained_on

lengths = st.lists(st.one_of(st.integers(0, 40), st.integers(0, 2**31 - 1)), max_size=50)


@given(lengths, lengths, st.floats(0.01, 1))
def test_a_quantile_is_at_most_a_twentieth_above_the_true_one(some, more, part):
    histogram = LengthHistogram()

    histogram.add(np.asarray(some, np.int64))
    histogram.add(np.asarray(more, np.int64))

    given = sorted(length for length in some + more if length)
    assert (histogram.documents, histogram.tokens) == (len(given), sum(given))
    assert histogram.empty == len(some + more) - len(given)
    assert histogram.longest == max(given, default=0)
    if given:
        true = given[max(0, int(np.ceil(part * len(given))) - 1)]
        assert true <= histogram.quantile(part) <= true * 1.05
    doublings = [length.bit_length() - 1 for length in given]
    assert histogram.by_doubling() == [
        doublings.count(i) for i in range(histogram.longest.bit_length())
    ]


@pytest.mark.parametrize(
    ("overlong", "left"), [("split", [3, 9]), ("truncate", [3, 4]), ("drop", [3, 0])]
)
def test_what_is_trained_on_of_a_long_document_is_up_to_the_policy(overlong, left):
    assert trained_on(np.asarray([3, 9]), 4, overlong).tolist() == left

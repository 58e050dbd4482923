"""Units of a shard, against a loop over its records."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from omniload.source.parsing.cutting import cuts


@given(sizes=st.lists(st.integers(0, 9), max_size=14), unit=st.integers(1, 20))
def test_a_unit_ends_with_the_record_that_fills_it(sizes, unit):
    ends = np.cumsum(sizes, dtype=np.int64)
    expected, start = [0], 0
    for record, end in enumerate(ends.tolist(), start=1):
        if end - start >= unit or record == len(ends):
            expected.append(record)
            start = end

    assert cuts(ends, unit).tolist() == expected

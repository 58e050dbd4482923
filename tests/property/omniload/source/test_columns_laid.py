"""Columns laid end to end as they come equal a concatenation of all, although each is freed before the end."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from omniload.base.ragged import Ragged
from omniload.source import columns
from omniload.source.columns import Layer

parts = st.lists(st.lists(st.lists(st.integers(0, 250), max_size=9), max_size=6), min_size=1)


@given(parts, st.sampled_from([np.int32, np.bool_, np.float32]), st.integers(0, 100))
def test_what_is_laid_is_what_came_whatever_was_expected(parts, dtype, expected):
    patched = pytest.MonkeyPatch()
    patched.setattr(columns, "_LEAST_ROOM", 1)
    laying = Layer(expected, np.dtype(dtype))

    for part in parts:
        column = Ragged.of([np.array(each, dtype) for each in part], dtype)
        laying.lay(column)
        column.values_V[:] = 0  # its memory now belongs to another column
    laid = laying.finish()
    patched.undo()

    assert laid.values_V.dtype == dtype
    assert [laid[i].tolist() for i in range(len(laid))] == [
        np.array(each, dtype).tolist() for part in parts for each in part
    ]

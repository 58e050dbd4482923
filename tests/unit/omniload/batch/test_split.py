"""Rows that are built together and cut into microbatches, against microbatches built alone."""

from dataclasses import fields

import numpy as np
import pytest

from omniload.batch.digest import combined, microbatch_digest
from omniload.batch.microbatch import Microbatch
from omniload.batch.rows import split_rows
from tests.support.plane.builders import a_microbatch

LENGTH = 8
ROWS = (
    ((0, 3, 0, 0, 5, 5), (1, 0, 0, 0, 3, 3)),  # full
    ((1, 1, 0, 0, 4, 9),),  # goes on elsewhere; padded
    (),
    ((1, 1, 0, 4, 9, 9), (0, 4, 0, 0, 1, 1), (0, 5, 0, 0, 1, 1)),
)
OFFSETS = np.cumsum([0, *map(len, ROWS)])


def assert_equal(found, expected):
    for field in fields(Microbatch):
        if field.name in ("columns_K", "encoding"):
            continue
        found_array, expected_array = getattr(found, field.name), getattr(expected, field.name)
        np.testing.assert_array_equal(found_array, expected_array, err_msg=field.name)
        assert found_array.dtype == expected_array.dtype, field.name
    for name in expected.columns_K.keys() | found.columns_K.keys():
        for array in ("values_V", "offsets"):
            np.testing.assert_array_equal(
                getattr(found.columns_K[name], array), getattr(expected.columns_K[name], array)
            )


@pytest.mark.parametrize("counts", [[4], [1, 3], [2, 2], [1, 1, 1, 1], [0, 4], [3, 0, 1]])
def test_rows_built_together_are_those_built_apart(counts):
    together = a_microbatch(ROWS, length=LENGTH, scored=True)
    cuts = np.cumsum([0, *counts])

    split = split_rows(together, counts, OFFSETS)

    assert len(split) == len(counts)
    for microbatch, a, b in zip(split, cuts, cuts[1:], strict=False):
        assert_equal(microbatch, a_microbatch(ROWS[a:b], length=LENGTH, scored=True))


def test_digests_of_the_parts_add_up_to_that_of_the_whole():
    together = a_microbatch(ROWS, length=LENGTH, scored=True)

    split = split_rows(together, [1, 2, 1], OFFSETS)

    assert combined(map(microbatch_digest, split)) == microbatch_digest(together)


def test_parts_are_not_copied():
    together = a_microbatch(ROWS, length=LENGTH, scored=True)

    first, _ = split_rows(together, [2, 2], OFFSETS)

    assert np.shares_memory(first.tokens_RT, together.tokens_RT)

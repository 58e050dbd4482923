"""Rows that are built together and cut into microbatches, against microbatches built alone."""

from dataclasses import fields, replace

import numpy as np
import pytest

from omniload.batch.digest import combined, microbatch_digest
from omniload.batch.microbatch import Microbatch
from omniload.batch.rows import split_rows
from tests.support.plane.builders import a_microbatch

LENGTH = 8
ROWS = (
    ((0, 3, 0, 0, 5, 5), (1, 0, 0, 0, 3, 3)),  # full
    ((1, 1, 0, 0, 4, 9),),  # continues elsewhere; padded
    (),
    ((1, 1, 0, 4, 9, 9), (0, 4, 0, 0, 1, 1), (0, 5, 0, 0, 1, 1)),
)
OFFSETS = np.cumsum([0, *map(len, ROWS)])


def assert_equal(found, expected):
    made = ("labels_RT", "positions_RT", "source_ids_RT")
    for name in (*(field.name for field in fields(Microbatch)), *made):
        if name in ("columns_K", "encoding"):
            continue
        np.testing.assert_array_equal(
            getattr(found, name), getattr(expected, name), err_msg=name, strict=True
        )
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


def test_parts_keep_which_labels_are_trained_on():
    trained_RT = np.arange(4 * LENGTH).reshape(4, LENGTH) % 3 > 0
    together = replace(a_microbatch(ROWS, length=LENGTH), trained_RT=trained_RT)

    split = split_rows(together, [1, 2, 1], OFFSETS)

    labels = np.concatenate([part.labels_RT for part in split])
    np.testing.assert_array_equal(labels, together.labels_RT)


def test_digests_of_the_parts_add_up_to_that_of_the_whole():
    together = a_microbatch(ROWS, length=LENGTH, scored=True)

    split = split_rows(together, [1, 2, 1], OFFSETS)

    assert combined(map(microbatch_digest, split)) == microbatch_digest(together)


def test_parts_are_not_copied():
    together = a_microbatch(ROWS, length=LENGTH, scored=True)

    first, _ = split_rows(together, [2, 2], OFFSETS)

    assert np.shares_memory(first.tokens_RT, together.tokens_RT)

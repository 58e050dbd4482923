"""Losses by document, against adding them up one by one."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from omniload.base.errors import ConfigError
from omniload.batch.document_losses import losses_by_document
from omniload.batch.microbatch import IGNORE_LABEL
from tests.support.plane.builders import a_microbatch


def rows_of(lengths):
    """Return rows of documents of these lengths; some are pieces of longer ones."""
    return a_microbatch(
        [
            [[0, 10 * r + i, 0, 0, length, length + i % 2] for i, length in enumerate(row)]
            for r, row in enumerate(lengths)
        ],
        length=8,
    )


@given(
    st.lists(
        st.lists(st.integers(1, 6), min_size=1, max_size=3).filter(lambda row: sum(row) <= 8),
        min_size=1,
        max_size=4,
    ),
    st.integers(0, 1 << 30),
)
def test_losses_are_those_of_the_labels_of_each_document(rows, seed):
    microbatch = rows_of(rows)
    rng = np.random.default_rng(seed)
    losses = rng.random(microbatch.labels_RT.shape).astype(np.float32)
    losses[microbatch.labels_RT == IGNORE_LABEL] = np.nan

    found = losses_by_document(microbatch, microbatch.labels_RT, losses)

    flat, labels = losses.reshape(-1), microbatch.labels_RT.reshape(-1)
    sources = microbatch.source_ids_RT.reshape(-1)
    due = []
    for begin, end in pairwise(microbatch.cu_seqlens.tolist()):
        if sources[begin] >= 0:
            here = [float(flat[i]) for i in range(begin, end) if labels[i] != IGNORE_LABEL]
            due.append((sum(here), len(here)))
    assert len(found.keys_K4) == len(due)
    assert found.sums_K.tolist() == pytest.approx([total for total, _ in due])
    assert found.labels_K.tolist() == [count for _, count in due]


@pytest.mark.parametrize("shape", [(3,), (8, 2), (1, 16), (2, 8, 1), (16, 1)])
def test_losses_of_another_shape_are_refused(shape):
    microbatch = rows_of([[3], [5]])

    with pytest.raises(ConfigError, match=r"have shape \[.*one loss for each label"):
        losses_by_document(microbatch, microbatch.labels_RT, np.zeros(shape))


def test_losses_of_all_rows_end_to_end_are_those_of_the_rows():
    microbatch = rows_of([[3, 2], [5]])
    losses = np.arange(16.0).reshape(2, 8)

    flat, rows = (
        losses_by_document(microbatch, microbatch.labels_RT, given).sums_K.tolist()
        for given in (losses.reshape(-1), losses)
    )

    assert flat == rows

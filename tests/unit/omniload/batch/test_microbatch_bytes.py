"""A batch as bytes: it comes back as it was sent, and other bytes are refused."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from omniload.base.errors import IntegrityError
from omniload.base.ragged import Ragged
from omniload.batch.microbatch import Batch, CpSlice
from omniload.batch.slices import slice_for_cp
from omniload.batch.wire import from_bytes, to_bytes
from omniload.mix.columns import name_inside
from tests.support.plane.builders import a_microbatch


def some_rows():
    """Two rows of 8: one full, one of two pieces and padding."""
    pieces = [[(0, 0, 0, 0, 8, 8)], [(1, 4, 0, 0, 3, 3), (0, 1, 0, 2, 4, 6)]]
    own = [name_inside("weight", "float64", 1.0), name_inside("kept", "bool", None)]
    return a_microbatch(pieces, length=8, own=own)


def a_batch(*microbatches):
    return Batch(
        step=5,
        microbatches=microbatches or (some_rows(),),
        loss_tokens=7,
        imbalance=1.25,
        bound=1.0,
        tokens_by_source={"web": 8, "Ünï": 0},
    )


def assert_equal(found, sent):
    assert type(found) is type(sent)
    for name in sent.__dataclass_fields__:
        mine, theirs = getattr(found, name), getattr(sent, name)
        if name == "columns_K":
            assert {key: column.lengths_N.tolist() for key, column in mine.items()} == {
                key: column.lengths_N.tolist() for key, column in theirs.items()
            }
            for key, column in theirs.items():
                np.testing.assert_array_equal(mine[key].values_V, column.values_V, strict=True)
        elif name in {"aligned_RT", "aligned_RC"}:
            assert mine.keys() == theirs.keys()
            for key, values in theirs.items():
                np.testing.assert_array_equal(mine[key], values, strict=True)
        elif name == "microbatches":
            for one, other in zip(mine, theirs, strict=True):
                assert_equal(one, other)
        elif isinstance(theirs, np.ndarray):
            np.testing.assert_array_equal(mine, theirs, strict=True)
        else:
            assert mine == theirs


def with_scores(lengths):
    column = Ragged.of([np.arange(n, dtype=np.float32) for n in lengths], np.float32)
    return replace(some_rows(), columns_K={"scores": column})


@given(st.lists(st.integers(0, 5), max_size=4))
def test_a_batch_comes_back_with_its_columns(lengths):
    sent = a_batch(some_rows(), with_scores(lengths))

    assert_equal(from_bytes(to_bytes(sent)), sent)


def test_which_labels_are_trained_on_comes_back():
    masked = replace(some_rows(), trained_RT=np.arange(16).reshape(2, 8) % 3 > 0)

    found = from_bytes(to_bytes(a_batch(masked)))

    assert_equal(found, a_batch(masked))
    np.testing.assert_array_equal(found.microbatches[0].labels_RT, masked.labels_RT)


def test_slices_of_cp_peers_and_a_batch_without_microbatches_come_back():
    half = slice_for_cp(some_rows(), 1, 2)
    assert isinstance(half, CpSlice)
    empty = replace(a_batch(), microbatches=())

    assert_equal(from_bytes(to_bytes(a_batch(half))), a_batch(half))
    assert_equal(from_bytes(to_bytes(empty)), empty)


def test_arrays_that_are_not_contiguous_come_back():
    reversed_rows = replace(some_rows(), tokens_RT=some_rows().tokens_RT[:, ::-1])

    assert_equal(from_bytes(to_bytes(a_batch(reversed_rows))), a_batch(reversed_rows))


def test_what_is_read_lies_in_the_bytes():
    data = to_bytes(a_batch())

    assert np.shares_memory(from_bytes(data).microbatches[0].tokens_RT, data)


@pytest.mark.parametrize(
    "damage", ["cut", "longer", "object", "release", "list", "noise", "nothing"]
)
def test_bytes_that_are_no_batch_are_refused(damage):
    data = to_bytes(a_batch())
    text = data.tobytes()
    broken = {
        "cut": text[:-1],
        "longer": text + b"\0",
        "object": text.replace(b'"<i4"', b'"|O8"', 1),
        "release": text.replace(b'"version": 7', b'"version": 9', 1),
        "list": text.replace(b'"names": []', b'"names": 77', 1),
        "noise": bytes(range(200)),
        "nothing": b"",
    }[damage]

    with pytest.raises(IntegrityError, match=r"version 9|no whole batch"):
        from_bytes(np.frombuffer(broken, np.uint8))

"""Heads of arrays, and arrays of one number, as numpy writes them."""

import io
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as of_numpy

from omniload.base.errors import IntegrityError
from omniload.source.parsing.arrays.npy import npy_array, number_of_npy
from tests.support.examples import few


def saved(array, **options):
    out = io.BytesIO()
    np.save(out, array, **options)
    return out.getvalue()


@few(100, soak=2000)
@given(
    of_numpy.arrays(
        of_numpy.integer_dtypes() | of_numpy.floating_dtypes() | of_numpy.boolean_dtypes(),
        of_numpy.array_shapes(min_dims=0, min_side=0),
    )
)
def test_a_head_says_what_numpy_reads(array):
    data = saved(array)

    found = npy_array("a.npy", data[:200])

    assert (found.dtype, found.shape, found.count) == (array.dtype, array.shape, array.size)
    assert len(data) - found.start == array.nbytes
    assert found.holds_numbers


def test_heads_are_parsed_by_one_thread_at_a_time(monkeypatch):
    """Threads that meet in Python's parser of literals ended an opening, once in some thousand."""
    parse, both, met = np.lib.format.read_array_header_1_0, threading.Barrier(2, timeout=0.2), []

    def meeting(*args, **options):
        with suppress(threading.BrokenBarrierError):
            both.wait()
            met.append(True)
        return parse(*args, **options)

    monkeypatch.setattr(np.lib.format, "read_array_header_1_0", meeting)
    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(lambda n: npy_array("a", saved(np.arange(n))).count, (3, 5)))

    assert (found, met) == ([3, 5], [])


@few(50, soak=1000)
@given(st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False))
def test_one_number_is_read_however_it_is_shaped(number):
    for shape in ((), (1,), (1, 1)):
        assert number_of_npy("a", saved(np.array(number).reshape(shape))) == number


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (saved(np.array([1, 2])), r"is an array of int64 of the shape \(2,\), not of one number"),
        (saved(np.array({}, object), allow_pickle=True), "is an array of object"),
        (saved(np.array("a")), "is an array of <U1"),
        (saved(np.array(7))[:-1], "holds 7 bytes behind its header, and int64 has 8"),
        (saved(np.array(7)) + b"x", "holds 9 bytes"),
        (b"7\n", "its header cannot be read"),
        (b"", "its header cannot be read"),
        (saved(np.array(7)).replace(b"'shape': ()", b"'shape': 9("), "its header cannot be read"),
    ],
)
def test_what_is_no_array_of_one_number_is_refused_and_nothing_of_it_unpickled(data, said):
    with pytest.raises(IntegrityError, match=f"^score.npy: {said}"):
        number_of_npy("score.npy", data)

"""The table of slow samples, and what makes one slow."""

import numpy as np
import pyarrow as pa
import pytest

from benchmarks.loaders import slow_samples


def test_steps_a_second_are_those_of_computing_and_waiting_and_late_ones_are_counted():
    waits_s = [[0.0] * 90, [0.1] * 10]

    table = slow_samples.table_of("one is slow", 0.01, {"ours": waits_s})

    assert table.rows == (("ours", "50.0", "0.0", "100.0", "100", "10.0%"),)


@pytest.mark.parametrize("every", [1, 3])
def test_a_sample_takes_its_time_by_what_it_holds_and_stays_as_it_is(monkeypatch, every):
    slept_s = []
    monkeypatch.setattr(slow_samples.time, "sleep", slept_s.append)
    documents = [[1, 2], [4], [2, 2, 2], []]
    column = pa.array(documents, pa.large_list(pa.int32()))

    found = slow_samples.slowly(column, every=every, milliseconds=100)

    assert found.to_pylist() == documents
    assert slept_s == [0.1] * sum(int(np.sum(each)) % every == 0 for each in documents)

"""Gathering ranges compared with taking them one by one; sizes as text, converted there and back."""

from itertools import pairwise
from unittest.mock import patch

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from omniload.base import ragged
from omniload.base.units import format_bytes, format_count, parse_bytes, parse_count, parse_seconds

dtypes = st.sampled_from([np.uint8, np.int16, np.int32, np.int64])


@st.composite
def ranges(draw):
    dtype = draw(dtypes)
    sizes = draw(st.lists(st.integers(0, 120), min_size=1, max_size=4))
    columns = [(np.arange(n) * 7 + 31 * i).astype(dtype) for i, n in enumerate(sizes)]
    picks = []
    for _ in range(draw(st.integers(0, 20))):
        which = draw(st.integers(0, len(sizes) - 1))
        start = draw(st.integers(0, sizes[which]))
        picks.append((which, start, draw(st.integers(start, sizes[which]))))
    return columns, picks


@given(ranges(), st.sampled_from([8, 16, 64, 1 << 20]))
def test_ranges_are_gathered_as_if_taken_one_by_one(given_ranges, window_bytes):
    columns, picks = given_ranges
    which, starts, stops = (np.array([p[i] for p in picks], np.int64) for i in range(3))

    # A small window stands for columns of gigabytes.
    with patch.object(ragged, "_WINDOW_BYTES", window_bytes):
        values, offsets = ragged.gather_across(columns, which, starts, stops)

    plain = [columns[w][a:b] for w, a, b in picks]
    assert offsets.tolist() == np.cumsum([0, *map(len, plain)]).tolist()
    assert values.dtype == columns[0].dtype
    assert values.tolist() == [v for part in plain for v in part.tolist()]


@given(st.lists(st.lists(st.integers(0, 1000), max_size=6), max_size=8), st.data())
def test_taking_sequences_is_indexing_a_list_of_lists(sequences, data):
    column = ragged.Ragged.of([np.array(s, np.int32) for s in sequences])
    indices = data.draw(
        st.lists(st.integers(0, len(sequences) - 1), max_size=10) if sequences else st.just([])
    )

    taken = column.take(np.array(indices, np.int64))

    assert [taken[i].tolist() for i in range(len(taken))] == [sequences[i] for i in indices]


@given(st.lists(st.lists(st.integers(0, 1000), max_size=6), max_size=8), st.data())
def test_sequences_that_are_split_are_those_of_a_list_cut_at_the_same_places(sequences, data):
    column = ragged.Ragged.of([np.array(s, np.int32) for s in sequences])
    cuts = sorted(data.draw(st.lists(st.integers(0, len(sequences)), max_size=4)))
    cuts = [0, *cuts, len(sequences)]

    parts = column.split(cuts)

    assert [[part[i].tolist() for i in range(len(part))] for part in parts] == [
        sequences[a:b] for a, b in pairwise(cuts)
    ]


@given(st.lists(st.lists(st.lists(st.integers(0, 1000), max_size=4), min_size=1), min_size=1))
def test_taking_across_columns_is_taking_from_each_in_turn(lists):
    columns = [ragged.Ragged.of([np.array(s, np.int32) for s in column]) for column in lists]
    backwards = [np.arange(len(column))[::-2] for column in columns]

    taken = ragged.taken_across(columns, backwards)

    due = [sequence for column in lists for sequence in column[::-2]]
    assert [taken[i].tolist() for i in range(len(taken))] == due


@given(st.integers(0, 10**15))
def test_a_size_is_written_shortly_and_within_half_a_percent(size_bytes):
    text = format_bytes(size_bytes)
    number, unit = text.split()

    assert "e" not in number
    scale = parse_bytes(f"1{unit}")
    assert abs(float(number) * scale - size_bytes) <= max(1, 0.00501 * size_bytes)


@given(st.integers(0, 10**15))
def test_a_count_is_written_shortly_and_read_back_within_half_a_percent(count):
    text = format_count(count)

    assert "e" not in text
    assert abs(parse_count(text) - count) <= max(1, 0.00501 * count)


@given(st.decimals(0, 10**6, places=3).map(lambda d: f"{d:f}"))
def test_thousandths_of_a_thousand_are_whole(text):
    assert parse_count(f"{text}k") == int(text.replace(".", ""))


@given(st.integers(0, 10**6))
def test_durations_in_different_units_agree(duration_ms):
    assert abs(parse_seconds(f"{duration_ms}ms") * 1000 - duration_ms) < 1e-6

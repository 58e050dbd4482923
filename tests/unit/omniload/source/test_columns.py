"""Moving columns of sequences."""

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from omniload.base.ragged import Ragged
from omniload.source import columns
from omniload.source.columns import (
    Layer,
    Pieces,
    as_binary,
    drained,
    is_utf8,
    take,
    text_array,
    text_bytes,
)

INT32 = np.dtype(np.int32)


def a_column(*sequences, dtype=np.int32):
    return Ragged.of([np.array(s, dtype) for s in sequences], dtype)


def listed(column):
    return [column[i].tolist() for i in range(len(column))]


@given(st.lists(st.lists(st.integers(0, 2**31 - 1), max_size=5), min_size=1, max_size=8), st.data())
def test_taking_sequences_agrees_with_taking_lists(sequences, data):
    indices = data.draw(st.lists(st.integers(0, len(sequences) - 1), max_size=12))

    taken = take(as_binary(a_column(*sequences)), np.array(indices, np.int64), INT32)

    assert listed(taken) == [sequences[i] for i in indices]
    assert taken.values_V.dtype == np.int32
    assert taken.offsets.dtype == np.int64


def test_taking_nothing_gives_no_sequence():
    taken = take(as_binary(a_column([1, 2])), np.empty(0, np.int64), INT32)

    assert len(taken) == 0
    assert len(taken.values_V) == 0


@pytest.mark.parametrize("dtype", [np.uint8, np.int32])
@pytest.mark.parametrize(("first", "stop"), [(0, 4), (1, 3), (2, 3)])
def test_sequences_that_lie_end_to_end_are_shown_where_they_are_or_copied_at_once(
    dtype, first, stop
):
    column = a_column([1, 2], [], [3], [4, 5], dtype=dtype)
    rows = np.arange(first, stop)

    lent = take(as_binary(column), rows, np.dtype(dtype), lent=True)
    copied = take(as_binary(column), rows, np.dtype(dtype))

    assert listed(lent) == listed(copied) == listed(column)[first:stop]
    assert np.shares_memory(lent.values_V, column.values_V)
    assert not np.shares_memory(copied.values_V, column.values_V)


def test_sequences_in_another_order_are_copied_whoever_asks():
    column = a_column([1, 2], [], [3], [4, 5])

    for rows in ([0, 2, 1, 3], [1, 1, 3], [3, 2, 1], [0, 2]):
        taken = take(as_binary(column), np.array(rows), INT32, lent=True)

        assert listed(taken) == [listed(column)[row] for row in rows]
        assert not np.shares_memory(taken.values_V, column.values_V)


def test_columns_are_laid_end_to_end_and_let_go():
    columns = [a_column([1], [2, 3]), a_column(), a_column([], [4])]

    joined = drained(columns, INT32)

    assert listed(joined) == [[1], [2, 3], [], [4]]
    assert columns == []


def test_a_single_column_is_not_copied():
    column = a_column([1, 2])

    assert drained([column], INT32) is column


@pytest.mark.parametrize("kind", [pa.string(), pa.large_string(), pa.string_view()])
def test_text_goes_through_bytes_and_back(kind):
    texts = ["", "é", "abc", ""]

    column = text_bytes(pa.array(texts, kind))

    assert text_array(column).to_pylist() == texts
    assert column.values_V.dtype == np.uint8


def test_a_slice_of_text_holds_its_own_bytes_only():
    column = text_bytes(pa.array(["aa", "b", "cc"]).slice(1, 2))

    assert column.values_V.tobytes() == b"bcc"
    assert column.offsets.tolist() == [0, 1, 3]


def test_no_text_is_an_empty_column():
    assert len(text_bytes(pa.array([], pa.string()))) == 0
    assert text_array(text_bytes(pa.array([], pa.string()))).to_pylist() == []


@given(
    st.lists(st.lists(st.text(max_size=9) | st.none(), max_size=5), max_size=6),
    st.sampled_from([pa.string(), pa.large_string()]),
    st.integers(0, 100),
)
def test_texts_that_are_laid_a_few_at_a_time_are_those_of_one_array(parts, kind, likely_bytes):
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(columns, "_LEAST_ROOM", 1)
        layer = Layer(likely_bytes, np.dtype(np.uint8))
        for part in parts:
            # A slice, as Arrow may hand out: it begins somewhere in its buffers.
            layer.lay(text_bytes(pa.array(["before", *part], kind).slice(1)))
        laid = layer.finish()

    every = [text or "" for part in parts for text in part]
    assert text_array(laid).to_pylist() == every
    assert laid.offsets.dtype == np.int64


@pytest.mark.parametrize("likely_bytes", [0, 1_000_000, 1_200_000, 40_000_000])
def test_texts_that_are_laid_keep_at_most_a_quarter_more_room_than_they_take(likely_bytes):
    before = pa.total_allocated_bytes()
    layer = Layer(likely_bytes, np.dtype(np.uint8))
    for _ in range(10):
        layer.lay(text_bytes(pa.array(["a" * 100_000], pa.string())))

    laid = layer.finish()
    del layer

    assert len(laid.values_V) == 1_000_000
    assert pa.total_allocated_bytes() - before <= 1_250_000


def texts_column(*texts):
    return text_bytes(pa.array(texts, pa.large_string()))


# Views hold texts of up to twelve bytes themselves, and the first four of others.
SHORT_AND_LONG = st.lists(st.text(max_size=20), max_size=6)


@given(st.lists(SHORT_AND_LONG, min_size=1, max_size=4), st.data())
def test_pieces_are_taken_as_one_column_would_be(groups, data):
    every = [text for group in groups for text in group]
    asked = [
        data.draw(st.lists(st.integers(0, len(every) - 1), max_size=12)) if every else []
        for _ in range(3)
    ]
    pieces = Pieces([texts_column(*group) for group in groups])
    first, stop = sorted(data.draw(st.integers(0, len(every))) for _ in range(2))

    # Views are made with the first index that is no run, and later runs are taken from views.
    runs = [range(first, stop), np.arange(len(every))]
    for rows in [*runs, *(np.array(each, np.int64) for each in asked), *runs]:
        wanted = [every[i] for i in rows]
        assert pieces.texts(rows).to_pylist() == wanted
        assert text_array(pieces.take(rows)).to_pylist() == wanted
        assert text_array(pieces.take(rows, lent=True)).to_pylist() == wanted
        assert pieces.lengths_bytes_N.tolist() == [len(text.encode()) for text in every]


@given(
    st.lists(st.lists(st.lists(st.integers(0, 9), max_size=6), max_size=4), min_size=1, max_size=3)
)
def test_pieces_of_token_ids_keep_their_type_and_are_not_lost_when_the_pieces_go(groups):
    rows = np.arange(sum(map(len, groups)))[::-1].copy()

    taken = Pieces([a_column(*group) for group in groups]).take(rows)

    assert taken.values_V.dtype == np.int32
    assert listed(taken) == [ids for group in groups for ids in group][::-1]


def test_pieces_show_texts_where_they_lie_in_whatever_order():
    columns_ = [
        texts_column("of more than twelve bytes", "b"),
        texts_column("as long as the first"),
    ]
    pieces = Pieces(columns_)

    for rows in ([0, 1], [2, 0]):
        shown = {buffer.address for buffer in pieces.texts(np.array(rows)).buffers()[2:]}
        assert shown & {values.address for values in pieces.values}
    assert pieces.values[0].address == columns_[0].values_V.ctypes.data


@given(
    st.lists(st.binary(max_size=6) | st.text(max_size=6).map(str.encode), max_size=6),
    st.sampled_from([4, 5, 8, 1 << 17]),
    st.sampled_from([0, 3]),
    st.booleans(),
)
def test_bytes_are_texts_where_python_reads_each_of_them(parts, window, before, is_laid):
    """Whatever is looked at together, wherever Arrow's strings begin in its buffer, and copied on the way or not."""
    column = Ragged.of([np.frombuffer(part, np.uint8) for part in parts], np.uint8)
    ends = (column.offsets + before).astype(np.int32)
    layer = Layer(0, np.dtype(np.uint8))
    patched = pytest.MonkeyPatch()
    patched.setattr(columns, "_WINDOW_BYTES", window)

    looked = (layer.lay_texts if is_laid else is_utf8)(column.values_V, ends)
    patched.undo()

    assert looked == all(_is_text(part) for part in parts)
    if is_laid and looked:
        laid = layer.finish()
        assert [laid[i].tobytes() for i in range(len(laid))] == parts


@pytest.mark.parametrize("before", [0, 1, 2, 3])
def test_a_character_over_the_edge_of_what_is_looked_at_together_is_one(monkeypatch, before):
    monkeypatch.setattr(columns, "_WINDOW_BYTES", 4)
    column = texts_column("a" * before + "😀é")

    assert is_utf8(column.values_V, column.offsets)


@pytest.mark.parametrize("text", ["é", "a€", "aaa😀"])
def test_a_character_that_is_cut_in_two_is_no_text(text):
    size = len(text.encode())
    values_V, ends = np.frombuffer(text.encode(), np.uint8), np.array([0, size - 1, size])

    assert not is_utf8(values_V, ends)


def _is_text(part):
    try:
        part.decode()
    except UnicodeDecodeError:
        return False
    return True

"""The trace format, and how a trace becomes blocks."""

import numpy as np
import pytest

from omniload.base.errors import IntegrityError, StateError
from snapshot.image.layer.index import BLOCK, Entry, Extent, LayerIndex
from snapshot.image.trace.trace import (
    Touch,
    decode_trace,
    encode_trace,
    hot_blocks,
    merge_traces,
    trace_of,
)
from snapshot.image.tree.merge import merge

IMAGE = "sha256:" + "ab" * 32


def an_index(*entries, num_blocks=8):
    blocks = [(i * 10, 10, 7, i * 7, -1, 0, b"", bytes([i] * 32)) for i in range(num_blocks)]
    return LayerIndex(
        blob_digest=IMAGE,
        blob_bytes=7 * num_blocks,
        format="tar",
        stream_bytes=10 * num_blocks,
        diff_id=IMAGE,
        blocks_B=np.array(blocks, BLOCK),
        entries=entries,
    )


def a_trace(*touches):
    return trace_of(IMAGE, ("run",), [Touch(*touch) for touch in touches])


def numbers(trace, index):
    return [ref.number for ref in hot_blocks(trace, merge([index.entries]), [index])]


FILE = Entry(path="f", kind="file", size_bytes=50, extents=(Extent(0, 5, 20), Extent(30, 35, 20)))


def test_the_lines_of_version_1_are_read():
    text = (
        b'{"omniload_trace": 1, "image": "sha256:'
        + b"ab" * 32
        + b'", "command": ["a", "b"], "runs": 2}\n'
        b'{"path": "x", "offset": 0, "size": 8, "at_ms": 3, "runs": 2, "later": true}\n'
    )

    trace = decode_trace(text, name="it")

    assert (trace.image, trace.command, trace.runs) == (IMAGE, ("a", "b"), 2)
    assert trace.touches == (Touch(3, "x", 0, 8, 2),)


def test_another_version_is_refused_as_such():
    data = encode_trace(a_trace()).replace(b'trace": 1', b'trace": 2')

    with pytest.raises(StateError, match="version 2, this code reads 1"):
        decode_trace(data, name="it")


@pytest.mark.parametrize(
    "line",
    [
        b"{",
        b"[]",
        b"{}",
        b'{"path": 1, "offset": 0, "size": 1, "at_ms": 0, "runs": 1}',
        b'{"path": "x", "offset": -1, "size": 1, "at_ms": 0, "runs": 1}',
        b'{"path": "x", "offset": 0, "size": 1e3, "at_ms": 0, "runs": 1}',
        b'{"path": "x", "offset": 0, "size": 99999999999999999, "at_ms": 0, "runs": 1}',
        b"[" * 100_000 + b'"\\ud800"' + b"]" * 100_000,
    ],
)
def test_a_line_that_is_no_touch_is_named_by_its_number(line):
    with pytest.raises(IntegrityError, match="it:2: "):
        decode_trace(encode_trace(a_trace()) + line + b"\n", name="it")


@pytest.mark.timeout(120)
def test_ranges_that_lie_in_each_other_are_settled_one_after_the_other():
    num = 40_000  # each in the one before: to look at all of them for each would take hours
    reads = [Touch(num - at, "f", at, 2 * (num - at)) for at in range(num)]

    trace = trace_of(IMAGE, ["a"], reads)

    assert len(trace.touches) == 2 * num - 1
    assert min(trace.touches) == Touch(1, "f", num - 1, 2)


@pytest.mark.parametrize("data", [b"", b"\n", b"{}\n", b'{"omniload_trace": 1}\n', b"x"])
def test_a_file_without_a_head_is_refused(data):
    with pytest.raises(IntegrityError, match="trace it"):
        decode_trace(data, name="it")


def test_a_head_with_a_number_that_is_none_is_refused():
    head = f'{{"omniload_trace": 1, "image": "{IMAGE}", "command": ["\\ud800"], "runs": Infinity}}'

    with pytest.raises(IntegrityError, match="breaks its format"):
        decode_trace(head.encode(), name="it")


def test_blocks_come_once_in_the_order_of_first_touch():
    trace = a_trace((9, "f", 0, 1), (1, "f", 44, 6), (2, "f", 0, 16))

    # Bytes 44 to 50 lie at 49 to 55 of the stream, bytes 0 to 16 at 5 to 21; blocks have 10.
    assert numbers(trace, an_index(FILE)) == [4, 5, 0, 1, 2]


def test_holes_and_what_the_image_lacks_need_no_block():
    index = an_index(FILE, Entry(path="d", kind="directory"))

    assert numbers(a_trace((0, "f", 20, 10)), index) == []
    assert numbers(a_trace((0, "gone", 0, 10), (0, "d", 0, 10)), index) == []
    assert numbers(a_trace((0, "f", 0, 1000)), index) == [0, 1, 2, 3, 4, 5]


def test_a_reference_says_where_the_blob_holds_a_block():
    index = an_index(FILE)

    (ref,) = hot_blocks(a_trace((0, "f", 0, 1)), merge([index.entries]), [index])

    assert (ref.blob, ref.offset, ref.size_bytes, ref.end) == (IMAGE, 0, 7, 7)
    assert ref.digest == "sha256:" + "00" * 32


@pytest.mark.parametrize(
    ("runs", "hot"), [(1, [0, 4]), (4, [0, 4]), (5, [0]), (8, [0]), (9, [0]), (40, [0])]
)
def test_what_less_than_a_quarter_of_the_starts_touched_is_not_hot(runs, hot):
    index = an_index(FILE)
    usual = [a_trace((1, "f", 0, 1))] * (runs - 1)
    once = a_trace((1, "f", 0, 1), (2, "f", 35, 1))

    assert numbers(merge_traces([once, *usual]), index) == hot

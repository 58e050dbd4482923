"""Traces agree with a model that records each byte separately."""

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omniload.base.errors import OmniloadError
from snapshot.image.trace.trace import (
    Touch,
    Trace,
    decode_trace,
    encode_trace,
    merge_traces,
    trace_of,
)

IMAGE = "sha256:" + "ab" * 32
TOUCHES = st.builds(
    Touch,
    at_ms=st.integers(0, 50),
    path=st.sampled_from(["a", "b/c", "n\udcff", "é\n"]),
    offset=st.integers(0, 40),
    size_bytes=st.integers(0, 15),
)
READS = st.lists(TOUCHES, max_size=12)
TRACES = READS.map(lambda reads: trace_of(IMAGE, ("run",), reads))


def by_byte(touches):
    """Compute the plain model: every touched byte, its earliest time, and the number of touches."""
    found = {}
    for touch in touches:
        for at in range(touch.offset, touch.offset + touch.size_bytes):
            ms, runs = found.get((touch.path, at), (touch.at_ms, 0))
            found[touch.path, at] = (min(ms, touch.at_ms), runs + touch.runs)
    return found


@given(READS)
def test_a_trace_holds_every_byte_that_was_read_once_with_its_earliest_time(reads):
    trace = trace_of(IMAGE, ("run",), reads)

    expected = {byte: (ms, 1) for byte, (ms, _) in by_byte(reads).items()}
    assert by_byte(trace.touches) == expected
    assert sum(touch.size_bytes for touch in trace.touches) == len(expected)
    assert list(trace.touches) == sorted(trace.touches)


@given(st.lists(TRACES, min_size=1, max_size=4))
def test_merging_adds_runs_byte_by_byte(traces):
    merged = merge_traces(traces)

    assert by_byte(merged.touches) == by_byte([t for trace in traces for t in trace.touches])
    assert merged.runs == len(traces)
    assert all(1 <= touch.runs <= merged.runs for touch in merged.touches)


@given(TRACES, TRACES, TRACES)
def test_merging_depends_on_neither_order_nor_grouping(a, b, c):
    assert merge_traces([a, b, c]) == merge_traces([c, a, b])
    assert merge_traces([merge_traces([a, b]), c]) == merge_traces([a, merge_traces([b, c])])
    assert merge_traces([a]) == a


@given(st.lists(TRACES, min_size=1, max_size=3), st.lists(st.text(max_size=5), max_size=3))
def test_a_trace_reads_back_as_it_was_written(traces, words):
    merged = merge_traces(traces)
    trace = Trace(image=IMAGE, command=tuple(words), runs=merged.runs, touches=merged.touches)

    data = encode_trace(trace)

    assert decode_trace(data, name="it") == trace
    assert len(data.splitlines()) == len(trace.touches) + 1


@given(TRACES, st.data())
def test_an_altered_trace_is_a_trace_or_an_error_of_ours(trace, data):
    text = bytearray(encode_trace(trace))
    at = data.draw(st.integers(0, len(text) - 1))
    text[at] = data.draw(st.integers(0, 255))

    with contextlib.suppress(OmniloadError):
        found = decode_trace(bytes(text), name="it")

        assert found.runs >= 1
        assert list(found.touches) == sorted(found.touches)


def test_traces_of_different_commands_do_not_merge():
    with pytest.raises(ValueError, match="do not merge"):
        merge_traces([trace_of(IMAGE, ("a",), []), trace_of(IMAGE, ("b",), [])])
    with pytest.raises(ValueError, match="do not merge"):
        merge_traces([])

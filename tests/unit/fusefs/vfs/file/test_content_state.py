"""Which state of an open file's content takes a write, a cut, a read and a flush: the table."""

import pytest

from fusefs.vfs.file.content_state import (
    ContentState,
    to_be_flushed,
    to_be_read,
    to_be_resized,
    to_be_written,
)

CLEAN, SEQUENTIAL, SPOOLED = ContentState


@pytest.mark.parametrize(
    ("state", "at_end", "after"),
    [
        (CLEAN, True, SEQUENTIAL),
        (CLEAN, False, SPOOLED),
        (SEQUENTIAL, True, SEQUENTIAL),
        (SEQUENTIAL, False, SPOOLED),
        (SPOOLED, True, SPOOLED),
        (SPOOLED, False, SPOOLED),
    ],
)
def test_what_is_appended_goes_to_objects_until_something_else_is_written(state, at_end, after):
    assert to_be_written(state, at_end=at_end) is after


def test_a_file_is_emptied_without_a_spool_and_cut_in_one():
    assert to_be_resized(0) is SEQUENTIAL
    assert to_be_resized(1) is SPOOLED


@pytest.mark.parametrize(
    ("state", "is_shown", "after"),
    [
        (CLEAN, True, CLEAN),
        (CLEAN, False, CLEAN),
        (SEQUENTIAL, True, CLEAN),
        (SEQUENTIAL, False, SPOOLED),
        (SPOOLED, True, SPOOLED),
        (SPOOLED, False, SPOOLED),
    ],
)
def test_appended_bytes_are_read_as_published_or_through_a_spool(state, is_shown, after):
    assert to_be_read(state, is_shown=is_shown) is after


@pytest.mark.parametrize(
    ("state", "last", "after"),
    [
        (CLEAN, True, CLEAN),
        (CLEAN, False, CLEAN),
        (SEQUENTIAL, True, CLEAN),
        (SEQUENTIAL, False, SEQUENTIAL),
        (SPOOLED, True, SPOOLED),
        (SPOOLED, False, SPOOLED),
    ],
)
def test_the_last_flush_ends_appending_and_no_flush_ends_a_spool(state, last, after):
    assert to_be_flushed(state, last=last) is after

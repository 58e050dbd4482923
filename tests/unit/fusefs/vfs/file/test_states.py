"""What a flush publishes after a script of events: nothing, attributes alone, or content with them."""

import errno

import pytest

from fusefs.format.attributes import Attributes
from fusefs.vfs.file.states import (
    ContentState,
    Flush,
    Unpublished,
    to_be_flushed,
    to_be_read,
    to_be_resized,
    to_be_written,
)


def a_file_that_rests(path="f"):
    return Unpublished(path=path, change_ns=5, dirty=False, published=True)


def a_new_file(path="f"):
    return Unpublished(path=path, change_ns=5, dirty=True, published=False)


def test_a_file_that_rests_has_nothing_to_publish():
    assert a_file_that_rests().flush() is Flush.NOTHING
    assert a_file_that_rests().is_shown


def test_a_new_file_is_published_though_nothing_was_written():
    pending = a_new_file()
    assert (pending.flush(), pending.is_shown) == (Flush.CONTENT, False)

    pending.flushed()

    assert (pending.flush(), pending.is_shown, pending.published) == (Flush.NOTHING, True, True)


def test_attributes_alone_are_published_without_content():
    pending = a_file_that_rests()
    pending.attributes_changed(Attributes(mode=0o600))
    pending.attributes_changed(Attributes(mtime_ns=7))

    assert pending.flush() is Flush.ATTRIBUTES
    assert pending.attributes == Attributes(mode=0o600, mtime_ns=7)
    pending.flushed()
    assert pending.flush() is Flush.NOTHING


def test_attributes_of_a_new_file_go_out_with_its_content():
    pending = a_new_file()
    pending.attributes_changed(Attributes(mode=0o600))

    assert pending.flush() is Flush.CONTENT


def test_content_after_attributes_takes_them_along_with_a_time_of_its_own():
    pending = a_file_that_rests()
    pending.attributes_changed(Attributes(mode=0o600, mtime_ns=7))
    assert pending.mtime_ns == 7

    pending.content_changed(9)

    assert pending.flush() is Flush.CONTENT
    assert (pending.mtime_ns, pending.attributes) == (9, Attributes(mode=0o600))


def test_a_time_set_after_the_content_is_the_one_that_shows():
    pending = a_file_that_rests()
    pending.content_changed(9)
    pending.attributes_changed(Attributes(mtime_ns=7))

    assert (pending.flush(), pending.mtime_ns) == (Flush.CONTENT, 7)


def test_a_version_that_is_opened_in_place_of_another_has_nothing_pending():
    pending = a_file_that_rests()
    pending.attributes_changed(Attributes(mode=0o600))
    pending.flushed()
    pending.opened(11)

    assert (pending.attributes, pending.mtime_ns) == (Attributes(), 11)


@pytest.mark.parametrize("change", [lambda p: p.content_changed(9), lambda p: None])
def test_an_unlinked_file_is_published_nowhere(change):
    pending = a_new_file()
    change(pending)
    pending.unlinked()

    assert (pending.flush(), pending.is_shown) == (Flush.NOTHING, False)


def test_a_replaced_file_changes_no_more_and_says_so():
    pending = a_file_that_rests()
    pending.content_changed(9)
    pending.replaced_elsewhere()

    for refused in (pending.check_changes, pending.flush):
        with pytest.raises(OSError, match="open it again") as caught:
            refused()
        assert caught.value.errno == errno.ESTALE
    assert (pending.path, pending.is_shown) == (None, False)


def test_a_replaced_file_that_was_not_changed_is_closed_in_peace():
    pending = a_file_that_rests()
    pending.replaced_elsewhere()

    assert pending.flush() is Flush.NOTHING


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

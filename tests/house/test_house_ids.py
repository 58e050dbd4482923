"""The name of a test is read: what it is given stands in it, unless that is a whole text."""

import pytest

from tests.support.ids import LONGEST, short_id, too_long


def test_no_test_is_named_by_a_whole_text(request):
    assert [item.nodeid[:300] for item in request.session.items if too_long(item.name)] == []


@pytest.mark.parametrize("text", ["a," * 100_000, b"[" * 200_000, "\ud800\0\u00e9\n" * 20])
def test_a_long_text_is_named_by_its_head_and_told_from_others_that_begin_alike(text, request):
    named = short_id(text)

    assert named in request.node.name
    assert len(named) < 80
    assert named.isascii()
    assert named.isprintable()
    assert named != short_id(text + text[:1])


def test_short_texts_and_other_values_are_named_as_pytest_does():
    assert [short_id(value) for value in ("a" * 60, b"", 7, ("a" * 300,))] == [None] * 4


def test_a_name_may_have_so_many_letters_of_what_it_is_given():
    assert not too_long(f"test_it[{'a' * LONGEST}]")
    assert too_long(f"test_it[{'a' * (LONGEST + 1)}]")

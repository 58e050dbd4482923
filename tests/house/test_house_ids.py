"""The name of a parametrised test is readable: it contains the parameters, unless a parameter is a whole text."""

from types import SimpleNamespace

import pytest

from tests.support.ids import LONGEST, refuse_long, short_id


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


def test_a_name_of_more_letters_is_refused_before_any_test_runs():
    items = [
        SimpleNamespace(name=name, nodeid=f"tests/test_a.py::{name}")
        for name in ("test_it", f"test_it[{'a' * LONGEST}]", f"test_that[{'a' * (LONGEST + 1)}]")
    ]

    refuse_long(items[:2])
    with pytest.raises(pytest.UsageError, match=r"1 tests have .* 200 letters .*::test_that\[aaa"):
        refuse_long(items)

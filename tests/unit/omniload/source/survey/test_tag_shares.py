"""Documents and tokens counted by a tag, and the parts of a run that follow."""

import numpy as np
import pytest

from omniload.base.ragged import Ragged
from omniload.source.survey.tag_shares import TagCounts, shares_of_run, tags_counted

LANG, NUMBER, SCORE = 'lang:text:samples:"en"', "n:int64:samples:-1", "s:float32:samples:0.0"


def texts(*words):
    return Ragged.of([np.frombuffer(word.encode(), np.uint8) for word in words], np.uint8)


def counted(tag, *parts):
    counts = TagCounts(tag)
    for columns, tokens in parts:
        counts.add(columns, np.array(tokens))
    return {value: (each.documents, each.tokens) for value, each in counts.by_value.items()}


def test_documents_are_counted_by_text_those_without_tokens_and_those_behind_not():
    found = counted(LANG, ({LANG: texts("de", "en", "de", "fr")}, [3, 4, 5, 0, 0, 0]))

    assert found == {"de": (2, 8), "en": (1, 4)}


def test_documents_without_a_tag_have_its_default():
    found = counted(LANG, ({}, [3, 0, 4]), ({LANG: texts("en")}, [1]))

    assert found == {"en": (3, 8)}


def test_numbers_are_values_too():
    column = Ragged(values_V=np.array([7, -1, 7]), offsets=np.arange(4))

    assert counted(NUMBER, ({NUMBER: column}, [1, 2, 3])) == {"7": (2, 4), "-1": (1, 2)}


def test_fractions_and_columns_of_tokens_are_not_counted():
    assert tags_counted(("loss_mask", "scores", LANG, NUMBER, SCORE)) == (LANG, NUMBER)


def test_values_beyond_those_that_are_told_apart_are_counted_together():
    counts = TagCounts(NUMBER)
    column = Ragged(values_V=np.arange(5000), offsets=np.arange(5001))
    counts.add({NUMBER: column}, np.ones(5000, np.int64))

    assert (len(counts.by_value), counts.others.documents) == (4096, 904)
    (shares,) = shares_of_run([[counts]], np.array([9.0]))
    assert shares.rest == pytest.approx(904 / 5000)


def test_a_source_counts_by_what_the_run_takes_of_it():
    first, second, unseen = (TagCounts(LANG) for _ in range(3))
    first.add({LANG: texts("de", "en")}, np.array([30, 10]))
    second.add({}, np.array([1]))

    (shares,) = shares_of_run([[first], [second], [unseen]], np.array([40.0, 60.0, 0.0]))

    assert [(share.value, share.of_all) for share in shares.values] == [
        ("en", pytest.approx(0.7)),
        ("de", pytest.approx(0.3)),
    ]
    assert shares.values[0].tokens == 11

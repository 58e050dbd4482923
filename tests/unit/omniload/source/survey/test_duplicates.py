"""Equal documents are counted by a model that holds all of them."""

import itertools
from collections import Counter

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from omniload.base.ragged import Ragged
from omniload.source.survey.duplicates import DuplicateCounter, hashes_of

documents = st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=3), max_size=20)


def counted(sources, most_kept=1 << 20):
    counter = DuplicateCounter(len(sources), most_kept)
    for number, source in enumerate(sources):
        for begin in range(0, len(source), 7):
            part = [np.asarray(document) for document in source[begin : begin + 7]]
            counter.add(number, hashes_of(Ragged.of(part)))
    return counter.found()


@given(st.lists(documents, min_size=1, max_size=4))
def test_what_is_counted_is_what_a_set_of_the_documents_says(sources):
    sources = [[tuple(document) for document in source] for source in sources]

    found = counted(sources)

    sets = [set(source) for source in sources]
    others = [set().union(*sets[:s], *sets[s + 1 :]) for s in range(len(sets))]
    assert found.documents_S.tolist() == [len(source) for source in sources]
    assert found.repeated_S.tolist() == [
        len(a) - len(b) for a, b in zip(sources, sets, strict=True)
    ]
    assert found.elsewhere_S.tolist() == [len(a & b) for a, b in zip(sets, others, strict=True)]
    pairs = {(a, b): len(sets[a] & sets[b]) for a, b in itertools.combinations(range(len(sets)), 2)}
    assert {(a, b): n for a, b, n in found.pairs} == {k: n for k, n in pairs.items() if n}


def test_a_fair_part_is_kept_where_there_are_too_many():
    """Every document of a number below 4,000 is there twice: half of the kept ones are repetitions."""
    source = [[i % 4000] for i in range(8000)]

    found = counted([source, [[i] for i in range(3000, 5000)]], most_kept=2000)

    assert found.one_in in (8, 16)
    assert 1000 < found.documents_S.sum() <= 2000
    assert found.repeated_S[0] * 2 == found.documents_S[0]
    assert found.elsewhere_S[0] == found.elsewhere_S[1] == dict_of(found.pairs)[0, 1]
    assert abs(found.documents_S[0] * found.one_in - 8000) < 1500


def dict_of(pairs):
    return {(one, other): count for one, other, count in pairs}


def test_a_hash_is_of_the_values_and_of_where_a_document_ends():
    whole = Ragged.of([np.asarray(d) for d in ([1, 2], [3], [1], [2, 3], [1, 2])])

    hashes = hashes_of(whole).tolist()

    assert Counter(hashes).most_common(1) == [(hashes[0], 2)]
    assert hashes_of(whole.between(3, 5)).tolist() == hashes[3:]

"""The table of encodings is tiktoken's own."""

import pytest
import tiktoken_ext.openai_public as theirs

from omniload.source.byte_pairs.encodings import ENCODINGS


@pytest.mark.parametrize("name", sorted(theirs.ENCODING_CONSTRUCTORS))
def test_an_encoding_is_the_one_that_tiktoken_has(name, monkeypatch):
    for fetch in ("load_tiktoken_bpe", "data_gym_to_mergeable_bpe_ranks"):
        monkeypatch.setattr(theirs, fetch, lambda *args, **kwargs: {})

    made = theirs.ENCODING_CONSTRUCTORS[name]()

    assert ENCODINGS[name].pattern == made["pat_str"]
    assert ENCODINGS[name].special == made["special_tokens"]


def test_there_are_no_other_encodings():
    assert ENCODINGS.keys() == theirs.ENCODING_CONSTRUCTORS.keys()

"""Encodings equal tiktoken's; files of ranks give the same ids as a ``tokenizer.json``, or none is written."""

import random

import pytest
import tiktoken_ext.openai_public
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from omniload.base.errors import ConfigError
from omniload.mix.schema.tokenizers import TiktokenTokenizer
from omniload.source.byte_pairs import encodings
from omniload.source.byte_pairs.encodings import ENCODINGS, tokenizer_json
from omniload.source.tokenize import open_tokenizer
from tests.support.plane.ranks import TEXTS, ranks_of, trained, write_ranks

END, NOTE = "<|endoftext|>", "<| é |>"
SPECIAL = {END: 500, NOTE: 777}
PUBLIC = tiktoken_ext.openai_public


@pytest.mark.parametrize("name", sorted(PUBLIC.ENCODING_CONSTRUCTORS))
def test_an_encoding_is_the_one_that_tiktoken_has(name, monkeypatch):
    for fetch in ("load_tiktoken_bpe", "data_gym_to_mergeable_bpe_ranks"):
        monkeypatch.setattr(PUBLIC, fetch, lambda *args, **kwargs: {})

    made = PUBLIC.ENCODING_CONSTRUCTORS[name]()

    assert ENCODINGS[name].pattern == made["pat_str"]
    assert ENCODINGS[name].special == made["special_tokens"]


def test_there_are_no_other_encodings():
    assert ENCODINGS.keys() == PUBLIC.ENCODING_CONSTRUCTORS.keys()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    write_ranks(folder / "own.tiktoken", ranks_of(trained()))
    return folder


def a_config(encoding="cl100k_base", special=SPECIAL):
    return TiktokenTokenizer(
        type="tiktoken", path="own.tiktoken", encoding=encoding, special_tokens=special
    )


@pytest.fixture(scope="module")
def both(folder):
    """The tokenizer of each way of splitting text, and the reading of its ``tokenizer.json``."""
    found = {}
    for encoding in ("gpt2", "cl100k_base", "o200k_base"):
        written = tokenizer_json(a_config(encoding), folder).decode()
        ours = open_tokenizer(a_config(encoding), folder)
        found[encoding] = ours, tokenizers.Tokenizer.from_str(written)
    return found


@pytest.mark.parametrize("encoding", ["gpt2", "cl100k_base", "o200k_base"])
@given(text=st.text(max_size=60) | st.sampled_from(TEXTS) | st.text("a \n\r\t's1é,", max_size=40))
def test_text_has_the_same_ids_and_comes_back(both, encoding, text):
    ours, theirs = both[encoding]
    plain = text.replace(END, "")

    ids = theirs.encode(plain).ids

    assert ids == ours.encode([plain])[0].tolist()
    assert theirs.decode(ids) == plain


def test_special_tokens_keep_ids_that_do_not_follow_the_ranks(both):
    _, theirs = both["cl100k_base"]

    ids = theirs.encode(f"a{NOTE}{END}").ids

    assert ids[1:] == [777, 500]


AROUND = "abAS1 \n'.\r\u3000"
"""Characters whose tokens join with any other's: a text that is cut elsewhere has other ids."""
CONTEXTS = (
    "a{0}b",
    "1{0}1",
    " {0} {0}{0}",
    "{0}\n\n{0}\r\n {0}",
    "{0}'S'{0}",
    ".{0}. {0}",
    "A{0}\u3000{0}1",
)


@pytest.fixture(scope="module")
def every_boundary(tmp_path_factory):
    """A file of ranks in which any two bytes that meet in ``CONTEXTS`` are a token."""
    folder = tmp_path_factory.mktemp("boundaries")
    around = {byte.encode()[i : i + 1] for byte in AROUND for i in (0, -1)}
    plain, leads, tails = (
        {bytes([b]) for b in which} for which in (range(0x80), range(0xC2, 0xF5), range(0x80, 0xC0))
    )
    pairs = sorted(
        {a + b for a in around for b in plain | leads}
        | {a + b for a in plain for b in around}
        | {a + b for a in tails for b in around | leads}
        | {byte + byte for byte in plain}
    )
    random.Random(1).shuffle(pairs)
    tokens = [*(bytes([b]) for b in range(256)), *pairs]
    write_ranks(folder / "own.tiktoken", {token: i for i, token in enumerate(tokens)})
    return folder


@pytest.mark.parametrize("encoding", ["cl100k_base", "o200k_base"])
def test_characters_from_all_over_unicode_are_cut_at_the_same_places(every_boundary, encoding):
    config = a_config(encoding, {})
    theirs = tokenizers.Tokenizer.from_str(tokenizer_json(config, every_boundary).decode())
    characters = [
        chr(c) for c in (*range(0x250), *range(0x250, 0x110000, 499)) if not 0xD800 <= c < 0xE000
    ]
    characters += [chr(c) for c in range(0x110000) if chr(c).isspace()]
    texts = [context.format(character) for character in characters for context in CONTEXTS]

    ours = open_tokenizer(config, every_boundary).encode(texts)

    found = theirs.encode_batch_fast(texts, add_special_tokens=False)
    assert [each.ids for each in found] == [ours[i].tolist() for i in range(len(texts))]


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_every_encoding_is_written(folder, encoding):
    assert tokenizer_json(a_config(encoding), folder).startswith(b'{"version": "1.0"')


def test_ranks_that_would_cut_text_otherwise_are_refused(folder, monkeypatch):
    monkeypatch.setattr(encodings, "_for_oniguruma", lambda pattern: pattern)

    with pytest.raises(ConfigError, match=r"own.tiktoken: as a tokenizer.json it would cut text"):
        tokenizer_json(a_config(), folder)


def test_a_special_token_that_is_one_of_text_too_is_refused(folder):
    with pytest.raises(ConfigError, match="special token 'a' is a token of text too"):
        tokenizer_json(a_config(special={"a": 500}), folder)

"""A tokenizer of tiktoken compared with the library itself, and with the tokenizers library and the same vocabulary."""

import sys
from functools import cache

import numpy as np
import pyarrow as pa
import pytest
import tiktoken
from hypothesis import given
from hypothesis import strategies as st

from omniload.base.errors import ConfigError
from omniload.mix.schema.tokenizers import TiktokenTokenizer
from omniload.source.byte_pairs.encodings import ENCODINGS
from omniload.source.tokenize import open_tokenizer
from tests.support.plane.ranks import CL100K, TEXTS, ranks_of, trained, write_ranks

END, START = "<|endoftext|>", "<|im_start|>"
SPECIAL = {END: 500, START: 501}
LIBRARY = trained()
RANKS = ranks_of(LIBRARY)
ANY_TEXT = st.text(max_size=40) | st.sampled_from([*TEXTS, END, f"a{START}b", "é" * 30, " \n" * 20])


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    write_ranks(folder / "own.tiktoken", RANKS)
    return folder


@pytest.fixture(scope="module")
def opened(folder):
    def open_one(encoding="cl100k_base", end=None, **changes):
        return open_tokenizer(a_config(encoding, end, **changes), folder)

    return open_one


def a_config(encoding="cl100k_base", end=None, **changes):
    said = {"path": "own.tiktoken", "special_tokens": SPECIAL, **changes}
    return TiktokenTokenizer(type="tiktoken", encoding=encoding, end_of_document=end, **said)


@cache
def the_library(encoding):
    rules = ENCODINGS[encoding]
    return tiktoken.Encoding(
        encoding, pat_str=rules.pattern, mergeable_ranks=RANKS, special_tokens=SPECIAL
    )


def sequences(column):
    return [column[i].tolist() for i in range(len(column))]


@pytest.mark.parametrize("encoding", ["gpt2", "cl100k_base", "o200k_base"])
@given(texts=st.lists(ANY_TEXT, max_size=6))
def test_ids_are_those_that_the_library_gives(opened, encoding, texts):
    library = the_library(encoding)

    for given_texts in (texts, pa.array(texts, pa.large_string())):
        column = opened(encoding).encode(given_texts)
        assert sequences(column) == [library.encode_ordinary(text) for text in texts]
        assert column.values_V.dtype == np.int32


@pytest.mark.parametrize(("encoding", "pattern"), [("gpt2", None), ("cl100k_base", CL100K)])
def test_ids_are_those_of_the_tokenizers_library_with_the_same_vocabulary(
    tmp_path, encoding, pattern
):
    library = trained(pattern)
    write_ranks(tmp_path / "own.tiktoken", ranks_of(library))

    tokenizer = open_tokenizer(a_config(encoding), tmp_path)

    assert sequences(tokenizer.encode(TEXTS)) == [library.encode(text).ids for text in TEXTS]


def test_the_end_of_a_document_is_put_after_every_text_that_has_tokens(opened):
    tokenizer = opened(end=END)
    library = the_library("cl100k_base")

    assert sequences(tokenizer.encode(["the", "", "cat"])) == [
        [*library.encode_ordinary("the"), 500],
        [],
        [*library.encode_ordinary("cat"), 500],
    ]
    assert (tokenizer.end_of_document_id, tokenizer.vocab_size) == (500, 502)


def test_what_begins_a_document_is_put_before_every_text_that_has_tokens(opened):
    both, first = (opened(end=end, begin_of_document=START) for end in (END, None))
    ids = the_library("cl100k_base").encode_ordinary("the")

    assert sequences(both.encode(["the", "", "the"])) == [[501, *ids, 500], [], [501, *ids, 500]]
    assert sequences(first.encode(["the", ""])) == [[501, *ids], []]
    with pytest.raises(ConfigError, match=r"tokenizer.begin_of_document is 'x', no special token"):
        opened(begin_of_document="x")


def test_special_tokens_are_text_in_a_document_and_tokens_where_a_template_writes_them(opened):
    tokenizer = opened()

    (text,) = sequences(tokenizer.encode([f"{START}a"]))
    ids, _ = tokenizer.encode_spans([f"{START}a"], [()])
    as_text, _ = tokenizer.encode_spans([f"{START}a"], [()], special=False)

    assert 501 not in text
    assert sequences(ids) == [[501, tokenizer.id_of("a")]]
    assert sequences(as_text) == [text]


@given(data=st.data(), text=ANY_TEXT)
def test_the_tokens_of_a_span_are_those_that_hold_a_byte_of_it(opened, data, text):
    cuts = sorted(
        data.draw(st.lists(st.integers(0, len(text)), max_size=4).filter(lambda c: len(c) % 2 == 0))
    )
    spans = list(zip(cuts[::2], cuts[1::2], strict=True))
    library = the_library("cl100k_base")

    tokens, mask = opened().encode_spans(["x", text], [((0, 1),), spans])

    ids = library.encode(text, allowed_special="all")
    marked = [False] * len(text.encode())
    for first, stop in spans:
        begin, end = (len(text[:at].encode()) for at in (first, stop))
        marked[begin:end] = [True] * (end - begin)
    expected, at = [], 0
    for token in library.decode_tokens_bytes(ids):
        expected.append(any(marked[at : at + len(token)]))
        at += len(token)
    assert sequences(tokens) == [library.encode("x"), ids]
    assert mask[0].tolist() == [True]
    assert mask[1].tolist() == expected


@given(ANY_TEXT)
def test_ids_decode_to_the_text_without_special_tokens(opened, text):
    tokenizer = opened(end=END)

    assert tokenizer.decode(tokenizer.encode([text]).values_V) == text


def test_ids_that_no_token_has_are_left_out_for_people_to_read(opened):
    tokenizer = opened()

    ids = np.array([tokenizer.id_of("a"), 450, 501, 2**31 - 1])
    assert tokenizer.decode(ids) == "a"
    assert tokenizer.decode(ids, special=True) == f"a{START}"


def test_tokens_are_found_by_their_name(opened):
    assert opened().id_of(START) == 501
    assert opened().id_of("zzzz") is None


def test_special_tokens_are_those_of_the_encoding_unless_others_are_named(opened):
    own, plain = opened(end=END), opened(end=END, special_tokens=None)

    assert (own.end_of_document_id, plain.end_of_document_id) == (500, 100257)
    with pytest.raises(
        ConfigError,
        match=r"end_of_document is '<eos>', no special token of gpt2; they are <\|endof",
    ):
        opened("gpt2", "<eos>")


def test_a_special_token_with_the_id_of_another_token_is_refused(opened):
    with pytest.raises(ConfigError, match=r"'<\|endoftext\|>' has id 97, which is the rank of b"):
        opened(special_tokens={END: 97})


def test_a_missing_file_is_refused(opened, folder):
    with pytest.raises(ConfigError, match=r"gone: no such file; give the path of a file of ranks"):
        opened(path="gone")
    with pytest.raises(ConfigError, match=r"is a folder; give the path of a file of ranks"):
        opened(path=".")


def test_a_text_that_the_library_fails_at_is_told_by_its_size_and_beginning(opened):
    with pytest.raises(
        ConfigError, match=r"fails at a text of 1000000 characters that begins with '   "
    ):
        opened("o200k_base").encode(["fine", " " * 1_000_000, "never reached"])


def test_without_the_library_the_extra_is_named(folder, monkeypatch):
    monkeypatch.delitem(sys.modules, "omniload.source.byte_pairs.encoder", raising=False)
    monkeypatch.setitem(sys.modules, "tiktoken", None)

    with pytest.raises(
        ConfigError, match=r"needs the package tiktoken.*pip install 'omniload-data\[tiktoken\]'"
    ):
        open_tokenizer(a_config(), folder)


@pytest.mark.parametrize(
    ("encoding", "special", "is_doubted"),
    [("cl100k_base", None, True), ("cl100k_base", SPECIAL, False), ("gpt2", None, True)],
)
def test_ranks_that_end_long_before_the_special_tokens_of_an_encoding_are_doubted(
    opened, encoding, special, is_doubted
):
    doubt = opened(encoding, special_tokens=special).doubt

    assert bool(doubt) == is_doubted
    if is_doubted:
        assert (
            f"has ranks up to {max(RANKS.values()):,}, and the special tokens of {encoding}"
            in doubt
        )


@pytest.mark.parametrize(
    "encoding", ["gpt2", "p50k_base", "p50k_edit", "cl100k_base", "o200k_base"]
)
def test_as_many_ranks_as_an_encoding_has_are_not_doubted(tmp_path, encoding):
    counts = {"gpt2": 50_256, "p50k_base": 50_281, "p50k_edit": 50_281, "cl100k_base": 100_256}
    special = {*ENCODINGS[encoding].special.values()}
    each = (n for n in range(counts.get(encoding, 199_998)) if n not in special)
    ranks = {bytes([n]) if n < 256 else b"x%d" % n: n for n in each}
    write_ranks(tmp_path / "own.tiktoken", ranks)

    assert open_tokenizer(a_config(encoding, special_tokens=None), tmp_path).doubt == ""

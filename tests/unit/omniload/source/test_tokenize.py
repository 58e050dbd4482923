"""Tokenizers."""

import json
import os

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from omniload.base.errors import ConfigError
from omniload.base.ragged import Ragged
from omniload.mix.config import BpeTokenizer, ByteTokenizer
from omniload.source.tokenize import ByteEncoder, around_documents, open_tokenizer

CORPUS = ["the cat sat on the mat", "the dog ate the cat", "é ü 漢字"] * 3


def trained():
    library = Tokenizer(models.BPE())
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    library.train_from_iterator(
        CORPUS,
        trainers.BpeTrainer(
            vocab_size=300,
            special_tokens=["<eos>", "<bos>"],
            initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
            show_progress=False,
        ),
    )
    return library


LIBRARY_JSON = trained().to_str()


@pytest.fixture
def a_bpe(tmp_path):
    def open_bpe(end="<eos>", change=lambda library: None):
        library = Tokenizer.from_str(LIBRARY_JSON)
        change(library)
        library.save(str(tmp_path / "tokenizer.json"))
        config = BpeTokenizer(type="bpe", path="tokenizer.json", end_of_document=end)
        return open_tokenizer(config, tmp_path)

    return open_bpe


@given(
    st.lists(st.lists(st.integers(0, 9), max_size=4), max_size=6),
    st.none() | st.just(70),
    st.none() | st.just(80),
)
def test_tokens_are_put_around_every_sequence_that_has_any(given_lists, begin, end):
    held = Ragged.of([np.array(each, np.int32) for each in given_lists])

    made = around_documents(held, begin, end)

    assert [made[i].tolist() for i in range(len(made))] == [
        [*([begin] * (begin is not None)), *each, *([end] * (end is not None))] if each else []
        for each in given_lists
    ]


def test_documents_begin_and_end_as_the_library_puts_tokens_around_them(tmp_path):
    library = Tokenizer.from_str(LIBRARY_JSON)
    ids = [(token, library.token_to_id(token)) for token in ("<bos>", "<eos>")]
    library.post_processor = processors.TemplateProcessing(
        single="<bos> $A <eos>", special_tokens=ids
    )
    library.save(str(tmp_path / "tokenizer.json"))
    around = {"begin_of_document": "<bos>", "end_of_document": "<eos>"}
    opened = open_tokenizer(BpeTokenizer(type="bpe", path=".", **around), tmp_path)

    found = opened.encode([*CORPUS, ""])

    wanted = [library.encode(text).ids for text in CORPUS]
    assert [found[i].tolist() for i in range(len(found))] == [*wanted, []]
    assert opened.begin_of_document_id == ids[0][1]
    assert opened.puts_around == ("<bos>", "<eos>")


@pytest.mark.parametrize(("template", "end"), [(None, ""), ("$A <eos>", "<eos>"), ("$A", "")])
def test_a_template_that_puts_nothing_before_a_text_is_none_of_a_beginning(a_bpe, template, end):
    def change(library):
        ids = [("<eos>", library.token_to_id("<eos>"))]
        if template is not None:
            library.post_processor = processors.TemplateProcessing(
                single=template, special_tokens=ids
            )

    assert a_bpe(change=change).puts_around == ("", end)


@pytest.mark.parametrize("key", ["begin_of_document", "end_of_document"])
def test_a_token_around_documents_is_one_of_the_vocabulary(a_bpe, tmp_path, key):
    a_bpe()
    config = BpeTokenizer(type="bpe", path=".", **{key: "<none>"})

    with pytest.raises(
        ConfigError, match=rf"tokenizer.{key} is '<none>', not in the vocabulary of"
    ):
        open_tokenizer(config, tmp_path)


def test_a_tokenizer_that_begins_nothing_is_written_as_by_releases_that_knew_no_beginning():
    assert "begin_of_document" not in BpeTokenizer(type="bpe", path="t").model_dump()


def test_a_folder_stands_for_the_tokenizer_in_it(a_bpe, tmp_path):
    by_file = a_bpe()

    by_folder = open_tokenizer(BpeTokenizer(type="bpe", path="."), tmp_path)

    assert by_folder.encode(CORPUS).values_V.tolist() == [
        token
        for token in by_file.encode(CORPUS).values_V.tolist()
        if token != by_file.end_of_document_id
    ]
    with pytest.raises(ConfigError, match=r"gone: no such file; .* or of its folder"):
        open_tokenizer(BpeTokenizer(type="bpe", path="gone"), tmp_path)


def sequences(column):
    return [column[i].tolist() for i in range(len(column))]


@given(st.lists(st.text(max_size=12), max_size=8))
def test_bytes_are_tokens_with_an_end_after_every_text(texts):
    column = ByteEncoder().encode(texts)

    assert sequences(column) == [[*text.encode(), 256] if text else [] for text in texts]
    assert column.values_V.dtype == np.int32


def test_bytes_of_an_arrow_array_are_those_of_a_list():
    texts = ["é", "", "ab"]
    encoder = ByteEncoder()

    for kind in (pa.string(), pa.large_string()):
        assert sequences(encoder.encode(pa.array(texts, kind))) == sequences(encoder.encode(texts))


@given(st.text(max_size=30))
def test_bytes_decode_to_the_text(text):
    encoder = ByteEncoder()

    assert encoder.decode(encoder.encode([text]).values_V) == text


def test_bytes_cut_inside_a_character_still_decode_for_people_to_read():
    assert ByteEncoder().decode(np.frombuffer("é!".encode()[1:], np.uint8)) == "\ufffd!"


def test_the_vocabulary_of_bytes_ends_with_its_end_of_document(tmp_path):
    encoder = open_tokenizer(ByteTokenizer(type="bytes"), tmp_path)

    assert (encoder.vocab_size, encoder.end_of_document_id) == (257, 256)


def test_bpe_agrees_with_the_library_and_puts_the_end_last(a_bpe):
    library = Tokenizer.from_str(LIBRARY_JSON)

    column = a_bpe().encode(pa.array(CORPUS))

    end = library.token_to_id("<eos>")
    assert sequences(column) == [[*library.encode(text).ids, end] for text in CORPUS]
    assert column.values_V.dtype == np.int32


def test_without_an_end_of_document_nothing_is_added(a_bpe):
    tokenizer = a_bpe(end=None)

    assert tokenizer.end_of_document_id is None
    assert tokenizer.decode(tokenizer.encode(["the cat"]).values_V) == "the cat"


def test_a_text_without_tokens_stays_empty(a_bpe):
    assert [len(s) for s in sequences(a_bpe().encode(["", "the", ""]))] == [0, 2, 0]


def test_no_text_gives_no_sequence(a_bpe):
    assert len(a_bpe().encode([])) == len(ByteEncoder().encode([])) == 0


def test_bpe_decodes_without_special_tokens_unless_they_are_asked_for(a_bpe):
    tokenizer = a_bpe()

    ids = tokenizer.encode(["é the cat"]).values_V
    assert tokenizer.decode(ids) == "é the cat"
    assert tokenizer.decode(ids, special=True) == "é the cat<eos>"


def test_truncation_padding_and_templates_of_the_file_are_not_applied(a_bpe):
    def demand(library):
        library.enable_truncation(2)
        library.enable_padding(length=9)
        library.post_processor = processors.TemplateProcessing(
            single="<bos> $A", special_tokens=[("<bos>", 1)]
        )

    plain, demanding = a_bpe(), a_bpe(change=demand)

    assert sequences(demanding.encode(CORPUS)) == sequences(plain.encode(CORPUS))


def test_the_vocabulary_reaches_above_the_highest_token(a_bpe):
    tokenizer = a_bpe(change=lambda library: library.add_special_tokens(["<extra>"]))
    library = Tokenizer.from_str(LIBRARY_JSON)

    assert tokenizer.vocab_size == library.get_vocab_size() + 1


def test_tokenizers_stay_on_one_thread_unless_told_otherwise(a_bpe, monkeypatch):
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "true")
    a_bpe()
    assert os.environ["TOKENIZERS_PARALLELISM"] == "true"

    monkeypatch.delenv("TOKENIZERS_PARALLELISM")
    a_bpe()
    assert os.environ["TOKENIZERS_PARALLELISM"] == "false"


def test_a_file_is_read_once_for_all_sources_and_again_when_it_changes(a_bpe):
    first, second = a_bpe(), a_bpe(change=lambda library: library.add_tokens(["zebra"]))

    assert second.vocab_size == first.vocab_size + 1


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"none\.json: no such file"):
        open_tokenizer(BpeTokenizer(type="bpe", path="none.json"), tmp_path)


@pytest.mark.parametrize("content", [b"{}", b"not json", b"\xff\xfe"])
def test_a_file_that_is_no_tokenizer_is_named(tmp_path, content):
    (tmp_path / "t.json").write_bytes(content)

    with pytest.raises(ConfigError, match=r"t\.json: is no tokenizer\.json"):
        open_tokenizer(BpeTokenizer(type="bpe", path="t.json"), tmp_path)


def test_an_end_of_document_outside_the_vocabulary_is_named_with_those_in_it(a_bpe):
    with pytest.raises(ConfigError, match=r"'</s>', not in the vocabulary .* are <eos>, <bos>"):
        a_bpe(end="</s>")


def a_broken(folder, **changes):
    model = {"type": "BPE", "vocab": {"a": 0}, "merges": []} | changes.pop("model", {})
    file = {
        "version": "1.0",
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": None,
        "model": model,
    }
    path = folder / "tokenizer.json"
    path.write_text(json.dumps(file | changes))
    return BpeTokenizer(type="bpe", path=str(path))


@pytest.mark.parametrize(
    "changes",
    [
        {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}},
        {"model": {"vocab": {"a": 0, "b": 1}, "merges": ["a b"]}},
    ],
    ids=["charsmap", "merges"],
)
def test_what_ends_the_library_in_a_panic_is_a_fault_of_the_file(tmp_path, changes):
    with pytest.raises(ConfigError, match=r"tokenizer.path: .*tokenizer.json: .*; check the file"):
        open_tokenizer(a_broken(tmp_path, **changes), tmp_path)


def test_a_file_whose_vocabulary_lacks_what_its_model_needs_is_told_as_one(tmp_path):
    model = {"type": "WordLevel", "unk_token": "[UNK]", "vocab": {"a": 0}}
    tokenizer = open_tokenizer(a_broken(tmp_path, model=model), tmp_path)

    with pytest.raises(ConfigError, match=r"tokenizer.json: encodes no text: .*\[UNK\]"):
        tokenizer.encode(["b"])


def test_ctrl_c_while_a_tokenizer_is_read_stays_what_it_is(a_bpe, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("omniload.source.tokenize._encoder", interrupted)
    with pytest.raises(KeyboardInterrupt):
        a_bpe()

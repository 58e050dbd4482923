"""What decides the tokens of a text, by type of tokenizer."""

import pytest
import tiktoken
import tokenizers

from omniload.mix.schema.tokenizers import BpeTokenizer, ByteTokenizer, TiktokenTokenizer
from omniload.source.byte_pairs.files import content_of, file_of, folder_of, library_of

BYTES = ByteTokenizer(type="bytes")
BPE = BpeTokenizer(type="bpe", path="model")


def ranks(encoding="gpt2", special=None, path="model/own.tiktoken"):
    return TiktokenTokenizer(type="tiktoken", path=path, encoding=encoding, special_tokens=special)


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "tokenizer.json").write_bytes(b"{}")
    (tmp_path / "model" / "own.tiktoken").write_bytes(b"ranks")
    (tmp_path / "model" / "other.tiktoken").write_bytes(b"other ranks")
    return tmp_path


def test_the_file_of_a_tokenizer_is_the_one_named_or_that_in_the_folder_of_a_model(folder):
    assert file_of(BPE, folder) == folder / "model" / "tokenizer.json"
    assert file_of(ranks(), folder) == folder / "model" / "own.tiktoken"
    assert file_of(BYTES, folder) is None
    assert [folder_of(each, folder) for each in (BPE, ranks(), BYTES)] == [
        folder / "model",
        folder / "model",
        folder,
    ]


def test_what_decides_tokens_is_the_file_the_encoding_and_the_special_tokens(folder):
    assert content_of(BPE, folder) == b"{}"
    assert content_of(BYTES, folder) == content_of(None, folder) == b"bytes"
    others = [
        ranks(),
        ranks("o200k_base"),
        ranks(special={}),
        ranks(special={"<end>": 5}),
        ranks(path="model/other.tiktoken"),
    ]
    assert len({content_of(each, folder) for each in others}) == len(others)


def test_the_order_of_special_tokens_is_all_one(folder):
    one, other = (
        ranks(special=dict(pairs)) for pairs in ([("a", 1), ("b", 2)], [("b", 2), ("a", 1)])
    )

    assert content_of(one, folder) == content_of(other, folder)


def test_a_library_is_told_with_its_version():
    assert library_of(BPE) == f"tokenizers {tokenizers.__version__}"
    assert library_of(ranks()) == f"tiktoken {tiktoken.__version__}"
    assert library_of(BYTES) == library_of(None) == "none"

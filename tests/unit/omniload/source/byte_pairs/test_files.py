"""The files that decide the tokens of a text, by type of tokenizer."""

import base64
from pathlib import Path

import pytest
import tiktoken
import tokenizers
from tiktoken.load import load_tiktoken_bpe

from omniload.base.errors import ConfigError
from omniload.mix.schema.tokenizers import BpeTokenizer, ByteTokenizer, TiktokenTokenizer
from omniload.source.byte_pairs.files import (
    content_of,
    file_of,
    folder_of,
    library_of,
    named_tokens,
    other_kind,
    parse_ranks,
)
from omniload.source.tokenize import open_tokenizer
from tests.support.plane.ranks import ranks_of, trained, write_ranks

BYTES = ByteTokenizer(type="bytes")
BPE = BpeTokenizer(type="bpe", path="model")
SINGLE_BYTES = {bytes([i]): i for i in range(256)}


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


def test_ranks_are_those_that_tiktoken_reads(tmp_path):
    path = write_ranks(tmp_path / "own.tiktoken", ranks_of(trained()))

    assert parse_ranks(path.read_bytes(), path) == load_tiktoken_bpe(str(path))


def a_line(token, rank):
    return b"%s %s\n" % (base64.b64encode(token), rank)


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (a_line(b"th", b"7"), r"own:257: rank 7 is that of line 8 too"),
        (a_line(b"a", b"256"), r"own:257: token b'a' is that of line 98 too"),
        (a_line(b"th", b"-1"), r"own:257: holds b'dGg= -1', not a token in base 64 and a rank"),
        (a_line(b"th", b"2147483648"), r"own:257: .* a rank from 0 to 2147483647"),
        (a_line(b"", b"256"), r"own:257: holds b' 256'"),
        (b"dGg\n", r"own:257: holds b'dGg'"),
        (b"d*Gg 256\n", r"own:257: holds b'd\*Gg 256'"),
        (b'{"version": "1.0"}\n', r"own:257: holds"),
    ],
)
def test_a_line_that_is_none_is_named(tmp_path, more, said):
    data = write_ranks(tmp_path / "bytes", SINGLE_BYTES).read_bytes()

    with pytest.raises(ConfigError, match=f"^{said}"):
        parse_ranks(data + more, Path("own"))


def test_a_file_without_a_token_for_every_byte_is_refused(tmp_path):
    lines = write_ranks(tmp_path / "bytes", SINGLE_BYTES).read_bytes().splitlines(keepends=True)

    with pytest.raises(ConfigError, match=r"has 200 tokens, but none for byte 200 and 55 others"):
        parse_ranks(b"".join(lines[:200]), Path("own"))


def sentencepiece(first="<unk>"):
    """Return the beginning of a model of SentencePiece, as its library writes it."""
    text = first.encode()
    piece = b"\n" + bytes([len(text)]) + text + b"\x15\x00\x00\x00\x00\x18\x02"
    return b"\n" + bytes([len(piece)]) + piece + b"\xce\xc3" * 4000


TEKKEN = b'{"config": {"pattern": "x"}, "vocab": [{"rank": 0, "token_bytes": "AA==", "token_str": null}]}'


@pytest.mark.parametrize(
    ("data", "named", "said"),
    [
        (sentencepiece(), "bpe", "a model of SentencePiece; take the tokenizer.json"),
        (sentencepiece("<pad>"), "tiktoken", "a model of SentencePiece; take the tokenizer.json"),
        (b"IQ== 0\nIg== 1\n", "bpe", "is a file of ranks of tiktoken; say type: tiktoken"),
        (TEKKEN, "bpe", "is a tekken.json of Mistral; take the tokenizer.json"),
        (TEKKEN, "tiktoken", "is a tekken.json of Mistral; take the tokenizer.json"),
        (trained().to_str().encode(), "tiktoken", "is a tokenizer.json; say type: bpe"),
    ],
)
def test_a_tokenizer_of_another_kind_is_named_with_what_to_do(tmp_path, data, named, said):
    (tmp_path / "tokenizer.model").write_bytes(data)
    config = (
        BpeTokenizer(type="bpe", path="tokenizer.model")
        if named == "bpe"
        else ranks(path="tokenizer.model")
    )

    with pytest.raises(ConfigError, match=rf"tokenizer.model: .*{said}"):
        open_tokenizer(config, tmp_path)


@pytest.mark.parametrize("data", [b"", b"\n", b"\n\x00\n", b"{", b"[]", b"\n\x0e\n\x05<unk>"])
def test_of_a_file_that_is_of_no_known_kind_nothing_is_guessed(data):
    assert [other_kind(data, named) for named in ("bpe", "tiktoken")] == ["", ""]


def test_a_damaged_file_is_not_taken_for_another_kind():
    assert other_kind(trained().to_str().encode()[:-9], "bpe") == ""
    assert other_kind(b"IQ== 0\nI\xff 1\n", "tiktoken") == ""


def test_a_message_names_the_tokens_that_are_most_like_the_wanted_one_and_counts_the_others():
    reserved = [f"<|reserved_special_token_{i}|>" for i in range(250)]

    said = named_tokens([*reserved, "<|end_of_text|>"], "<|endoftext|>")

    assert said.startswith("<|end_of_text|>, ")
    assert said.endswith(", 243 others")
    assert named_tokens(["<eos>"], "x") == "<eos>"
    assert named_tokens([], "x") == "none"

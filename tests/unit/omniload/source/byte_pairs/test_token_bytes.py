"""Tokens that spans touch, found by lengths of tokens: as by the library's offsets, or not at all."""

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

from omniload.source.byte_pairs.token_bytes import TokenBytes
from omniload.source.tokenize import BpeEncoder

TEXTS = ["the cat sat", "the dog ate 漢字", "é ü 🙂 zażółć", "a\n\nb  c\t"] * 3
WORDS = ["the ", "cat", " ", "\n\n", "漢字", "🙂", "é", "<a>", "<b>", "12", "e\u0301", "\x00"]


def trained(*, normalizer=None, cutter=None, after=None):
    library = Tokenizer(models.BPE())
    library.normalizer = normalizer
    library.pre_tokenizer = cutter or pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=["<a>"],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    library.train_from_iterator(TEXTS, trainer)
    library.add_tokens(["<b>"])
    if after is not None:
        library.post_processor = after
    return library


SPLIT = pre_tokenizers.Split(Regex(r"\d|\s+|\w+"), "isolated")
BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
TAKEN = {
    "byte level": trained(),
    "cut and composed, as Qwen": trained(
        normalizer=normalizers.NFC(),
        cutter=pre_tokenizers.Sequence([SPLIT, BYTES]),
        after=processors.ByteLevel(trim_offsets=False),
    ),
    "normalised by nothing, as DeepSeek": trained(normalizer=normalizers.Sequence([])),
    "composed by a sequence": trained(normalizer=normalizers.Sequence([normalizers.NFC()])),
    "with a template": trained(
        after=processors.TemplateProcessing(single="<a> $0", special_tokens=[("<a>", 0)])
    ),
    "white space taken out": trained(
        cutter=pre_tokenizers.Sequence([pre_tokenizers.Split(" ", "removed"), BYTES])
    ),
}
spans_of_texts = st.lists(
    st.tuples(st.lists(st.sampled_from(WORDS), max_size=8).map("".join), st.integers(0, 99)),
    max_size=4,
)


def spans_in(text, seed):
    rng = random.Random(seed)
    bounds = sorted(rng.randint(0, len(text)) for _ in range(2 * rng.randint(0, 3)))
    return list(zip(bounds[0::2], bounds[1::2], strict=True))


@pytest.mark.parametrize("name", TAKEN)
@given(drawn=spans_of_texts)
def test_tokens_and_masks_are_those_that_offsets_give(name, drawn):
    texts = [text for text, _ in drawn]
    spans = [spans_in(text, seed) for text, seed in drawn]
    by_lengths, by_offsets = BpeEncoder(TAKEN[name], None), BpeEncoder(TAKEN[name], None)
    vars(by_offsets)["_bytes"] = None

    tokens, mask = by_lengths.encode_spans(texts, spans)
    wanted, wanted_mask = by_offsets.encode_spans(texts, spans)

    assert tokens.values_V.tolist() == wanted.values_V.tolist()
    assert tokens.offsets.tolist() == wanted.offsets.tolist()
    assert mask.values_V.tolist() == wanted_mask.values_V.tolist()


def test_lengths_tell_without_offsets_and_texts_that_they_do_not_cover_are_left_alone():
    library = TAKEN["byte level"]
    encoder, lengths = BpeEncoder(library, None), TokenBytes.of(library)
    tokens, mask = encoder.encode_spans(["the 🙂 cat<a>"], [[(4, 9)]])

    assert lengths is not None
    assert lengths.mask(tokens, ["the 🙂 cat<a>"], [[(4, 9)]]).tolist() == mask.values_V.tolist()
    assert 0 < np.count_nonzero(mask.values_V) < len(mask.values_V)
    assert lengths.mask(tokens, ["the 🙂 cats<a>"], [[(4, 9)]]) is None


def with_a_strip():
    library = trained()
    library.add_special_tokens([AddedToken("<c>", lstrip=True)])
    return library


def with_dropout():
    library = trained()
    library.model.dropout = 0.1
    return library


OTHERS = {
    "lower case": trained(normalizer=normalizers.Lowercase()),
    "composed and lower case": trained(
        normalizer=normalizers.Sequence([normalizers.NFC(), normalizers.Lowercase()])
    ),
    "a space before": trained(cutter=pre_tokenizers.ByteLevel(add_prefix_space=True)),
    "offsets that are trimmed": trained(after=processors.ByteLevel(trim_offsets=True)),
    "no bytes": trained(cutter=pre_tokenizers.Whitespace()),
    "a token that takes white space": with_a_strip(),
    "merges left out at random": with_dropout(),
    "no BPE": Tokenizer(models.WordLevel({"a": 0}, unk_token="a")),
}


@pytest.mark.parametrize("name", OTHERS)
def test_what_stands_for_something_else_than_bytes_has_no_lengths(name):
    assert TokenBytes.of(OTHERS[name]) is None

"""Texts of samples, as the tables of ``mix audit`` and ``mix preview`` show them."""

import numpy as np
import pytest

from omniload.commands.samples import SampleTexts, text_of
from omniload.mix.config import BpeTokenizer
from omniload.source.tokenize import ByteEncoder, open_tokenizer
from tests.support.chats import QWEN, write_model
from tests.support.drawn import PLACEHOLDER, a_drawn_mix

WIDTH = 60


def tokenizer_of_special_placeholder(folder):
    write_model(folder, QWEN, [f"<|{i}|>" for i in range(PLACEHOLDER + 1)])
    made = open_tokenizer(BpeTokenizer(type="bpe", path="tokenizer.json"), folder)
    assert text_of(np.array([PLACEHOLDER]), made) == "", "the placeholder is a special token"
    return made


@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize("kind", ["bpe", "bytes"])
def test_an_image_of_more_tokens_than_are_shown_leaves_its_caption_in_sight(
    tmp_path, kind, special
):
    mix = a_drawn_mix(tmp_path)
    tokenizer = ByteEncoder() if kind == "bytes" else tokenizer_of_special_placeholder(tmp_path)
    words = tokenizer.encode_spans(["a cat"], [()])[0].values_V
    tokens = np.concatenate([np.full(256, PLACEHOLDER), words, np.full(1, PLACEHOLDER), words])

    texts, source = SampleTexts(mix, tokenizer), mix.names.index("captions")

    shown = texts.of(source, tokens, WIDTH, special=special)
    assert shown == "<256 image tokens>a cat<1 image token>a cat"
    assert len(texts.of(source, np.tile(tokens, 99), WIDTH, special=special)) < 2 * WIDTH

"""The encodings of tiktoken, and the conversion of a file of ranks to a ``tokenizer.json``.

An encoding defines how text is split before tokens are merged, and which tokens are special. The library's own table
creates an encoding and downloads its file of ranks in one call; here, the user provides the file. A test compares this
table with the library's.

Models on a hub, and their tools, need a ``tokenizer.json``. Both kinds of files merge byte pairs, but they name merges
in different ways, and their libraries use different engines of regular expressions. The result is therefore read back
and compared: with every token of the vocabulary, with all tokens in a random order, and with texts on which regular
expressions differ.

Source:
    https://github.com/openai/tiktoken, ``tiktoken_ext/openai_public.py``, MIT licence.
"""

import json
import random
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import tokenizers

from omniload.base.errors import ConfigError
from omniload.mix.schema.tokenizers import EncodingName, TiktokenTokenizer
from omniload.source.byte_pairs.files import RANKS, parse_ranks, read_tokenizer
from omniload.source.tokenize import Tokenizer, open_tokenizer

__all__ = ["ENCODINGS", "EncodingRules", "tokenizer_json"]

_END = "<|endoftext|>"
_PREFIX, _MIDDLE, _SUFFIX = "<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>"
_END_OF_PROMPT = "<|endofprompt|>"

_R50K = r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"""
_CL100K = (
    r"""'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n]*+"""
    r"""|\s++$|\s*[\r\n]|\s+(?!\S)|\s"""
)
_O200K = "|".join(
    [
        r"""[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?""",
        r"""[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?""",
        r"""\p{N}{1,3}""",
        r""" ?[^\s\p{L}\p{N}]+[\r\n/]*""",
        r"""\s*[\r\n]+""",
        r"""\s+(?!\S)""",
        r"""\s+""",
    ]
)
_HARMONY = {
    "<|startoftext|>": 199998,
    _END: 199999,
    "<|return|>": 200002,
    "<|constrain|>": 200003,
    "<|channel|>": 200005,
    "<|start|>": 200006,
    "<|end|>": 200007,
    "<|message|>": 200008,
    "<|call|>": 200012,
    _END_OF_PROMPT: 200018,
}
# 200018 has two names in the library's table.
_RESERVED = sorted({*range(200000, 201088)} - {*_HARMONY.values()} | {200018})


@dataclass(frozen=True, slots=True)
class EncodingRules:
    """An encoding, apart from its ranks."""

    pattern: str
    """Regular expression for the pieces in which tokens are merged."""
    special: Mapping[str, int]
    """Special tokens, with their ids."""


ENCODINGS: Mapping[EncodingName, EncodingRules] = {
    "gpt2": EncodingRules(_R50K, {_END: 50256}),
    "r50k_base": EncodingRules(_R50K, {_END: 50256}),
    "p50k_base": EncodingRules(_R50K, {_END: 50256}),
    "p50k_edit": EncodingRules(
        _R50K, {_END: 50256, _PREFIX: 50281, _MIDDLE: 50282, _SUFFIX: 50283}
    ),
    "cl100k_base": EncodingRules(
        _CL100K,
        {_END: 100257, _PREFIX: 100258, _MIDDLE: 100259, _SUFFIX: 100260, _END_OF_PROMPT: 100276},
    ),
    "o200k_base": EncodingRules(_O200K, {_END: 199999, _END_OF_PROMPT: 200018}),
    "o200k_harmony": EncodingRules(
        _O200K, {**_HARMONY, **{f"<|reserved_{number}|>": number for number in _RESERVED}}
    ),
}
"""Encodings by tiktoken's names."""

_PRINTABLE = [*range(33, 127), *range(161, 173), *range(174, 256)]
"""Bytes that a ``tokenizer.json`` writes as letters of Latin-1; other bytes become letters from 256 on."""
_LETTERS = {byte: chr(byte) for byte in _PRINTABLE}
_LETTERS |= {b: chr(256 + i) for i, b in enumerate(sorted({*range(256)} - {*_PRINTABLE}))}
_POSSESSIVE = re.compile(
    r"(\\p\{\w+\}|\[(?:\\.|[^\]\\])*\]|\\.|[^\\\[\](){}|+*?])([+*?]|\{\d+(?:,\d*)?\})\+"
)
_AT_ONCE = 1_000
_JOINED = 40
"""Tokens per text in the comparison of random orders."""
# Texts on which engines of regular expressions differ: letters that fold to ASCII (the long s, the Kelvin sign), blanks
# outside of ASCII, runs that a pattern limits, marks, and symbols of many bytes.
_PROBES = (
    "The cat's dog'S can't WON'T we'll they've I'm you'd it'\u017f \u017fs K's İi ǅ ﬁ ß",
    "  two\t\ttabs \n\n lines\r\n\r\n  \n   end   ",
    " \u00a0\u2003\u3000x\u0085y\u180ez\u200b \u2028\u2029 ",
    "1 22 333 4444 1234567 ٣٤٥٦٧ Ⅷ ½ x²",
    "naïve café Straße Ελληνικά русский العربية עברית हिन्दी ไทย 漢字 かな 한국어 👩\u200d🚀 🇩🇪 e\u0301",
    "def f(x):\n    return x[0] + 1  # ok!?\n\n\n\tself.y /= -2 // 3\n",
    "a" * 70 + " " * 70 + "\n" * 7 + "-" * 70 + "0" * 70,
    "\x00\x01\x7f \ufffd \U0010ffff",
)


def tokenizer_json(config: TiktokenTokenizer, base_dir: Path) -> bytes:
    """Return the tokenizer of a file of ranks as a ``tokenizer.json`` with the same ids.

    In the result, special tokens in a text become one token each, as in its library; all other tokens are those of a
    document.

    Raises:
        ConfigError: The file has no ranks, or one of the compared texts gets other ids.
    """
    path = base_dir / config.path
    rules = ENCODINGS[config.encoding]
    ranks = parse_ranks(read_tokenizer(path, what=RANKS), path)
    special = dict(rules.special if config.special_tokens is None else config.special_tokens)
    # Without the tokens that begin and end a document, which would surround each compared text.
    plain = config.model_copy(update={"begin_of_document": None, "end_of_document": None})
    written = json.dumps(_written(ranks, rules.pattern, special, path), ensure_ascii=False)
    _require_same(written, open_tokenizer(plain, base_dir), ranks, special, path)
    return written.encode()


def _written(
    ranks: Mapping[bytes, int], pattern: str, special: Mapping[str, int], path: Path
) -> dict[str, object]:
    vocabulary = {_lettered(token): rank for token, rank in ranks.items()}
    if both := sorted(vocabulary.keys() & special.keys()):
        raise ConfigError(
            f"{path}: special token {both[0]!r} is a token of text too, and a tokenizer.json tells them apart by "
            "what they say; export without it: name others in special_tokens"
        )
    # In the order in which the library must merge: by the rank of the merged pair, as in tiktoken.
    merges = [
        (ranks[token], ranks[token[:cut]], _lettered(token[:cut]), _lettered(token[cut:]))
        for token in ranks
        for cut in range(1, len(token))
        if token[:cut] in ranks and token[cut:] in ranks
    ]
    added = [
        {"id": number, "content": token, "special": True, "normalized": False}
        | dict.fromkeys(("single_word", "lstrip", "rstrip"), False)
        for token, number in sorted(special.items(), key=lambda item: item[1])
    ]
    split = {"type": "Split", "pattern": {"Regex": _for_oniguruma(pattern)}, "invert": False}
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    return {
        "version": "1.0",
        "added_tokens": added,
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [split | {"behavior": "Isolated"}, level | {"use_regex": False}],
        },
        "decoder": level | {"use_regex": True},
        # Special tokens are part of the vocabulary, because otherwise the library would number them after the last
        # token.
        "model": {
            "type": "BPE",
            # As in tiktoken, a piece that is a token becomes this token, whatever merges would give.
            "ignore_merges": True,
            "vocab": vocabulary | dict(special),
            "merges": [[left, right] for *_, left, right in sorted(merges)],
        },
    }


def _lettered(token: bytes) -> str:
    return "".join(_LETTERS[byte] for byte in token)


def _for_oniguruma(pattern: str) -> str:
    """Convert a pattern for a ``tokenizer.json``, in which ``{1,3}+`` repeats and ``$`` matches the end of a line."""
    return _POSSESSIVE.sub(r"(?>\1\2)", pattern).replace("$", r"\z")


def _require_same(
    written: str,
    ours: Tokenizer,
    ranks: Mapping[bytes, int],
    special: Mapping[str, int],
    path: Path,
) -> None:
    """Compare the written tokenizer with the original one.

    Raises:
        ConfigError: Shows the first text with other ids.
    """
    theirs = tokenizers.Tokenizer.from_str(written)
    each = [text for token in ranks if (text := token.decode(errors="ignore")).encode() == token]
    # In a random order, so that tokens that are never neighbours in text are also separated.
    mixed = random.Random(0).sample(each, len(each))  # noqa: S311 -- the same in every run
    joined = ["".join(mixed[at : at + _JOINED]) for at in range(0, len(mixed), _JOINED)]
    texts = [
        # One tokenizer reads a special token in a text as text, and the other as a token.
        text
        for text in (*_PROBES, *each, *joined)
        if not any(token in text for token in special)
    ]
    for start in range(0, len(texts), _AT_ONCE):
        batch = texts[start : start + _AT_ONCE]
        column = ours.encode(batch)
        found = theirs.encode_batch_fast(batch, add_special_tokens=False)
        for i, (text, other) in enumerate(zip(batch, found, strict=True)):
            if other.ids != (ids := column[i].tolist()):
                raise ConfigError(
                    f"{path}: as a tokenizer.json it would cut text in another way: {text[:60]!r} is {ids[:12]} and "
                    f"would be {other.ids[:12]}; give this file to the users of the model, who read it with tiktoken"
                )
    for token, number in special.items():
        if theirs.token_to_id(token) != number:
            raise ConfigError(
                f"{path}: special token {token!r} would be {theirs.token_to_id(token)} in a tokenizer.json, not "
                f"{number}; give this file to the users of the model, who read it with tiktoken"
            )

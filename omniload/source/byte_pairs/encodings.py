"""The encodings of tiktoken: how text is split before tokens are merged, and which tokens are special.

Its own table makes an encoding and fetches the file of ranks in one call; here the file is the user's. A test
compares this table with that one.

Source:
    https://github.com/openai/tiktoken, ``tiktoken_ext/openai_public.py``, MIT licence.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from omniload.mix.schema.tokenizers import EncodingName

__all__ = ["ENCODINGS", "EncodingRules"]

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
_RESERVED = sorted({*range(200000, 201088)} - {*_HARMONY.values()} | {200018})


@dataclass(frozen=True, slots=True)
class EncodingRules:
    """What an encoding is beside its ranks."""

    pattern: str
    """Regular expression of the pieces that tokens are merged within."""
    special: Mapping[str, int]
    """Special tokens and their ids."""


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
"""By the names that tiktoken has for them."""

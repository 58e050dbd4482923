"""A small vocabulary of byte pairs, from the tokenizers library, also as a rank file of tiktoken."""

import base64
import json

from tokenizers import Regex, Tokenizer, models, pre_tokenizers, trainers

TEXTS = [
    "The cat sat on the mat, and the dog's bone wasn't there: they'll look.",
    "  indented\n\n\tby tabs, 1234567 times 3.14 — café, naïve, 漢字 かな, 👩‍🚀!",
    "def f(x):\n    return x  # <|endoftext|> is text here\n\n\n" + " " * 40 + "end",
    "ALLCAPS CamelCase snake_case DON'T I'VE we're\r\n\r\n",
]

CL100K = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""The pattern of CL100K as in ``tokenizer.json`` on hubs: greedy. tiktoken's own pattern has possessive repeats."""


def trained(pattern=None):
    """Return a tokenizer of the tokenizers library over bytes, split as GPT-2 does or by a pattern."""
    library = Tokenizer(models.BPE())
    whole = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pattern is None)
    library.pre_tokenizer = (
        whole
        if pattern is None
        else pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(pattern), "isolated"), whole])
    )
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    library.train_from_iterator(TEXTS * 3, trainer)
    return library


def ranks_of(library):
    """Return the rank of every token by its bytes; the library writes the bytes as letters."""
    letters = [b for b in range(256) if 33 <= b <= 126 or 161 <= b <= 172 or 174 <= b <= 255]
    byte_of = {chr(byte): byte for byte in letters}
    byte_of |= {chr(256 + i): b for i, b in enumerate(b for b in range(256) if b not in letters)}
    vocabulary = json.loads(library.to_str())["model"]["vocab"]
    return {bytes(byte_of[c] for c in token): number for token, number in vocabulary.items()}


def write_ranks(path, ranks):
    """Write a file of ranks."""
    lines = (b"%s %d\n" % (base64.b64encode(token), rank) for token, rank in ranks.items())
    path.write_bytes(b"".join(lines))
    return path

"""Files of tokenizers: their places, their ranks, and everything that affects the tokens of a text."""

import base64
import difflib
import re
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Literal

import orjson
import tokenizers

from omniload.base.errors import ConfigError
from omniload.base.reading import read_small_file
from omniload.mix.schema.tokenizers import BpeTokenizer, TiktokenTokenizer, TokenizerConfig

__all__ = [
    "RANKS",
    "TOKENIZER_JSON",
    "content_of",
    "file_of",
    "folder_of",
    "library_of",
    "named_tokens",
    "other_kind",
    "parse_ranks",
    "read_library",
    "read_tokenizer",
]

TOKENIZER_JSON = "tokenizer.json"
"""Name of the file in the folder of a model on a hub."""
RANKS = "a file of ranks of tiktoken"
_LARGEST_BYTES = 256 << 20
"""Largest ``tokenizer.json``: ten times the size of one for a vocabulary of 256,000 tokens."""
_MOST_RANK = (1 << 31) - 1
_SHOWN = 60
_NAMED = 8
"""Special tokens that a message names; Llama 3 has 256 of them."""
_HEAD_BYTES = 4096
_RANK_LINE = re.compile(rb"[A-Za-z0-9+/]+={0,2} \d+\r?\n")


def library_of(config: TokenizerConfig | None) -> str:
    """Return the library of a tokenizer with its version, because another version may divide texts differently."""
    # The installed version is looked up, because only the module that opens the tokenizer imports the library.
    if isinstance(config, TiktokenTokenizer):
        try:
            return f"tiktoken {version('tiktoken')}"
        except PackageNotFoundError:
            return "tiktoken"  # the module that opens it says what to install
    return f"tokenizers {tokenizers.__version__}" if isinstance(config, BpeTokenizer) else "none"


def content_of(config: TokenizerConfig | None, base_dir: Path) -> bytes:
    """Return everything that affects the tokens of a text, except the token that ends a document.

    Raises:
        ConfigError: The file is missing.
    """
    match config:
        case BpeTokenizer():
            return read_tokenizer(base_dir / config.path)
        case TiktokenTokenizer():
            # The same ranks divide text differently under another encoding.
            rules = orjson.dumps(
                [config.encoding, config.special_tokens], option=orjson.OPT_SORT_KEYS
            )
            return rules + b"\0" + read_tokenizer(base_dir / config.path, what=RANKS)
        case _:
            return b"bytes"


def folder_of(config: TokenizerConfig, base_dir: Path) -> Path:
    """Return the folder of a tokenizer's other files; the folder of the mix file if the tokenizer has no file."""
    path = file_of(config, base_dir)
    return base_dir if path is None else path.parent


def file_of(config: TokenizerConfig, base_dir: Path) -> Path | None:
    """Return the file of a tokenizer, if it has one; the file need not exist."""
    match config:
        case BpeTokenizer():
            return _file_of(base_dir / config.path)
        case TiktokenTokenizer():
            return base_dir / config.path
        case _:
            return None


def _file_of(path: Path) -> Path:
    """Return the tokenizer file in the folder of a model on a hub, or the path itself if it is a file."""
    return path / TOKENIZER_JSON if path.is_dir() else path


def read_tokenizer(path: Path, *, what: str = "a tokenizer.json") -> bytes:
    """Return the bytes of a tokenizer's file; for a folder, of the ``tokenizer.json`` in it.

    Raises:
        ConfigError: The file is missing, or is larger than any vocabulary.
    """
    try:
        file = path if what == RANKS else _file_of(path)
        return read_small_file(file, most_bytes=_LARGEST_BYTES, what=what)
    except ConfigError as error:
        raise ConfigError(f"tokenizer.path: {error}; relative ones start at the mix file") from None


def read_library(path: Path) -> tokenizers.Tokenizer:
    """Return the tokenizer of a ``tokenizer.json``.

    Raises:
        ConfigError: The file is missing, too large, or of another kind.
        Exception: The library's own, which has no class, for a file that it cannot read.
    """
    # From bytes that were read under a limit, because the library's own reading accepts a file of any size.
    data = read_tokenizer(path)
    if kind := other_kind(data, "bpe"):
        raise ConfigError(f"tokenizer.path: {path}: {kind}")
    return tokenizers.Tokenizer.from_str(data.decode())


def named_tokens(special: Sequence[str], wanted: str) -> str:
    """Return the special tokens that are most like ``wanted`` for a message, and how many others there are."""
    near = difflib.get_close_matches(wanted, special, n=_NAMED, cutoff=0.0)
    if others := len(special) - len(near):
        near.append(f"{others} others")
    return ", ".join(near) or "none"


def other_kind(data: bytes, named: Literal["bpe", "tiktoken"]) -> str:
    """Say which kind of tokenizer a file holds, and how to read it; empty if it may be of the kind that is named.

    ``tokenizer.model`` is the name of a file of SentencePiece (Llama 2, Mistral, Gemma) as well as of a file of ranks
    (Llama 3), so people take one for the other.

    Args:
        data: Content of the file.
        named: Type that the mix gives it.
    """
    head = data[:_HEAD_BYTES]
    if _is_sentencepiece(head):
        return (
            "is a model of SentencePiece; take the tokenizer.json of the same model (type: bpe), or write one with "
            "transformers and sentencepiece installed: AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER)"
        )
    if named != "tiktoken" and _RANK_LINE.match(head):
        return "is a file of ranks of tiktoken; say type: tiktoken, and the encoding"
    if head.lstrip().startswith(b"{"):
        if b'"token_bytes"' in head:
            return (
                "is a tekken.json of Mistral; take the tokenizer.json of the same model (type: bpe)"
            )
        if named != "bpe" and b'"added_tokens"' in head:
            return "is a tokenizer.json; say type: bpe"
    return ""


def _is_sentencepiece(head: bytes) -> bool:
    """Return whether a file begins as such a model: with a piece, which begins with its text and its score."""
    # In protobuf, 10 begins a message or text of the length that follows, and 21 a number of four bytes.
    if len(head) < 4 or head[0] != 10 or head[2] != 10:
        return False
    return head[4 + head[3] : 5 + head[3]] == b"\x15"


def parse_ranks(data: bytes, path: Path) -> dict[bytes, int]:
    """Return the rank of every token, by its bytes.

    Args:
        data: Content of the file.
        path: Path of the file, for messages.

    Raises:
        ConfigError: The file is of another kind, a line has no rank, a token or a rank occurs twice, or a byte is no
            token; gives the line and the remedy.
    """
    if kind := other_kind(data, "tiktoken"):
        raise ConfigError(f"tokenizer.path: {path}: {kind}")
    ranks: dict[bytes, int] = {}
    lines: dict[int, int] = {}
    for number, line in enumerate(data.splitlines(), 1):
        if not line:
            continue
        token, rank = _parsed(line, number, path)
        # Reported here with the line, because the library panics at two tokens of one rank, and names neither.
        if (first := lines.setdefault(rank, number)) != number:
            raise ConfigError(
                f"{path}:{number}: rank {rank} is that of line {first} too; take another file of ranks"
            )
        if token in ranks:
            raise ConfigError(
                f"{path}:{number}: token {token!r:.{_SHOWN}} is that of line {lines[ranks[token]]} too; take "
                "another file of ranks"
            )
        ranks[token] = rank
    # The library would panic at a text with a byte that is no token, and end the thread.
    if missing := [byte for byte in range(256) if bytes([byte]) not in ranks]:
        raise ConfigError(
            f"{path}: has {len(ranks)} tokens, but none for byte {missing[0]} and {len(missing) - 1} others; a file "
            "of ranks has a token for every byte, so it is cut short, or another kind of file"
        )
    return ranks


def _parsed(line: bytes, number: int, path: Path) -> tuple[bytes, int]:
    token, _, rank = line.partition(b" ")
    try:
        # ``int`` alone would accept signs, blanks and underscores.
        found = base64.b64decode(token, validate=True), int(rank) if rank.isdigit() else -1
    except ValueError:
        found = b"", -1
    if not found[0] or not 0 <= found[1] <= _MOST_RANK:
        raise ConfigError(
            f"{path}:{number}: holds {line!r:.{_SHOWN}}, not a token in base 64 and a rank from 0 to "
            f"{_MOST_RANK}; give the path of a file of ranks, such as cl100k_base.tiktoken"
        )
    return found

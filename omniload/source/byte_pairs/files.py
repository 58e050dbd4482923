"""Files of tokenizers: where they lie, what ranks they hold, and all that decides which tokens a text becomes."""

import base64
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

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
    "parse_ranks",
    "read_tokenizer",
]

TOKENIZER_JSON = "tokenizer.json"
"""Name of the file in the folder of a model, as hubs lay it out."""
RANKS = "a file of ranks of tiktoken"
_LARGEST_BYTES = 256 << 20
"""Largest ``tokenizer.json``: ten times that of a vocabulary of 256,000 tokens."""
_MOST_RANK = (1 << 31) - 1
_SHOWN = 60


def library_of(config: TokenizerConfig | None) -> str:
    """Return the library that a tokenizer runs in, and its version: another one may cut texts otherwise."""
    # By its installed version: the library is imported by the one that opens it alone.
    if isinstance(config, TiktokenTokenizer):
        try:
            return f"tiktoken {version('tiktoken')}"
        except PackageNotFoundError:
            return "tiktoken"  # whoever opens it says what to install
    return f"tokenizers {tokenizers.__version__}" if isinstance(config, BpeTokenizer) else "none"


def content_of(config: TokenizerConfig | None, base_dir: Path) -> bytes:
    """Return all that decides the tokens of a text, but for the token that ends a document.

    Raises:
        ConfigError: The file is missing.
    """
    match config:
        case BpeTokenizer():
            return read_tokenizer(base_dir / config.path)
        case TiktokenTokenizer():
            # The same ranks under another encoding cut text otherwise.
            rules = orjson.dumps(
                [config.encoding, config.special_tokens], option=orjson.OPT_SORT_KEYS
            )
            return rules + b"\0" + read_tokenizer(base_dir / config.path, what=RANKS)
        case _:
            return b"bytes"


def folder_of(config: TokenizerConfig, base_dir: Path) -> Path:
    """Return the folder that a tokenizer's other files lie in; that of the mix file where it has none."""
    path = file_of(config, base_dir)
    return base_dir if path is None else path.parent


def file_of(config: TokenizerConfig, base_dir: Path) -> Path | None:
    """Return the file of a tokenizer, if it has one; it need not be there."""
    match config:
        case BpeTokenizer():
            return _file_of(base_dir / config.path)
        case TiktokenTokenizer():
            return base_dir / config.path
        case _:
            return None


def _file_of(path: Path) -> Path:
    """Return the file in the folder of a model, as hubs lay it out, or the file itself."""
    return path / TOKENIZER_JSON if path.is_dir() else path


def read_tokenizer(path: Path, *, what: str = "a tokenizer.json") -> bytes:
    """Return the bytes of a file of a tokenizer; of a folder, those of the ``tokenizer.json`` in it.

    Raises:
        ConfigError: There is no such file, or it is larger than any vocabulary.
    """
    try:
        file = path if what == RANKS else _file_of(path)
        return read_small_file(file, most_bytes=_LARGEST_BYTES, what=what)
    except ConfigError as error:
        raise ConfigError(f"tokenizer.path: {error}; relative ones start at the mix file") from None


def parse_ranks(data: bytes, path: Path) -> dict[bytes, int]:
    """Return the rank of every token, by its bytes.

    Args:
        data: What the file holds.
        path: Where it lies, for messages.

    Raises:
        ConfigError: A line is none of a file of ranks, a token or a rank stands there twice, or a byte is no token:
            with the line, and what to do.
    """
    ranks: dict[bytes, int] = {}
    lines: dict[int, int] = {}
    for number, line in enumerate(data.splitlines(), 1):
        if not line:
            continue
        token, rank = _parsed(line, number, path)
        # Told by the line: at two tokens of a rank the library panics, and names neither.
        if (first := lines.setdefault(rank, number)) != number:
            raise ConfigError(
                f"{path}: line {number}: rank {rank} is that of line {first} too; take another file of ranks"
            )
        if token in ranks:
            raise ConfigError(
                f"{path}: line {number}: token {token!r:.{_SHOWN}} is that of line {lines[ranks[token]]} too; take "
                "another file of ranks"
            )
        ranks[token] = rank
    # The library ends the process's thread, by a panic, at a text with a byte that it has no token for.
    if missing := [byte for byte in range(256) if bytes([byte]) not in ranks]:
        raise ConfigError(
            f"{path}: has {len(ranks)} tokens, and none for byte {missing[0]} and {len(missing) - 1} others; every "
            "byte is a token of a file of ranks: it is cut short, or another kind of file"
        )
    return ranks


def _parsed(line: bytes, number: int, path: Path) -> tuple[bytes, int]:
    token, _, rank = line.partition(b" ")
    try:
        # ``int`` alone would take signs, blanks and underscores.
        found = base64.b64decode(token, validate=True), int(rank) if rank.isdigit() else -1
    except ValueError:
        found = b"", -1
    if not found[0] or not 0 <= found[1] <= _MOST_RANK:
        raise ConfigError(
            f"{path}: line {number}: holds {line!r:.{_SHOWN}}, not a token in base 64 and a rank from 0 to "
            f"{_MOST_RANK}; give the path of a file of ranks, such as cl100k_base.tiktoken"
        )
    return found

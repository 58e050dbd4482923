"""Files of tokenizers: where they lie, and all that decides which tokens a text becomes."""

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
    "read_tokenizer",
]

TOKENIZER_JSON = "tokenizer.json"
"""Name of the file in the folder of a model, as hubs lay it out."""
RANKS = "a file of ranks of tiktoken"
_LARGEST_BYTES = 256 << 20
"""Largest ``tokenizer.json``: ten times that of a vocabulary of 256,000 tokens."""


def library_of(config: TokenizerConfig | None) -> str:
    """Return the library that a tokenizer runs in, and its version: another one may cut texts otherwise."""
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

"""Files of ranks: a token in base 64 and its rank on every line, as tiktoken and Llama 3 write them."""

import base64
from pathlib import Path

from omniload.base.errors import ConfigError

__all__ = ["parse_ranks"]

_MOST_RANK = (1 << 31) - 1
_SHOWN = 60


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
        found = base64.b64decode(token, validate=True), int(rank) if rank.isdigit() else -1
    except ValueError:
        found = b"", -1
    if not found[0] or not 0 <= found[1] <= _MOST_RANK:
        raise ConfigError(
            f"{path}: line {number}: holds {line!r:.{_SHOWN}}, not a token in base 64 and a rank from 0 to "
            f"{_MOST_RANK}; give the path of a file of ranks, such as cl100k_base.tiktoken"
        )
    return found

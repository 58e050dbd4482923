"""Samples as readable text."""

from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from omniload.source.tokenize import Tokenizer

__all__ = ["runs_of", "text_of"]


def text_of(
    tokens: NDArray[np.integer[Any]],
    tokenizer: Tokenizer | None,
    width: int = 0,
    *,
    special: bool = False,
) -> str:
    """Return the text of tokens, or their ids if the mix names no tokenizer.

    Args:
        tokens: Token ids.
        tokenizer: Tokenizer of the mix.
        width: Wanted number of characters; 0 for all. No more tokens than that are decoded.
        special: Whether to show special tokens as well.
    """
    # A token stands for at least one character, except special tokens, which show nothing.
    wanted = tokens[: width + 1] if width else tokens
    if tokenizer is None:
        return " ".join(map(str, wanted.tolist()))
    return tokenizer.decode(wanted, special=special)


def runs_of(trained_T: NDArray[np.bool_]) -> list[tuple[int, int, bool]]:
    """Return the stretches of tokens that are trained on, and of those that are not: begin, end, and which kind."""
    if not len(trained_T):
        return []
    bounds = [0, *(np.flatnonzero(np.diff(trained_T)) + 1).tolist(), len(trained_T)]
    return [(a, b, bool(trained_T[a])) for a, b in pairwise(bounds)]

"""Samples as people read them."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from omniload.source.tokenize import Tokenizer

__all__ = ["text_of"]


def text_of(tokens: NDArray[np.integer[Any]], tokenizer: Tokenizer | None, width: int = 0) -> str:
    """Return the text of tokens, or their ids where the mix names no tokenizer.

    Args:
        tokens: Token ids.
        tokenizer: Tokenizer of the mix.
        width: Characters that are wanted; 0 for all. No more tokens than that are decoded.
    """
    # A token stands for one character at least, but for special tokens, which show nothing.
    wanted = tokens[: width + 1] if width else tokens
    if tokenizer is None:
        return " ".join(map(str, wanted.tolist()))
    return tokenizer.decode(wanted)

"""Texts that costs and strategies may get: texts that name kinds of documents, and that numpy stores unchanged.

Shape suffixes:
    N  samples
"""

import numpy as np
from numpy.typing import NDArray

from omniload.base.ragged import Ragged

__all__ = ["INSTEAD", "LONGEST_WORD", "fault_of_words", "shown", "unfit_words"]

LONGEST_WORD = 64
"""Bytes of such a text at most, in UTF-8."""
INSTEAD = (
    "have the cost or strategy read a tag of fewer and shorter values, such as a language or a kind of document, or a "
    "number (dtype: int64, float32)"
)
"""Remedy for a tag with unsuitable texts."""
_SHOWN = 40


def shown(text: str) -> str:
    """Return a text in quotes for a message; a long text is cut."""
    return repr(text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…")


def unfit_words(texts_N: Ragged) -> NDArray[np.bool_]:
    """Return which texts, in UTF-8, are unsuitable because they are too long or end in NUL, ``[N]``."""
    unfit_N = texts_N.lengths_N > LONGEST_WORD
    filled = np.flatnonzero(texts_N.lengths_N)
    # An array of strings has no NUL at the end of one: two different texts would be the same to a cost.
    unfit_N[filled] |= texts_N.values_V[texts_N.offsets[1:][filled] - 1] == 0
    return unfit_N


def fault_of_words(texts_N: Ragged, given_N: NDArray[np.bool_] | None = None) -> str:
    """Return the first text that no cost can be given, what is wrong with it and what to do; empty of sound ones.

    Args:
        texts_N: Texts in UTF-8.
        given_N: Which of them are given; without it all.
    """
    unfit_N = unfit_words(texts_N)
    if given_N is not None:
        unfit_N &= given_N
    if not unfit_N.any():
        return ""
    at = int(unfit_N.argmax())
    text = shown(bytes(texts_N[at]).decode(errors="replace"))
    if (size_bytes := int(texts_N.lengths_N[at])) > LONGEST_WORD:
        return f"{text} of {size_bytes:,} bytes, more than {LONGEST_WORD}; {INSTEAD}"
    return f"{text}, which ends in NUL, and an array of strings has it without; write it without, or {INSTEAD}"

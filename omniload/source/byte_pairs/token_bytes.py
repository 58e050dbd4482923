"""Where tokens lie in a text: by the lengths of a byte-level vocabulary alone, and as a mask of ranges.

Encoding with offsets takes the library a quarter longer. Where each token stands for bytes of the text as they are,
the lengths of tokens say the same.

Shape suffixes:
    N  texts        V  tokens of all texts together
"""

import json
import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, Self

import numpy as np
import tokenizers
from numpy.typing import NDArray

from omniload.base.ragged import Ragged

__all__ = ["TokenBytes", "marked_ranges"]

_NOT_BYTES = -(1 << 40)
"""Length of a token that stands for no bytes: texts with one never add up."""
_CUTTERS = frozenset({"Split", "Digits", "Punctuation"})
"""Pre-tokenizers that add nothing to a text. What one takes out is missing from the sum of lengths."""


@dataclass(frozen=True, slots=True)
class TokenBytes:
    """Lengths of the tokens of a vocabulary."""

    lengths: NDArray[np.int64]
    """Bytes that each id stands for."""
    is_composed: bool
    """Whether texts are brought into the form NFC before: others than those in it are not taken."""

    @classmethod
    def of(cls, library: tokenizers.Tokenizer) -> Self | None:
        """Return the lengths; ``None`` where tokens may stand for something else than bytes as they are."""
        normalizer = _state_of(library.normalizer)
        cutters = _flat(_state_of(library.pre_tokenizer), "pretokenizers")
        after = _flat(_state_of(library.post_processor), "processors")
        added = library.get_added_tokens_decoder()
        if (
            not _is_plain(library.model)
            or normalizer.get("type") not in {None, "NFC"}
            or [each["type"] for each in cutters if each["type"] not in _CUTTERS] != ["ByteLevel"]
            or any(each.get("add_prefix_space") for each in cutters)
            or any(_trims(each) for each in after)
            or any(token.lstrip or token.rstrip for token in added.values())
        ):
            return None
        vocabulary = library.get_vocab(with_added_tokens=False)
        # By id: a vocabulary may have holes, whose ids no text comes to.
        lengths = np.full(max((*vocabulary.values(), *added), default=-1) + 1, _NOT_BYTES, np.int64)
        letters = frozenset(tokenizers.pre_tokenizers.ByteLevel.alphabet())
        for word, number in vocabulary.items():
            if letters.issuperset(word):
                lengths[number] = len(word)
        for number, token in added.items():
            lengths[number] = len(token.content.encode())
        return cls(lengths, normalizer.get("type") == "NFC")

    def mask(
        self, tokens: Ragged, texts: Sequence[str], spans: Sequence[Sequence[tuple[int, int]]]
    ) -> NDArray[np.bool_] | None:
        """Return which tokens spans of characters touch, ``[V]``; ``None`` where lengths do not add up.

        Args:
            tokens: Ids of each text, ``[N]``, without any that stands for nothing of it.
            texts: The texts.
            spans: Of each text, ranges of its characters, in order: first, and first behind.

        Returns:
            True from the token that holds the first byte of a span to the one that holds the first byte of its last
            character, as the library's offsets have it.
        """
        sizes_N = np.fromiter((_size(text) for text in texts), np.int64, len(texts))
        ends_V = np.cumsum(self.lengths[tokens.values_V])
        stops_N = np.concatenate((np.zeros(1, np.int64), ends_V))[tokens.offsets[1:]]
        # Text by text, not their sum: what one lacks another may have too much.
        if not np.array_equal(stops_N, np.cumsum(sizes_N)):
            return None
        # A letter and its accent become one character, of other bytes, of which the lengths may still add up.
        if self.is_composed and not all(unicodedata.is_normalized("NFC", text) for text in texts):
            return None
        begins_N = (stops_N - sizes_N).tolist()
        places = [
            begin + place
            for begin, text, its in zip(begins_N, texts, spans, strict=True)
            for place in _places(text, its)
        ]
        at = np.searchsorted(ends_V, np.asarray(places, np.int64), side="right")
        at[1::2] += 1
        return marked_ranges(at, len(ends_V))


def _size(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode())


def _places(text: str, spans: Sequence[tuple[int, int]]) -> Iterator[int]:
    """Yield the byte that the first and the last character of each span begins at; nothing of one without any."""
    bounds = [(first, stop - 1) for first, stop in spans if first < stop]
    # Characters are bytes here, and most texts are such.
    if text.isascii():
        yield from chain.from_iterable(bounds)
        return
    at = size = 0
    for place in chain.from_iterable(bounds):
        size += len(text[at:place].encode())
        at = place
        yield size


def _is_plain(model: tokenizers.models.Model) -> bool:
    """Whether a model is a BPE that merges what is there, always alike."""
    return (
        isinstance(model, tokenizers.models.BPE)
        and not model.dropout
        and not model.continuing_subword_prefix
        and not model.end_of_word_suffix
        and not model.byte_fallback
    )


def _state_of(part: Any) -> dict[str, Any]:  # noqa: ANN401 -- each kind of part is a class of its own
    """Return what a part of a tokenizer is made of, as its file has it."""
    state: dict[str, Any] = {} if part is None else json.loads(part.__getstate__())
    return state


def _flat(state: dict[str, Any], key: str) -> list[dict[str, Any]]:
    """Return the parts of a sequence, or the one that there is."""
    if state.get("type") != "Sequence":
        return [state] if state else []
    return [each for part in state[key] for each in _flat(part, key)]


def _trims(state: dict[str, Any]) -> bool:
    """Whether a post-processor moves offsets: the library's then pass over white space."""
    if state["type"] == "ByteLevel":
        return bool(state.get("trim_offsets", True))
    return bool(state["type"] != "TemplateProcessing")


def marked_ranges(bounds: Sequence[int] | NDArray[np.int64], size: int) -> NDArray[np.bool_]:
    """Return a mask that is true from each even bound to the next odd one; ranges may touch."""
    edges = np.zeros(size + 1, np.int32)
    places = np.asarray(bounds, np.int64)
    # ``at``: ranges that begin at one token each count; by index the last alone would.
    np.add.at(edges, places[0::2], 1)
    np.add.at(edges, places[1::2], -1)
    inside: NDArray[np.bool_] = np.cumsum(edges[:-1]) > 0
    return inside

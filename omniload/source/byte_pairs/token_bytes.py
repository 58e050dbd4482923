"""The places of tokens in a text, from the lengths of a byte-level vocabulary alone, and as a mask of ranges.

Encoding with offsets makes the library a quarter slower. If each token stands for unchanged bytes of the text, the
lengths of tokens give the same places.

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
"""Length of a token that stands for no bytes, so that the lengths of a text with it never add up."""
_CUTTERS = frozenset({"Split", "Digits", "Punctuation"})
"""Pre-tokenizers that add nothing to a text. Removed text is missing from the sum of lengths."""


@dataclass(frozen=True, slots=True)
class TokenBytes:
    """The lengths of the tokens of a vocabulary."""

    lengths: NDArray[np.int64]
    """Bytes that each id stands for."""
    is_composed: bool
    """Whether texts are normalised to NFC first; texts in other forms are not supported."""

    @classmethod
    def of(cls, library: tokenizers.Tokenizer) -> Self | None:
        """Return the lengths; ``None`` if tokens may stand for something else than unchanged bytes."""
        normalizers = [each["type"] for each in _flat(_state_of(library.normalizer), "normalizers")]
        cutters = _flat(_state_of(library.pre_tokenizer), "pretokenizers")
        after = _flat(_state_of(library.post_processor), "processors")
        added = library.get_added_tokens_decoder()
        if (
            not _is_plain(library.model)
            or normalizers not in ([], ["NFC"])
            or [each["type"] for each in cutters if each["type"] not in _CUTTERS] != ["ByteLevel"]
            or any(each.get("add_prefix_space") for each in cutters)
            or any(_trims(each) for each in after)
            or any(token.lstrip or token.rstrip for token in added.values())
        ):
            return None
        vocabulary = library.get_vocab(with_added_tokens=False)
        # Indexed by id, because a vocabulary may have gaps, whose ids no text produces.
        lengths = np.full(max((*vocabulary.values(), *added), default=-1) + 1, _NOT_BYTES, np.int64)
        letters = frozenset(tokenizers.pre_tokenizers.ByteLevel.alphabet())
        for word, number in vocabulary.items():
            if letters.issuperset(word):
                lengths[number] = len(word)
        for number, token in added.items():
            lengths[number] = len(token.content.encode())
        return cls(lengths, bool(normalizers))

    def mask(
        self, tokens: Ragged, texts: Sequence[str], spans: Sequence[Sequence[tuple[int, int]]]
    ) -> NDArray[np.bool_] | None:
        """Return which tokens spans of characters touch, ``[V]``; ``None`` if the lengths do not add up.

        Args:
            tokens: Ids of each text, ``[N]``, without ids that stand for nothing in it.
            texts: The texts.
            spans: For each text, ranges of its characters in order: first character, and first character after the
                range.

        Returns:
            True from the token with the first byte of a span to the token with the first byte of its last character,
            like the library's offsets.
        """
        sizes_N = np.fromiter((_size(text) for text in texts), np.int64, len(texts))
        ends_V = np.cumsum(self.lengths[tokens.values_V])
        stops_N = np.concatenate((np.zeros(1, np.int64), ends_V))[tokens.offsets[1:]]
        # Each text is compared, not their sum, because surplus in one text could cancel a lack in another.
        if not np.array_equal(stops_N, np.cumsum(sizes_N)):
            return None
        # A letter and its accent become one character with other bytes, but the lengths could still add up.
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
    """Yield the byte at which the first and the last character of each span begin; nothing for an empty span."""
    bounds = [(first, stop - 1) for first, stop in spans if first < stop]
    # Most texts are ASCII, in which characters are bytes.
    if text.isascii():
        yield from chain.from_iterable(bounds)
        return
    at = size = 0
    for place in chain.from_iterable(bounds):
        size += len(text[at:place].encode())
        at = place
        yield size


def _is_plain(model: tokenizers.models.Model) -> bool:
    """Return whether a model is a BPE that merges deterministically and adds nothing."""
    return (
        isinstance(model, tokenizers.models.BPE)
        and not model.dropout
        and not model.continuing_subword_prefix
        and not model.end_of_word_suffix
        and not model.byte_fallback
    )


def _state_of(part: Any) -> dict[str, Any]:  # noqa: ANN401 -- each kind of part has a class of its own
    """Return the settings of a part of a tokenizer, as in its file."""
    state: dict[str, Any] = {} if part is None else json.loads(part.__getstate__())
    return state


def _flat(state: dict[str, Any], key: str) -> list[dict[str, Any]]:
    """Return the parts of a sequence, or the single part."""
    if state.get("type") != "Sequence":
        return [state] if state else []
    return [each for part in state[key] for each in _flat(part, key)]


def _trims(state: dict[str, Any]) -> bool:
    """Return whether a post-processor moves offsets, because the library then skips white space."""
    if state["type"] == "ByteLevel":
        return bool(state.get("trim_offsets", True))
    return bool(state["type"] != "TemplateProcessing")


def marked_ranges(bounds: Sequence[int] | NDArray[np.int64], size: int) -> NDArray[np.bool_]:
    """Return a mask that is true from each even bound to the next odd one; ranges may touch."""
    edges = np.zeros(size + 1, np.int32)
    places = np.asarray(bounds, np.int64)
    # ``at``, because with indexing only the last of several ranges that begin at one token would count.
    np.add.at(edges, places[0::2], 1)
    np.add.at(edges, places[1::2], -1)
    inside: NDArray[np.bool_] = np.cumsum(edges[:-1]) > 0
    return inside

"""Documents and tokens by the values of a tag of samples, in bounded memory.

Shape suffixes:
    N  documents        S  sources
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Self

import numpy as np
from numpy.typing import NDArray

from omniload.base.ragged import Ragged
from omniload.mix.columns import column_kind, joined_ranges, name_outside
from omniload.mix.samples import Coded

__all__ = ["Counted", "TagCounts", "TagShare", "TagShares", "shares_of_run", "tags_counted"]

_MOST_VALUES = 4_096
"""Most values that are counted separately; a tag with more values is a key, not a kind of document."""


@dataclass(slots=True)
class Counted:
    """A number of documents, and their tokens."""

    documents: int = 0
    tokens: int = 0

    def add(self, documents: int, tokens: int) -> None:
        """Add documents and tokens."""
        self.documents += documents
        self.tokens += tokens


@dataclass(slots=True)
class TagCounts:
    """Documents and tokens of a source by the value of one tag."""

    tag: str
    """Inside name of the column."""
    by_value: dict[str, Counted] = field(default_factory=dict, init=False)
    """Counts by value, with texts unchanged and other values in JSON; only the values that are counted separately."""
    others: Counted = field(default_factory=Counted, init=False)
    """Counts of all other values."""

    def add(self, tags: Mapping[str, Ragged], tokens_N: NDArray[np.int64]) -> None:
        """Count documents.

        Args:
            tags: Tags of the first documents; if this tag is missing, all have its default.
            tokens_N: Trained tokens of each document; a document without any is not counted.
        """
        held = tags.get(self.tag, tokens_N)
        tokens_N = tokens_N[: len(held)]
        found = _coded(self.tag, joined_ranges(self.tag, [held]).packed())
        given_N, words = tokens_N > 0, found.words or ()
        codes_N = found.values_N[given_N]
        documents = np.bincount(codes_N, minlength=len(words))
        # Summed as doubles, but exact, because some thousand documents have far fewer than 2**53 tokens.
        tokens = np.bincount(codes_N, tokens_N[given_N], len(words)).astype(np.int64)
        for word, *counts in zip(words, documents.tolist(), tokens.tolist(), strict=True):
            if counts[0]:
                self._of(word).add(*counts)

    def _of(self, word: str) -> Counted:
        if word not in self.by_value and len(self.by_value) == _MOST_VALUES:
            return self.others
        return self.by_value.setdefault(word, Counted())

    @property
    def tokens(self) -> int:
        """Tokens of all documents."""
        return self.others.tokens + sum(each.tokens for each in self.by_value.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class TagShare:
    """The share of one value of a tag."""

    value: str
    documents: int
    """Number of surveyed documents with the value."""
    tokens: int
    """Tokens of these documents."""
    of_all: float
    """Share of all tokens; for a run, as far as its sources are like their surveyed parts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TagShares:
    """The shares of a tag's values, over all sources."""

    name: str
    values: Sequence[TagShare]
    """Shares of the values, the largest first."""
    rest: float = 0.0
    """Share of the values that are not counted separately."""

    @classmethod
    def of(
        cls, name: str, found: Mapping[str, tuple[Counted, float]], *, rest: float = 0.0
    ) -> Self:
        """Return the shares of values, given the counts of each and its share of the whole."""
        values = [
            TagShare(value=value, documents=counted.documents, tokens=counted.tokens, of_all=part)
            for value, (counted, part) in found.items()
        ]
        values.sort(key=lambda share: (-share.of_all, share.value))
        return cls(name=name, values=values, rest=rest)


def tags_counted(columns: Iterable[str]) -> tuple[str, ...]:
    """Return the tags whose values are counted; floating-point tags are left out, because nearly all values differ."""
    kinds = ((name, column_kind(name)) for name in columns)
    return tuple(name for name, kind in kinds if kind.is_tag and kind.dtype.kind != "f")


def shares_of_run(
    counts_S: Sequence[Sequence[TagCounts]], tokens_S: NDArray[np.float64]
) -> Iterator[TagShares]:
    """Yield the shares of each tag.

    Args:
        counts_S: Counts of each source, with the tags in one order.
        tokens_S: Tokens that the run takes from each source.
    """
    of_run_S = tokens_S / max(float(tokens_S.sum()), 1.0)
    for of_tag in zip(*counts_S, strict=True):
        found: dict[str, tuple[Counted, float]] = {}
        rest = 0.0
        for counts, part in zip(of_tag, of_run_S.tolist(), strict=True):
            per_token = part / max(counts.tokens, 1)
            rest += per_token * counts.others.tokens
            for value, counted in counts.by_value.items():
                whole, of_run = found.get(value, (Counted(), 0.0))
                whole.add(counted.documents, counted.tokens)
                found[value] = whole, of_run + per_token * counted.tokens
        yield TagShares.of(name_outside(of_tag[0].tag), found, rest=rest)


def _coded(tag: str, values_N: Ragged) -> Coded:
    if column_kind(tag).dtype == np.uint8:
        return Coded.of_texts(values_N)
    values, places_N = np.unique(values_N.values_V, return_inverse=True)
    words = tuple(str(value).lower() for value in values.tolist())
    return Coded(values_N=places_N, words=words)

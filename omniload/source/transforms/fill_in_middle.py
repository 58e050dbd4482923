"""Fill in the middle: a document is cut into three parts, and its middle is put last.

::

    psm   <prefix> A <suffix> C <middle> B          spm   <prefix> <suffix> C <middle> A B

The position of a document decides how it is rearranged. A generator that is a function of (seed, source, position)
draws the numbers for each document. So a resume needs no state, and each epoch cuts differently.

Source:
    Bavarian et al., "Efficient Training of Language Models to Fill in the Middle" (2022), for the forms;
    Steele, Lea and Flood, "Fast Splittable Pseudorandom Number Generators" (2014), for the mixing function.

Shape suffixes:
    N  samples        P  parts of a sample in its new order
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from omniload.base.ragged import Ragged, gather_ranges
from omniload.source.transforms.encoders import Samples

__all__ = ["MiddleFiller", "draws_at"]

_GOLDEN = 0x9E3779B97F4A7C15
_DRAWS = 4
"""Numbers drawn for a position: whether to rearrange, which form, and two cuts."""


def draws_at(key: int, positions_N: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return the numbers of each position, ``[4, N]``, uniform in [0, 1), from SplitMix64 at a counter.

    Args:
        key: 64 bits that are used for no other purpose.
        positions_N: Counters.
    """
    counters = positions_N.astype(np.uint64) * np.uint64(_DRAWS)
    counters = counters + np.arange(_DRAWS, dtype=np.uint64)[:, None]
    # Wraps at 2^64, as SplitMix64 does.
    mixed = np.uint64(key) + (counters + np.uint64(1)) * np.uint64(_GOLDEN)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        mixed = (mixed ^ (mixed >> np.uint64(shift))) * np.uint64(factor)
    mixed ^= mixed >> np.uint64(31)
    # The upper 53 bits, because a double has no more.
    return (mixed >> np.uint64(11)).astype(np.float64) * 2.0**-53


@dataclass(frozen=True, slots=True, kw_only=True)
class MiddleFiller:
    """Rearranges documents of one source."""

    rate: float
    """Share of documents that are rearranged."""
    spm: float
    """Share of the rearranged documents whose suffix comes first."""
    marks: Sequence[int]
    """Tokens that begin prefix, suffix and middle."""
    begin: int | None = None
    """Token that begins every document and stays first; ``None`` if there is no such token."""
    end: int | None
    """Token that ends every document and stays last; ``None`` if there is no such token."""
    key: int
    """Key that the draws depend on, in addition to the position."""

    @staticmethod
    def key_of(seed: int, source: str) -> int:
        """Return the key of a source."""
        text = f"omniload.fim\0001\0{seed}\0{source}"
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")

    def of(self, samples: Samples, positions_N: NDArray[np.int64]) -> Samples:
        """Return the rearranged samples; an empty sample stays empty."""
        tokens = samples.tokens
        values_V = np.ascontiguousarray(tokens.values_V)
        firsts_N, stops_N = tokens.offsets[:-1], tokens.offsets[1:]
        begins_N, ends_N = firsts_N.copy(), stops_N.copy()
        if self.begin is not None and len(values_V):
            first_N = values_V[np.minimum(firsts_N, len(values_V) - 1)]
            begins_N += (stops_N > firsts_N) & (first_N == self.begin)
        if self.end is not None and len(values_V):
            last_N = values_V[np.maximum(stops_N - 1, 0)]
            ends_N -= (stops_N > begins_N) & (last_N == self.end)
        chosen, form, *cuts = draws_at(self.key, positions_N)
        lengths_N = ends_N - begins_N
        # n tokens have n + 1 places for a cut: between them, before them and after them.
        middles_N2 = np.sort([(cut * (lengths_N + 1)).astype(np.int64) for cut in cuts], axis=0)
        a_N, b_N = begins_N + middles_N2
        marks_at = len(values_V) + np.arange(3)
        cut_N = (chosen < self.rate) & (lengths_N > 0)
        spm_N = form < self.spm
        # Parts are ranges of the tokens with the marks after them. The prefix has one of two places, and the part in
        # the other place is empty.
        before_N = np.where(spm_N, a_N, begins_N)
        parts = [
            (firsts_N, begins_N - firsts_N),
            (np.full_like(a_N, marks_at[0]), np.ones_like(a_N)),
            (before_N, a_N - before_N),
            (np.full_like(a_N, marks_at[1]), np.ones_like(a_N)),
            (b_N, ends_N - b_N),
            (np.full_like(a_N, marks_at[2]), np.ones_like(a_N)),
            (np.where(spm_N, begins_N, a_N), np.where(spm_N, b_N - begins_N, b_N - a_N)),
            (ends_N, stops_N - ends_N),
        ]
        starts_NP = np.stack([start for start, _ in parts], axis=1)
        sizes_NP = np.stack([size for _, size in parts], axis=1)
        sizes_NP[~cut_N] = 0
        sizes_NP[~cut_N, 0] = (stops_N - firsts_N)[~cut_N]
        # An empty part may begin at the end of its sample, or of all samples, where there is nothing to read.
        starts = np.where(sizes_NP > 0, starts_NP, 0).reshape(-1)
        made, offsets = gather_ranges(
            np.concatenate((values_V, np.asarray(self.marks, values_V.dtype))),
            starts,
            starts + sizes_NP.reshape(-1),
        )
        whole = Ragged(values_V=made, offsets=np.ascontiguousarray(offsets[:: len(parts)]))
        return replace(samples, tokens=whole)

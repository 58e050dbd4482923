"""Finds documents that occur more than once, by hash, in bounded memory.

All hashes are kept until there are too many. From then on, only hashes whose lowest bits are 0 are kept, with one more
bit each time. If a document is kept, so are all documents that equal it. The result is therefore a fair sample of all
documents, repeated or not.

Shape suffixes:
    N  documents        D  distinct documents of a source        S  sources
"""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import xxhash
from numpy.typing import NDArray

from omniload.base.ragged import Ragged

__all__ = ["DuplicateCounter", "Duplicates", "hashes_of"]

_MOST_KEPT = 1 << 24
"""Most hashes in memory: 200 MB with their sources, and three times as much during a sort."""
_MOST_TOGETHER = 16
"""Most sources of a document that are counted as pairs; of more sources, only the first ones count."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Duplicates:
    """The result; it counts the documents whose hashes were kept."""

    one_in: int
    """Number of hashes per kept hash; 1 if all were kept."""
    documents_S: NDArray[np.int64]
    """Documents of each source."""
    repeated_S: NDArray[np.int64]
    """Documents that equal an earlier document of the same source."""
    elsewhere_S: NDArray[np.int64]
    """Distinct documents that another source has, too."""
    pairs: tuple[tuple[int, int, int], ...]
    """Two sources, and the number of distinct documents that both have; the largest number first."""


class DuplicateCounter:
    """Counts equal documents within and across sources."""

    def __init__(self, num_sources: int, most_kept: int = _MOST_KEPT) -> None:
        self._num_sources, self._most = num_sources, most_kept
        self._mask = np.uint64(0)
        self._hashes: list[NDArray[np.uint64]] = []
        self._sources: list[NDArray[np.int32]] = []
        self._kept = 0

    def add(self, source: int, hashes_N: NDArray[np.uint64]) -> None:
        """Add documents of a source, by their hashes."""
        hashes_N = hashes_N[(hashes_N & self._mask) == 0]
        self._hashes.append(hashes_N)
        # One entry per hash, because hashes and sources are thinned and sorted together.
        self._sources.append(np.full(len(hashes_N), source, np.int32))
        self._kept += len(hashes_N)
        while self._kept > self._most:
            self._thin()

    def found(self) -> Duplicates:
        """Return the result so far."""
        hashes_N, sources_N = self._joined()
        # By hash, then by source, so that equal documents are neighbours, and those of one source among them.
        order = np.lexsort((sources_N, hashes_N))
        hashes_N, sources_N = hashes_N[order], sources_N[order]
        first_N = np.ones(len(hashes_N), np.bool_)
        first_N[1:] = (hashes_N[1:] != hashes_N[:-1]) | (sources_N[1:] != sources_N[:-1])
        hashes_D, sources_D = hashes_N[first_N], sources_N[first_N]
        shared_D = np.zeros(len(hashes_D), np.bool_)
        same = hashes_D[1:] == hashes_D[:-1]
        shared_D[1:] |= same
        shared_D[:-1] |= same
        return Duplicates(
            one_in=int(self._mask) + 1,
            documents_S=self._by_source(sources_N),
            repeated_S=self._by_source(sources_N[~first_N]),
            elsewhere_S=self._by_source(sources_D[shared_D]),
            pairs=self._pairs(hashes_D[shared_D], sources_D[shared_D]),
        )

    def _thin(self) -> None:
        self._mask = (self._mask << np.uint64(1)) | np.uint64(1)
        hashes_N, sources_N = self._joined()
        # By bits of the hash, so that equal documents are kept or dropped together.
        kept_N = (hashes_N & self._mask) == 0
        self._hashes, self._sources = [hashes_N[kept_N]], [sources_N[kept_N]]
        self._kept = int(np.count_nonzero(kept_N))

    def _joined(self) -> tuple[NDArray[np.uint64], NDArray[np.int32]]:
        return (
            np.concatenate([np.empty(0, np.uint64), *self._hashes]),
            np.concatenate([np.empty(0, np.int32), *self._sources]),
        )

    def _by_source(self, sources: NDArray[np.int32]) -> NDArray[np.int64]:
        return np.bincount(sources, minlength=self._num_sources).astype(np.int64)

    def _pairs(
        self, hashes_D: NDArray[np.uint64], sources_D: NDArray[np.int32]
    ) -> tuple[tuple[int, int, int], ...]:
        """Count pairs of sources, from distinct documents sorted by hash and source."""
        keys = [np.empty(0, np.int64)]
        # A document of n sources has n neighbouring entries, so each pair of them has a distance below n.
        for apart in range(1, _MOST_TOGETHER):
            same = hashes_D[apart:] == hashes_D[:-apart]
            if not same.any():
                break
            one, other = sources_D[:-apart][same], sources_D[apart:][same]
            keys.append(one.astype(np.int64) * self._num_sources + other)
        pairs, counts = np.unique(np.concatenate(keys), return_counts=True)
        order = np.argsort(-counts, kind="stable")
        return tuple(
            (key // self._num_sources, key % self._num_sources, count)
            for key, count in zip(pairs[order].tolist(), counts[order].tolist(), strict=True)
        )


def hashes_of(documents: Ragged) -> NDArray[np.uint64]:
    """Return a 64-bit hash of each sequence: equal sequences have equal hashes, on every machine."""
    values = np.ascontiguousarray(documents.values_V)
    # Slices of a memoryview are not copied.
    content, width = values.view(np.uint8).data, values.itemsize
    ends: Iterable[int] = (documents.offsets * width).tolist()
    digest = xxhash.xxh3_64_intdigest
    start, hashes = 0, []
    for i, end in enumerate(ends):
        if i:
            hashes.append(digest(content[start:end]))
        start = end
    return np.asarray(hashes, np.uint64)

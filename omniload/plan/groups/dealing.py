"""Groups of a round in an order of their own, and which rank trains on which group of a batch.

Shape suffixes:
    N  groups of a round        B  groups of a batch        W  ranks
"""

import numpy as np
from numpy.typing import NDArray

__all__ = ["EVERYBODY", "dealt", "in_order", "shares_of"]

EVERYBODY = -1
"""Owner of a group that every rank holds."""
# Constants of splitmix64: 2**64 over the golden ratio, odd, and the two factors of its finisher.
_ODD = np.uint64(0x9E3779B97F4A7C15)
_FIRST, _SECOND = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)


def in_order(keys_N3: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the order of the groups of a round: whatever ranks drew them, and of no source first.

    By their own numbers a source named early would stand first, and the surplus would be the others'.

    Args:
        keys_N3: Source, position and sub of each prompt; no two alike.

    Returns:
        Places in ``keys_N3``, ``[N]``.

    Source:
        Steele et al., "Fast Splittable Pseudorandom Number Generators" (2014), for the mixing of bits.
    """
    mixed_N = np.zeros(len(keys_N3), np.uint64)
    for column_N in keys_N3.astype(np.uint64).T:
        mixed_N = mixed_N * _ODD + column_N + _ODD
        mixed_N = (mixed_N ^ (mixed_N >> np.uint64(30))) * _FIRST
        mixed_N = (mixed_N ^ (mixed_N >> np.uint64(27))) * _SECOND
        mixed_N ^= mixed_N >> np.uint64(31)
    # Equal hashes are ordered by key, so that the order of the ranks' reports does not matter.
    return np.lexsort((*keys_N3.T, mixed_N))


def shares_of(groups: int, num_ranks: int) -> NDArray[np.int64]:
    """Return how many groups of a batch each rank has, ``[W]``: alike, the first ones one more where it is uneven."""
    whole, more = divmod(groups, num_ranks)
    return whole + (np.arange(num_ranks) < more).astype(np.int64)


def dealt(owners_B: NDArray[np.int64], num_ranks: int) -> NDArray[np.int64]:
    """Deal the groups of a batch to ranks, so that each has its share and few groups are sent.

    Args:
        owners_B: Rank that rolled each group out, or ``EVERYBODY``.
        num_ranks: Ranks.

    Returns:
        Rank that trains on each, ``[B]``; a rank has as many as ``shares_of`` says, its own before others'.
    """
    left_W = shares_of(len(owners_B), num_ranks)
    found_B = np.full(len(owners_B), EVERYBODY, np.int64)
    for rank in range(num_ranks):
        own = np.flatnonzero(owners_B == rank)[: left_W[rank]]
        found_B[own] = rank
        left_W[rank] -= len(own)
    # In the order of the batch, ranks by their numbers: each works this out by itself, and all come to the same.
    found_B[found_B == EVERYBODY] = np.repeat(np.arange(num_ranks), left_W)
    return found_B

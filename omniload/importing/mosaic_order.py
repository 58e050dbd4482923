"""The order of Mosaic Streaming as arithmetic: which samples of an epoch it hands out first.

An epoch consists of *places*, laid out over ``canonical_nodes`` equal stretches. The first ``drawn`` samples that any
number of ranks take together are the first places of every stretch, dealt in turn::

    stretch 0    0  3  6  9 | .  .        ten were drawn of three stretches
    stretch 1    1  4  7    | .  .
    stretch 2    2  5  8    | .  .

Shards are shuffled over the places of all stretches once a run, then those of a stretch once an epoch, and the samples
within them by one of five rules. Random draws come from numpy in the same order as in Mosaic, so a place holds the
same sample as there. The rules are those of streaming 0.6 to 0.13.

Shape suffixes:
    S  streams        H  shards        U  units: shards, or parts of shards, in an epoch
    P  pieces of units within one stretch      N  places of one stretch
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

__all__ = [
    "ALGORITHMS",
    "MOST_SAMPLES",
    "OrderSettings",
    "Shuffle",
    "chosen_of_shards",
    "chosen_of_streams",
    "first_places",
    "places_of",
]

_Ints = NDArray[np.int64]
MOST_SAMPLES = 1 << 31
"""Largest number of samples of an epoch, and of all streams: they are processed in memory, up to 8 bytes each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OrderSettings:
    """A training file's settings of the order of a dataset."""

    algorithm: str
    """One of ``ALGORITHMS``; ``none`` if samples are not shuffled."""
    block_size: int | None
    """Number of samples, if the file gives it."""
    balanced: bool
    """Whether every epoch chooses other samples of a stream of which it draws only a part."""
    granularity: int
    epoch_size: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Shuffle:
    """The shuffling of an epoch."""

    algorithm: str
    """One of ``ALGORITHMS``."""
    seed: int
    epoch: int
    block_size: int
    """Number of samples; only two of the rules use it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Stretch:
    """A stretch of places before its samples are shuffled: pieces of units, in the epoch's order."""

    begins_P: list[int]
    """First sample of each piece, in the numbering before shuffling."""
    sizes_P: list[int]

    def samples(self, piece: int) -> _Ints:
        """Return the samples of a piece, in their order."""
        return self.begins_P[piece] + np.arange(self.sizes_P[piece], dtype=np.int64)

    def all_samples(self) -> _Ints:
        """Return the samples of all pieces, end to end."""
        return np.concatenate([self.samples(p) for p in range(len(self.sizes_P))])


def first_places(places: int, stretches: int, drawn: int) -> _Ints:
    """Return how many places of each stretch were drawn, of ``drawn`` in all."""
    bounds = _bounds(places, stretches)
    turns = (drawn - np.arange(stretches, dtype=np.int64) + stretches - 1) // stretches
    # A stretch that is shorter than others hands out its last sample again.
    return np.clip(turns, 0, np.diff(bounds))


def places_of(units_U: _Ints, stretches: int, shuffle: Shuffle) -> Iterator[_Ints]:
    """Yield the sample at each place, one stretch at a time.

    Args:
        units_U: Samples of each unit, in the order of the dataset; each at least 1.
        stretches: Number of canonical nodes; below the number of samples.
        shuffle: The shuffling of the epoch.
    """
    return ALGORITHMS[shuffle.algorithm](units_U, stretches, shuffle)


def chosen_of_streams(
    samples_S: _Ints, proportions_S: Sequence[float] | None, epoch_size: int, seed: int
) -> _Ints:
    """Return the samples of each stream in an epoch of ``epoch_size``, by proportions if given, otherwise by size."""
    shares_S = np.array(samples_S if proportions_S is None else proportions_S, np.float64)
    shares_S /= shares_S.sum()
    chosen_S = (epoch_size * shares_S).astype(np.int64)
    missing = epoch_size - chosen_S.sum()
    # Without replacement, because += counts a repeated index only once.
    chosen_S[np.random.default_rng(seed).choice(len(chosen_S), missing, replace=False)] += 1
    return chosen_S


def chosen_of_shards(samples_H: _Ints, chosen: int, granularity: int, seed: int) -> _Ints:
    """Return how many samples of each shard of a stream are in an epoch, of ``chosen`` in all.

    Args:
        samples_H: Samples of each shard.
        chosen: Number of samples of the stream.
        granularity: Number of samples that are chosen from a shard at a time.
        seed: Seed of the choice.
    """
    whole, rest = divmod(chosen, int(samples_H.sum()))
    chosen_H = samples_H * whole
    if not rest:
        return chosen_H
    picks_H = -(-samples_H // granularity)
    shards = np.repeat(np.arange(len(samples_H)), picks_H)
    sizes = np.full(len(shards), granularity, np.int64)
    # The last pick of a shard is the rest of it.
    sizes[np.cumsum(picks_H) - 1] = samples_H - (picks_H - 1) * granularity
    order = np.random.default_rng(seed).permutation(len(shards))
    before = np.cumsum(sizes[order]) - sizes[order]
    taken = np.clip(rest - before, 0, sizes[order])
    chosen_H += np.bincount(shards[order], weights=taken, minlength=len(samples_H)).astype(np.int64)
    return chosen_H


def _bounds(places: int, stretches: int) -> _Ints:
    """Return the places where stretches begin, and the end."""
    # Python integers, because the product exceeds 64 bits if both are large.
    return np.array([places * part // stretches for part in range(stretches + 1)], np.int64)


def _stretches(
    units_U: _Ints, stretches: int, seed: int, epoch: np.random.Generator
) -> list[_Stretch]:
    """Lay the units out over the stretches: shuffled once a run, cut, and shuffled within each stretch."""
    order = list(range(len(units_U)))
    np.random.default_rng(seed).shuffle(order)
    sizes_U = units_U[order]
    ends_U = np.cumsum(sizes_U)
    begins_U = (np.cumsum(units_U) - units_U)[order]
    bounds = _bounds(int(ends_U[-1]), stretches)
    cuts = np.union1d(np.concatenate(([0], ends_U)), bounds)
    unit_of_piece = np.searchsorted(ends_U, cuts[:-1], side="right")
    begin_of_piece = begins_U[unit_of_piece] + cuts[:-1] - (ends_U - sizes_U)[unit_of_piece]
    size_of_piece = np.diff(cuts)
    firsts = np.searchsorted(cuts, bounds).tolist()
    found = []
    for first, stop in pairwise(firsts):
        pieces = list(range(first, stop))
        epoch.shuffle(pieces)
        found.append(
            _Stretch(
                begins_P=begin_of_piece[pieces].tolist(), sizes_P=size_of_piece[pieces].tolist()
            )
        )
    return found


def _in_order(units_U: _Ints, stretches: int, _shuffle: Shuffle) -> Iterator[_Ints]:
    for start, stop in pairwise(_bounds(int(units_U.sum()), stretches).tolist()):
        yield np.arange(start, stop, dtype=np.int64)


def _all_to_all(units_U: _Ints, stretches: int, shuffle: Shuffle) -> Iterator[_Ints]:
    places = int(units_U.sum())
    order = np.random.default_rng(shuffle.seed + shuffle.epoch).permutation(places)
    for start, stop in pairwise(_bounds(places, stretches).tolist()):
        yield order[start:stop]


def _within_pieces(units_U: _Ints, stretches: int, shuffle: Shuffle) -> Iterator[_Ints]:
    random = np.random.default_rng(shuffle.seed + shuffle.epoch)
    for stretch in _stretches(units_U, stretches, shuffle.seed, random):
        parts = [stretch.samples(p) for p in range(len(stretch.sizes_P))]
        for part in parts:
            random.shuffle(part)
        yield np.concatenate(parts)


def _within_units_too(units_U: _Ints, stretches: int, shuffle: Shuffle) -> Iterator[_Ints]:
    """Shuffle the samples of a unit once a run, and the samples of each of its pieces once an epoch."""
    once = np.random.default_rng(shuffle.seed)
    ends = np.cumsum(units_U)
    units = list(range(len(units_U)))
    once.shuffle(units)
    samples = [np.arange(ends[u] - units_U[u], ends[u]) for u in units]
    for each in samples:
        once.shuffle(each)
    laid = np.concatenate(samples)
    unit_ends = np.cumsum(units_U[units])
    random = np.random.default_rng(shuffle.seed + shuffle.epoch)
    for start, stop in pairwise(_bounds(len(laid), stretches).tolist()):
        inner = unit_ends[(unit_ends > start) & (unit_ends < stop)].tolist()
        pieces = [laid[a:b] for a, b in pairwise([start, *inner, stop])]
        order = list(range(len(pieces)))
        random.shuffle(order)
        for p in order:
            random.shuffle(pieces[p])
        yield np.concatenate([pieces[p] for p in order])


def _about(random: np.random.Generator, block_size: int) -> int:
    """Draw the size of a block."""
    return int(random.integers(int(0.75 * block_size), int(1.25 * block_size)))


def _in_blocks(units_U: _Ints, stretches: int, shuffle: Shuffle) -> Iterator[_Ints]:
    random = np.random.default_rng(shuffle.seed + shuffle.epoch)
    laid = _stretches(units_U, stretches, shuffle.seed, random)
    # For all stretches before any block, in the same order of draws as in Mosaic.
    shifts = random.integers(0, int(0.75 * shuffle.block_size), (stretches,)).tolist()
    for stretch, shift in zip(laid, shifts, strict=True):
        found = stretch.all_samples()
        blocks, reached = [], 0
        while reached < len(found):
            size = _about(random, shuffle.block_size)
            block = max(reached - shift, 0), min(reached + size - shift, len(found))
            blocks.append(block)
            reached += block[1] - block[0]
        for start, stop in blocks:
            random.shuffle(found[start:stop])
        yield found


def _in_ranges(units_U: _Ints, stretches: int, shuffle: Shuffle) -> Iterator[_Ints]:
    """Move every sample of a piece by some places, as far as a block extends beyond both ends of the piece."""
    random = np.random.default_rng(shuffle.seed + shuffle.epoch)
    for stretch in _stretches(units_U, stretches, shuffle.seed, random):
        parts = [stretch.samples(p) for p in range(len(stretch.sizes_P))]
        for part in parts:
            random.shuffle(part)
        found = np.concatenate(parts)
        moved = np.arange(len(found), dtype=np.float64)
        start = 0
        for size in stretch.sizes_P:
            reach = max((_about(random, shuffle.block_size) - size) / 2, 0)
            low, high = max(-reach, -start), min(reach, len(found) - start - size)
            moved[start : start + size] += random.uniform(low, high, size)
            start += size
        yield found[np.argsort(moved)]


ALGORITHMS: Mapping[str, Callable[[_Ints, int, Shuffle], Iterator[_Ints]]] = {
    "none": _in_order,
    "naive": _all_to_all,
    "py1br": _in_blocks,
    "py1e": _in_ranges,
    "py1s": _within_pieces,
    "py2s": _within_units_too,
}
"""The rules by Mosaic's names; ``none`` means no shuffling."""

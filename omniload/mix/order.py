"""The order of a source: a function that gives the record at a position, without storing a list.

A source consists of shards, which are cut into units (row groups, ranges of a file) of known row counts. In every
epoch the shards are permuted, their units are laid end to end, and every few consecutive units form a block. Rows are
permuted inside a block::

    shards       C              A        B            permuted by (seed, source, epoch)
    units        c0  c1  c2     a0  a1   b0
    blocks       [c0 c1   c2    a0] [a1  b0]          of ``block_units`` units
    positions    rows of block 0 permuted, then rows of block 1 permuted

With ``units``, the units of all shards are permuted before blocks are formed. With ``full``, all units are one block.

Therefore the record at any position of any epoch is found without looking at earlier positions, and a reader needs
only one block in memory. Randomness is counter-based: raw 64-bit draws of Philox, keyed by a digest of (version, seed,
source, epoch, purpose, block), are sorted. ``Generator.permutation`` would be shorter, but its stream may change
between releases of numpy, while raw Philox draws are fixed by the algorithm.

Source:
    Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3" (2011), for Philox.

Shape suffixes:
    U  units of the source      B  rows of a block
    N  positions to find
"""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import numpy.random  # here: a process forked while a reader's thread loads it could never load it
from numpy.typing import NDArray

from omniload.base.ragged import Rows, numbers_of, offsets_of
from omniload.mix.config import ShuffleConfig

__all__ = ["ORDER_VERSION", "BlockOrder", "Located", "Order", "Span", "sorted_places"]

_AT_ONCE = 1 << 15
"""Number of draws that are processed together."""
ORDER_VERSION = 1
"""Part of every key; raised when the order of the same seed changes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """Consecutive positions within one block of one epoch."""

    epoch: int
    """The epoch."""
    block: int
    """Number of the block in the epoch's order."""
    offset: int
    """Place of the first position within the block."""
    start: int
    """First position, counted over all epochs."""
    stop: int
    """First position no longer in the span."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockOrder:
    """The units of a block and the order of its rows. Not to be modified."""

    units_U: NDArray[np.int64]
    """Its units in rising order. Therefore an epoch with a block of the same units finds them decoded, in whatever
    order the units came."""
    rows: Rows
    """Indices into its units laid end to end, ``[B]``; a range if the rows stay in order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Located:
    """Storage places of the records of a range of positions."""

    units_N: NDArray[np.int64]
    """Number of the unit, as the creator of the order numbered it."""
    rows_N: NDArray[np.int64]
    """Row within the unit."""


class Order:
    """Decides which row of which unit stands at each position.

    Units without rows are ignored. Building an epoch costs one sort of the shards, and building a block costs one sort
    of its rows. Both are kept until another epoch or block is asked for, and a position then costs a binary search.
    For use in one thread.
    """

    def __init__(
        self,
        unit_rows: NDArray[np.integer[Any]],
        unit_shards: NDArray[np.integer[Any]],
        *,
        seed: int,
        source: str,
        shuffle: ShuffleConfig,
    ) -> None:
        # 64 bits, because the rows of units are summed, and readers may count them in 32 bits.
        rows_U, shards_U = np.asarray(unit_rows, np.int64), np.asarray(unit_shards, np.int64)
        if rows_U.shape != shards_U.shape:
            raise ValueError(
                f"unit_rows has shape {rows_U.shape}, unit_shards {shards_U.shape}; both are [U]"
            )
        if len(rows_U) and rows_U.min() < 0:
            raise ValueError(f"unit_rows[{rows_U.argmin()}] is {rows_U.min()}; rows are at least 0")
        self._units_U = np.flatnonzero(rows_U)
        if not len(self._units_U):
            raise ValueError(
                f"source {source!r} has {len(rows_U)} units and no row; an order needs at least one"
            )
        self._rows_of_unit = rows_U
        # Shards are numbered among the shards that hold rows, so adding or removing an empty shard does not change the
        # order.
        self._shards_U = np.unique(shards_U[self._units_U], return_inverse=True)[1]
        self._num_shards = int(self._shards_U.max()) + 1
        self._seed, self._source, self._method = seed, source, shuffle.method
        # Only a permutation inside the block needs several units in memory.
        self._block_units = shuffle.units_together(len(self._units_U))
        self.positions_per_epoch = int(rows_U.sum())
        """Rows of the source: positions in an epoch."""
        self._epoch = -1
        self._ordered_U: NDArray[np.int64] = self._units_U
        self._block_offsets: NDArray[np.int64] = np.zeros(1, np.int64)
        self._kept: tuple[int, int, BlockOrder] | None = None

    @property
    def fingerprint(self) -> str:
        """Digest of everything that decides the order: seed, name, shuffle, and the rows of every unit.

        Saved together with a position, it shows whether the position still means the same record.
        """
        digest = hashlib.blake2b(digest_size=16)
        settings = (ORDER_VERSION, self._seed, self._source, self._method, self._block_units)
        # The separator is a character that no name contains, so that different settings never give the same text.
        digest.update("\0".join(map(str, settings)).encode())
        digest.update(self._rows_of_unit[self._units_U].astype("<i8").tobytes())
        digest.update(self._shards_U.astype("<i8").tobytes())
        return digest.hexdigest()

    def shards_of(self, units_U: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the shards of units that have rows; shards are numbered among those that hold rows."""
        return self._shards_U[np.searchsorted(self._units_U, units_U)]

    def spans(self, start: int, stop: int) -> Iterator[Span]:
        """Cut the positions ``start`` to ``stop`` at the ends of blocks and epochs.

        Raises:
            ValueError: ``start`` is negative or after ``stop``.
        """
        if not 0 <= start <= stop:
            raise ValueError(f"positions {start} to {stop} are no range; 0 <= start <= stop")
        while start < stop:
            epoch, within = divmod(start, self.positions_per_epoch)
            # Repeated for each span, because the caller may ask for another epoch between two spans.
            self._enter(epoch)
            block = int(self._block_offsets.searchsorted(within, side="right")) - 1
            first, end = self._block_offsets[block : block + 2].tolist()
            until = min(stop, start + end - within)
            yield Span(epoch=epoch, block=block, offset=within - first, start=start, stop=until)
            start = until

    def whole(self, span: Span) -> Span:
        """Return the span of all positions of the block that contains a span."""
        start = span.start - span.offset
        count = len(self.block_of(span.epoch, span.block).rows)
        return replace(span, offset=0, start=start, stop=start + count)

    def number_in_shard(self, unit: int, row: int) -> int:
        """Return the number of a row of a unit within its shard, from 0."""
        return int(self._before_U[np.searchsorted(self._units_U, unit)]) + row

    @cached_property
    def _before_U(self) -> NDArray[np.int64]:
        """Rows of its shard before each unit with rows."""
        # Worked out once: an audit asks for each of 16,000 documents of a step, and units may be a million.
        by_shard = np.argsort(self._shards_U, kind="stable")
        shards_U, rows_U = self._shards_U[by_shard], self._rows_of_unit[self._units_U[by_shard]]
        behind_U = np.cumsum(rows_U) - rows_U
        before_U = np.empty_like(behind_U)
        before_U[by_shard] = behind_U - behind_U[np.searchsorted(shards_U, shards_U)]
        return before_U

    def block_of(self, epoch: int, block: int) -> BlockOrder:
        """Return the units and the row order of a block; the last block that was asked for is kept.

        Raises:
            IndexError: The epoch has no such block.
        """
        if self._kept is None or self._kept[:2] != (epoch, block):
            self._kept = epoch, block, self._laid_out(epoch, block)
        return self._kept[2]

    def _laid_out(self, epoch: int, block: int) -> BlockOrder:
        self._enter(epoch)
        if not 0 <= block < len(self._block_offsets) - 1:
            raise IndexError(
                f"block is {block}; epoch {epoch} of source {self._source!r} has "
                f"{len(self._block_offsets) - 1} blocks"
            )
        at = block * self._block_units
        units_U = np.sort(self._ordered_U[at : at + self._block_units])
        first, end = self._block_offsets[block : block + 2].tolist()
        rows: Rows = range(end - first)
        if self._method in {"block", "units", "full"}:
            rows = self._permutation(end - first, epoch, "rows", block)
        return BlockOrder(units_U=units_U, rows=rows)

    def let_go(self) -> None:
        """Free the row order of the last block that was asked for."""
        self._kept = None

    def locate(self, start: int, stop: int) -> Located:
        """Find the unit and row of every position from ``start`` to ``stop``.

        Returns:
            One entry for each position. Over the positions of one epoch, every row of every unit occurs exactly once.

        Raises:
            ValueError: ``start`` is negative or after ``stop``.
        """
        parts = [self._locate(span) for span in self.spans(start, stop)]
        columns = np.concatenate(parts, axis=1) if parts else np.empty((2, 0), np.int64)
        return Located(units_N=columns[0], rows_N=columns[1])

    def _locate(self, span: Span) -> NDArray[np.int64]:
        """Return units and rows of one span, ``[2, N]``."""
        held, count = self.block_of(span.epoch, span.block), span.stop - span.start
        units, rows = held.units_U, numbers_of(held.rows[span.offset : span.offset + count])
        ends = np.cumsum(self._rows_of_unit[units])
        # Side "right", because the first row of a unit is the number at which the unit before ends.
        which = np.searchsorted(ends, rows, side="right")
        begins = ends - self._rows_of_unit[units]
        return np.stack((units[which], rows - begins[which]))

    def _enter(self, epoch: int) -> None:
        """Lay out the units of ``epoch`` and the offsets of its blocks."""
        if epoch == self._epoch:
            return
        if self._method == "units":
            places_U = self._permutation(len(self._units_U), epoch, "units")
            self._ordered_U = self._units_U[places_U]
        elif self._method != "none":
            # The permutation gives the shard at each place. Units are sorted by its inverse, the place of each shard.
            rank = np.empty(self._num_shards, np.int64)
            rank[self._permutation(self._num_shards, epoch, "shards")] = np.arange(self._num_shards)
            # A stable sort keeps the units of a shard in their order.
            self._ordered_U = self._units_U[np.argsort(rank[self._shards_U], kind="stable")]
        begins = np.arange(0, len(self._ordered_U), self._block_units)
        block_rows = np.add.reduceat(self._rows_of_unit[self._ordered_U], begins)
        self._block_offsets = offsets_of(block_rows)
        self._epoch = epoch

    def _permutation(
        self, count: int, epoch: int, purpose: str, block: int = 0
    ) -> NDArray[np.int64]:
        """Return a permutation of ``range(count)`` that depends only on its key."""
        key = f"omniload.order\0{ORDER_VERSION}\0{self._seed}\0{self._source}\0{epoch}\0{purpose}\0{block}"
        digest = hashlib.blake2b(key.encode(), digest_size=16).digest()
        draws = np.random.Philox(key=np.frombuffer(digest, "<u8")).random_raw(count)
        return sorted_places(np.asarray(draws, np.uint64))


def sorted_places(draws_B: NDArray[np.uint64]) -> NDArray[np.int64]:
    """Return the indices of draws in rising order, ties by rising index: the same stable sort on every machine.

    The index replaces the low bits of each draw before sorting, which costs a third of an ``argsort``, or a sixth for
    millions of draws. Where draws agree in all other bits, the replaced bits are compared afterwards.
    """
    count = len(draws_B)
    bits = np.uint64(max(1, (count - 1).bit_length()))
    covered = (np.uint64(1) << bits) - np.uint64(1)
    mixed_B = draws_B & ~covered
    # A few at a time, in the cache of a core: further arrays of all draws would need new pages of memory.
    for start in range(0, count, _AT_ONCE):
        stop = min(start + _AT_ONCE, count)
        mixed_B[start:stop] |= np.arange(start, stop, dtype=np.uint64)
    mixed_B.sort()
    found = []
    for start in range(0, count, _AT_ONCE):
        # One more, because the first draw of the next part may tie with the last of this part.
        part = mixed_B[start : start + _AT_ONCE + 1]
        found.append(np.flatnonzero((part[1:] ^ part[:-1]) <= covered) + start)
    alike = np.concatenate(found) if found else np.arange(0)
    mixed_B &= covered
    places_B = mixed_B.view(np.int64)
    if len(alike):
        # One sort of all ties: runs with equal high bits are already in order, and no draw moves past another run.
        at = np.union1d(alike, alike + 1)
        tied = places_B[at]
        places_B[at] = tied[np.lexsort((tied, draws_B[tied]))]
    return places_B

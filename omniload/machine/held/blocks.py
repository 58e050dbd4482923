"""The samples that a source loader holds of one source: blocks by position, and an index of the samples.

Blocks do not overlap. A block may lack the records of shards that edits leave out. If these records are
wanted again, a new read replaces the block.
"""

from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from omniload.base.ragged import Ragged, Ranges
from omniload.mix.columns import column_kind
from omniload.mix.pieces import SUB_LIMIT
from omniload.mix.samples import SampleTable

__all__ = ["Column", "HeldSamples", "SampleIndex", "SampleRange", "sample_keys"]


@dataclass(slots=True)
class SampleRange:
    """The samples of a range of positions."""

    table: SampleTable
    tokens: Ragged
    others: Mapping[str, Ragged] = field(default_factory=dict)
    """Further columns by name, in the order of the table."""
    without: frozenset[int] = frozenset()
    """Shards whose records are missing from the range."""

    @property
    def size_bytes(self) -> int:
        """Memory that the samples take."""
        columns = (self.tokens, *self.others.values())
        return sum(column.values_V.nbytes + column.offsets.nbytes for column in columns)

    def within(self, start: int, stop: int) -> "SampleRange":
        """Return the part from ``start`` to ``stop``; nothing is copied."""
        if (start, stop) == (self.table.start, self.table.stop):
            return self
        table = self.table.within(start, stop)
        # Search by position, because a record may have given several samples, or none.
        first = int(self.table.positions_N.searchsorted(start))
        last = first + len(table)
        others = {name: column.between(first, last) for name, column in self.others.items()}
        return SampleRange(table, self.tokens.between(first, last), others, self.without)

    def outside(self, start: int, stop: int) -> "list[SampleRange]":
        """Return the non-empty parts before ``start`` and from ``stop`` on."""
        first, last = self.table.start, self.table.stop
        bounds = ((first, min(start, last)), (max(stop, first), last))
        return [self.within(a, b) for a, b in bounds if a < b]


@dataclass(slots=True)
class Column:
    """One further column of every held sample of one source."""

    starts_N: NDArray[np.int64]
    stops_N: NDArray[np.int64]
    values: list[NDArray[Any]]
    """Values of each block."""


@dataclass(slots=True)
class SampleIndex:
    """The place of every held sample of one source."""

    keys_N: NDArray[np.int64]
    """Keys of the samples, rising."""
    blocks_N: NDArray[np.int64]
    starts_N: NDArray[np.int64]
    stops_N: NDArray[np.int64]
    columns: list[NDArray[np.int32]]
    """Tokens of each block."""
    others: dict[str, Column]
    """Further columns by name."""

    def are_held(self, wanted_N: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Return which samples are held, by their keys; for a few keys this is faster than a set operation."""
        rows_N = self.keys_N.searchsorted(wanted_N)
        held_N = rows_N < len(self.keys_N)
        held_N[held_N] = self.keys_N[rows_N[held_N]] == wanted_N[held_N]
        return held_N

    def rows_of(self, wanted_N: NDArray[np.int64]) -> NDArray[np.int64] | None:
        """Return the rows of samples, by their keys; ``None`` where one of them is not held."""
        rows_N = self.keys_N.searchsorted(wanted_N)
        if not len(self.keys_N):
            return None if len(wanted_N) else rows_N
        # The search may return the index after the last key; it is clipped, so that the comparison below fails.
        found_N = self.keys_N.take(rows_N, mode="clip")
        # ``tobytes`` takes a tenth of the time of ``all`` for a few keys.
        return rows_N if found_N.tobytes() == wanted_N.tobytes() else None

    def ranges_of(
        self,
        name: str,
        rows_N: NDArray[np.int64],
        starts_N: NDArray[np.int64],
        stops_N: NDArray[np.int64],
    ) -> Ranges:
        """Return where a further column has the values for the tokens ``starts_N`` to ``stops_N`` of some rows."""
        column = self.others[name]
        first_N, last_N = column.starts_N[rows_N], column.stops_N[rows_N]
        kind = column_kind(name)
        if kind.aligned:
            begins_N = np.minimum(first_N + starts_N, last_N)
            ends_N = np.minimum(first_N + stops_N, last_N)
        elif kind.is_tag:
            # Every piece of the sample gets it: it is small, and identifies the document.
            begins_N, ends_N = first_N, last_N
        else:  # with the piece that holds the sample's first token
            begins_N, ends_N = first_N, np.where(starts_N == 0, last_N, first_N)
        return Ranges(
            columns=column.values, which_N=self.blocks_N[rows_N], starts_N=begins_N, stops_N=ends_N
        )


@dataclass(slots=True)
class HeldSamples:
    """The blocks of one source."""

    blocks: deque[SampleRange] = field(default_factory=deque)
    """Blocks in the order of their positions."""
    size_bytes: int = 0
    """Memory of all blocks, kept as a running sum."""
    _index: SampleIndex | None = None
    """Index of the held samples, rebuilt on access after a change."""

    def find(self, start: int, stop: int, without: frozenset[int]) -> list[SampleRange]:
        """Return the held blocks of a range, up to its first position that is not held.

        Only blocks that leave out exactly the shards of ``without`` count.
        """
        parts, reached = list[SampleRange](), start
        for block in self.blocks:
            if reached >= stop:
                break
            # Exactly these shards, because the planner ignores a report that left out others.
            if block.table.start <= reached < block.table.stop and block.without == without:
                parts.append(block.within(reached, min(stop, block.table.stop)))
                reached = parts[-1].table.stop
        return parts

    def hold(self, read: SampleRange) -> None:
        """Add the part of a block that is not held yet; a range may have been read twice, in different parts."""
        first, last = read.table.start, read.table.stop
        # A held block that lacks records of the new one is replaced where they overlap; otherwise the held one stays.
        for block in [b for b in self.blocks if not b.without <= read.without]:
            if block.table.start < last and first < block.table.stop:  # it lacks what this one has
                self._remove(block)
                for part in block.outside(first, last):
                    self._insert(part)
        new, start = [], first
        for block in self.blocks:
            # There is a gap before this block; the part of the new block that lies in the gap is added.
            if start < block.table.start:
                new.append(read.within(start, min(block.table.start, last)))
            start = max(start, block.table.stop)
            if start >= last:
                break
        if start < last:
            new.append(read.within(start, last))
        for block in new:
            if block.table.stop > block.table.start:
                self._insert(block)

    def release(self, floor: int) -> None:
        """Release blocks that end before ``floor``."""
        # Only whole blocks: a remaining part would be a view that keeps the whole block in memory.
        while self.blocks and self.blocks[0].table.stop <= floor:
            self._remove(self.blocks[0])

    def index(self) -> SampleIndex:
        """Return the place of every sample."""
        if self._index is None:
            self._index = _index_of(self.blocks)
        return self._index

    def _insert(self, block: SampleRange) -> None:
        at = bisect_left(self.blocks, block.table.start, key=lambda held: held.table.start)
        self.blocks.insert(at, block)
        self.size_bytes += block.size_bytes
        # Rebuilt lazily, because several blocks come and go between two requests for samples.
        self._index = None

    def _remove(self, block: SampleRange) -> None:
        at = bisect_left(self.blocks, block.table.start, key=lambda held: held.table.start)
        del self.blocks[at]
        self.size_bytes -= block.size_bytes
        self._index = None


def sample_keys(
    positions_N: NDArray[np.int64], subs_N: NDArray[np.integer[Any]]
) -> NDArray[np.int64]:
    """Return a number for each sample, rising with position and sub-sample."""
    return positions_N * SUB_LIMIT + subs_N


def _index_of(blocks: Iterable[SampleRange]) -> SampleIndex:
    held = [block for block in blocks if len(block.table)]
    nothing = np.empty(0, np.int64)

    def bounds(columns: list[Ragged]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        starts_N = np.concatenate([nothing, *(column.offsets[:-1] for column in columns)])
        return starts_N, np.concatenate([nothing, *(column.offsets[1:] for column in columns)])

    starts_N, stops_N = bounds([b.tokens for b in held])
    others = {
        name: Column(
            *bounds([b.others[name] for b in held]), [b.others[name].values_V for b in held]
        )
        # The configuration of a source decides its columns, so all blocks have the same ones.
        for name in (held[0].others if held else ())
    }
    return SampleIndex(
        keys_N=np.concatenate(
            [nothing, *(sample_keys(b.table.positions_N, b.table.subs_N) for b in held)]
        ),
        blocks_N=np.arange(len(held)).repeat([len(b.table) for b in held]),
        starts_N=starts_N,
        stops_N=stops_N,
        columns=[b.tokens.values_V for b in held],
        others=others,
    )

"""Which units of a block each reader of a source has.

Rows are permuted inside a block, so any range of positions lies in all of its units: whoever has
every third unit has about a third of each read, and no unit is decoded by two readers::

    block        u0       u1       u2       u3          of one epoch
    reader       0        1        2        0           of 3; the next block begins with reader 1
    positions    2 0 1 0  3 0 1 2  ...                  each by the reader of its unit

Shape suffixes:
    U  units of the block      N  positions asked for
"""

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from omniload.base.ragged import Rows, numbers_of

__all__ = ["WHOLE", "Part", "Share"]


@dataclass(frozen=True, slots=True)
class Part:
    """One reader's part of a source."""

    number: int
    """From 0."""
    of: int
    """Parts of the source."""
    also: tuple[int, ...] = ()
    """Numbers of further parts that it has as well: of readers that are lost, until others are there."""


WHOLE = Part(0, 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """What of some positions of a block is one reader's."""

    units: tuple[int, ...]
    """Its units, by rising number."""
    rows: Rows
    """Rows of its positions, ``[N]``: numbers into its units laid end to end."""
    places_N: NDArray[np.int64] | None = None
    """Its positions, by their place among those asked for; ``None`` where all are."""

    def positions_N(self, start: int) -> NDArray[np.int64]:
        """Return its positions, where those asked for begin at ``start``."""
        if self.places_N is None:
            return np.arange(start, start + len(self.rows))
        return start + self.places_N

    @classmethod
    def of(
        cls,
        part: Part,
        block: int,
        units_U: NDArray[np.int64],
        row_counts: NDArray[np.int64],
        rows: Rows,
        left_out_U: NDArray[np.bool_] | None = None,
    ) -> "Share":
        """Return the share of a part.

        Args:
            part: Whose.
            block: Number of the block in its epoch: blocks of few units begin with another reader each.
            units_U: Units of the block.
            row_counts: Rows of each unit of the source.
            rows: Rows asked for, ``[N]``: numbers into all units laid end to end.
            left_out_U: Units that are nobody's.
        """
        # Nearly every source: nothing is worked out.
        if part.of == 1 and left_out_U is None:
            return cls(units=tuple(units_U.tolist()), rows=rows)
        # By the place in the block: numbers of units are up to the shuffle, and might all be one reader's.
        of_part_U = (np.arange(len(units_U)) + block) % part.of
        mine_U = (
            np.isin(of_part_U, (part.number, *part.also)) if part.also else of_part_U == part.number
        )
        if left_out_U is not None:
            mine_U &= ~left_out_U
        counts_U, rows_N = row_counts[units_U], numbers_of(rows)
        which_N = np.searchsorted(np.cumsum(counts_U), rows_N, side="right")
        places = np.flatnonzero(mine_U[which_N])
        return cls(
            units=tuple(units_U[mine_U].tolist()),
            places_N=places,
            rows=_moved_up(rows_N[places], which_N[places], counts_U, mine_U),
        )

    def narrowed(self, row_counts: NDArray[np.int64]) -> "Share":
        """Return it with no units but those that its rows lie in, where that is half of them at most.

        Args:
            row_counts: Rows of each unit of the source.
        """
        # More rows than that lie in most units, as they are permuted over all of them.
        if not 0 < 2 * len(self.rows) <= len(self.units):
            return self
        units_U, rows_N = np.asarray(self.units), numbers_of(self.rows)
        counts_U = row_counts[units_U]
        which_N = np.searchsorted(np.cumsum(counts_U), rows_N, side="right")
        used_U = np.zeros(len(units_U), np.bool_)
        used_U[which_N] = True
        if 2 * np.count_nonzero(used_U) > len(units_U):
            return self
        return replace(
            self,
            units=tuple(units_U[used_U].tolist()),
            rows=_moved_up(rows_N, which_N, counts_U, used_U),
        )


def _moved_up(
    rows_N: NDArray[np.int64],
    which_N: NDArray[np.int64],
    counts_U: NDArray[np.int64],
    kept_U: NDArray[np.bool_],
) -> NDArray[np.int64]:
    """Return rows, which lie in these units, as units that are not kept take no room."""
    gone_U: NDArray[np.int64] = np.cumsum(np.where(kept_U, 0, counts_U))
    moved_N: NDArray[np.int64] = rows_N - gone_U[which_N]
    return moved_N

"""The units of a block that each reader of a source reads.

Rows are permuted inside a block, so any range of positions lies in all units of the block. A reader that has every
third unit therefore has about a third of each read, and no unit is decoded by two readers::

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
    """Number of the part, from 0."""
    of: int
    """Number of parts of the source."""
    also: tuple[int, ...] = ()
    """Numbers of further parts that this reader has: the parts of lost readers, until new readers are ready."""


WHOLE = Part(0, 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """One reader's share of some positions of a block."""

    units: tuple[int, ...]
    """Units of the share, by rising number."""
    rows: Rows
    """Rows of the positions, ``[N]``: numbers into the units laid end to end."""
    places_N: NDArray[np.int64] | None = None
    """Places of the positions among the requested ones; ``None`` for all of them."""

    def positions_N(self, start: int) -> NDArray[np.int64]:
        """Return the positions of the share, if the requested positions begin at ``start``."""
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
            part: The part.
            block: Number of the block in its epoch. Each block begins with another reader, which spreads blocks of few
                units.
            units_U: Units of the block.
            row_counts: Rows of each unit of the source.
            rows: Requested rows, ``[N]``: numbers into all units laid end to end.
            left_out_U: Whether each unit belongs to no reader, ``[U]``.
        """
        # This is the case for nearly every source, and needs no computation.
        if part.of == 1 and left_out_U is None:
            return cls(units=tuple(units_U.tolist()), rows=rows)
        # Chosen by the place in the block. The shuffle decides the numbers of units, so all of them might go to one
        # reader.
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
        """Return the share without the units that have none of its rows, if at most half of the units have any.

        Args:
            row_counts: Rows of each unit of the source.
        """
        # If there are more rows, most units have some of them, because rows are permuted over all units.
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
    """Return rows of these units, renumbered after the units that are not kept are removed."""
    gone_U: NDArray[np.int64] = np.cumsum(np.where(kept_U, 0, counts_U))
    moved_N: NDArray[np.int64] = rows_N - gone_U[which_N]
    return moved_N

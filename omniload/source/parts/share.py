"""Which units of a block each reader of a source has.

Rows are permuted inside a block, so any range of positions lies in all of its units: whoever has
every third unit has about a third of each read, and no unit is decoded by two readers::

    block        u0       u1       u2       u3          of one epoch
    reader       0        1        2        0           of 3; the next block begins with reader 1
    positions    2 0 1 0  3 0 1 2  ...                  each by the reader of its unit

Shape suffixes:
    U  units of the block      N  positions asked for
"""

from dataclasses import dataclass

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
    """Readers of the source."""


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
        mine_U = (np.arange(len(units_U)) + block) % part.of == part.number
        if left_out_U is not None:
            mine_U &= ~left_out_U
        counts_U, rows_N = row_counts[units_U], numbers_of(rows)
        stops_U = np.cumsum(counts_U)
        # Units of others take no room: rows move up by what lies in those before them.
        own_stops_U = np.cumsum(counts_U * mine_U)
        which_N = np.searchsorted(stops_U, rows_N, side="right")
        places = np.flatnonzero(mine_U[which_N])
        which = which_N[places]
        return cls(
            units=tuple(units_U[mine_U].tolist()),
            places_N=places,
            rows=rows_N[places] - stops_U[which] + own_stops_U[which],
        )

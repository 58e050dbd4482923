"""Pieces of samples: rows consist of them, and the packer carries some of them to the next step.

Shape suffixes:
    P  pieces
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from omniload.base.state import Json, shown, whole_number

__all__ = ["PIECE_COLUMNS", "POSITION_LIMIT", "SUB_LIMIT", "TOKEN_LIMIT", "PieceTable"]

SUB_LIMIT = 1 << 20
"""Exclusive limit of the number of a sample within its record."""
POSITION_LIMIT = 1 << 43
"""Exclusive limit of raw positions: position and sub together are one signed integer of 64 bits."""
TOKEN_LIMIT = 1 << 31
"""Exclusive limit of the tokens of one sample."""


@dataclass(frozen=True, slots=True)
class PieceTable:
    """Parts of samples, each addressed by its key ``(source, position, sub)`` and a token range.

    One array instead of one for each column, because small steps take, join and send many tables of a few pieces.
    """

    columns_CP: NDArray[np.int64]
    """A row for each of ``PIECE_COLUMNS``, in their order, ``[6, P]``."""

    def __len__(self) -> int:
        return len(self.columns_CP[0])

    @property
    def sources_P(self) -> NDArray[np.int64]:
        """Number of the source."""
        return self._column(0)

    @property
    def positions_P(self) -> NDArray[np.int64]:
        """Raw position in the source."""
        return self._column(1)

    @property
    def subs_P(self) -> NDArray[np.int64]:
        """Number of the sample within its record."""
        return self._column(2)

    @property
    def starts_P(self) -> NDArray[np.int64]:
        """First token of the sample that belongs to the piece."""
        return self._column(3)

    @property
    def stops_P(self) -> NDArray[np.int64]:
        """First token of the sample after the piece."""
        return self._column(4)

    @property
    def sizes_P(self) -> NDArray[np.int64]:
        """Tokens of the whole sample; a piece that ends before that has a next token to predict."""
        return self._column(5)

    def _column(self, number: int) -> NDArray[np.int64]:
        column: NDArray[np.int64] = self.columns_CP[number]
        return column

    @property
    def lengths_P(self) -> NDArray[np.int64]:
        """Tokens in each piece."""
        return self.stops_P - self.starts_P

    def take(self, indices: NDArray[np.integer[Any]]) -> "PieceTable":
        """Return the pieces at ``indices``."""
        return PieceTable(self.columns_CP.take(indices, axis=1))

    def part(self, begin: int, end: int) -> "PieceTable":
        """Return the pieces from ``begin`` up to, but not including, ``end``, without a copy."""
        return PieceTable(self.columns_CP[:, begin:end])

    def between(
        self, starts_P: NDArray[np.integer[Any]], stops_P: NDArray[np.integer[Any]]
    ) -> "PieceTable":
        """Return the same pieces with other token ranges of their samples."""
        columns_CP = self.columns_CP.copy()
        columns_CP[3], columns_CP[4] = starts_P, stops_P
        return PieceTable(columns_CP)

    def rows(self) -> list[list[int]]:
        """Return the pieces as ``[source, position, sub, start, stop, size]``, sources by number."""
        rows: list[list[int]] = self.columns_CP.T.tolist()
        return rows

    def to_bytes(self) -> bytes:
        """Return all columns end to end, little-endian: equal on every machine."""
        # The widths are those of the first release, so that digests stay the same; only positions need 64 bits.
        sources, positions = self.sources_P.astype("<i4"), self.positions_P.astype("<i8")
        return sources.tobytes() + positions.tobytes() + self.columns_CP[2:].astype("<i4").tobytes()

    def to_json(self, names: Sequence[str]) -> Json:
        """Return the pieces as ``[source, position, sub, start, stop, size]``, sources by name."""
        return [[names[row[0]], *row[1:]] for row in self.rows()]

    @staticmethod
    def from_rows(rows: Sequence[Sequence[int]]) -> "PieceTable":
        """Return the pieces from the output of ``rows``."""
        # Reshaped for the case without rows, for which numpy makes an array without columns.
        return PieceTable(np.asarray(rows, np.int64).reshape(-1, len(PIECE_COLUMNS)).T)

    @staticmethod
    def from_json(rows: Json, names: Sequence[str]) -> "PieceTable":
        """Return the pieces from the output of ``to_json``.

        Raises:
            TypeError: The value is not a list.
            ValueError: A row is not a source of ``names`` and five integers, or not a piece: each piece holds tokens,
                and all of them are within its sample.
        """
        if not isinstance(rows, list):
            raise TypeError(f"carried pieces are {shown(rows)}, not a list")
        number_of = {name: s for s, name in enumerate(names)}
        return PieceTable.from_rows([_numbered(row, number_of) for row in rows])

    @staticmethod
    def concatenated(tables: "list[PieceTable]") -> "PieceTable":
        """Return the pieces of all tables, in order."""
        return PieceTable(np.concatenate([table.columns_CP for table in tables], axis=1))

    @staticmethod
    def empty() -> "PieceTable":
        """Return a table of no pieces."""
        return PieceTable(np.empty((len(PIECE_COLUMNS), 0), np.int64))


PIECE_COLUMNS = ("sources_P", "positions_P", "subs_P", "starts_P", "stops_P", "sizes_P")
"""Columns of a ``PieceTable``."""


def _numbered(row: Json, number_of: Mapping[str, int]) -> list[int]:
    match row:
        case [str(name), position, sub, start, stop, size] if name in number_of:
            # From the largest down: the size limits where a piece stops, and its stop limits where it starts.
            size = whole_number(size, least=1, below=TOKEN_LIMIT)
            stop = whole_number(stop, least=1, below=size + 1)
            return [
                number_of[name],
                whole_number(position, below=POSITION_LIMIT),
                whole_number(sub, below=SUB_LIMIT),
                whole_number(start, below=stop),
                stop,
                size,
            ]
        case _:
            raise ValueError(
                f"{row!r:.120} is no piece of the sources {', '.join(number_of):.200}: a name and five integers"
            )

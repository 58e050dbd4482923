"""Pieces of samples: what rows are made of, and what the packer carries to the next step.

Shape suffixes:
    P  pieces
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from omniload.base.errors import StateError
from omniload.base.state import Json

__all__ = ["PIECE_COLUMNS", "PieceTable"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PieceTable:
    """Parts of samples, each addressed by its key ``(source, position, sub)`` and a token range."""

    sources_P: NDArray[np.int32]
    """Number of the source."""
    positions_P: NDArray[np.int64]
    """Raw position in the source."""
    subs_P: NDArray[np.int32]
    """Number of the sample within its record."""
    starts_P: NDArray[np.int32]
    """First token of the sample that belongs to the piece."""
    stops_P: NDArray[np.int32]
    """First token that no longer does."""
    sizes_P: NDArray[np.int32]
    """Tokens of the whole sample; a piece that stops short of it has a next token to predict."""

    def __len__(self) -> int:
        return len(self.sources_P)

    @property
    def lengths_P(self) -> NDArray[np.int32]:
        """Tokens in each piece."""
        return self.stops_P - self.starts_P

    def take(self, indices: NDArray[np.integer[Any]]) -> "PieceTable":
        """Return the pieces at ``indices``."""
        return PieceTable(**{name: getattr(self, name)[indices] for name in PIECE_COLUMNS})

    def to_json(self) -> Json:
        """Return the pieces as a list of ``[source, position, sub, start, stop, size]``."""
        return [
            list(row)
            for row in zip(*(getattr(self, name).tolist() for name in PIECE_COLUMNS), strict=True)
        ]

    @staticmethod
    def from_json(rows: Json) -> "PieceTable":
        """Return the pieces that ``to_json`` wrote.

        Raises:
            StateError: The rows are not six integers each.
        """
        try:
            table = np.asarray(rows or np.empty((0, len(PIECE_COLUMNS))), np.int64)
        except (TypeError, ValueError) as error:
            raise StateError(
                f"carried pieces are not rows of six integers: {error}; the state is damaged"
            ) from error
        if rows is None or table.ndim != 2 or table.shape[1] != len(PIECE_COLUMNS):
            raise StateError(
                f"carried pieces have shape {table.shape}, not rows of six integers; the state is damaged"
            )
        columns = table.T
        return PieceTable(
            **{
                name: column.astype(dtype)
                for (name, dtype), column in zip(PIECE_COLUMNS.items(), columns, strict=True)
            }
        )

    @staticmethod
    def concatenated(tables: "list[PieceTable]") -> "PieceTable":
        """Return the pieces of all tables, in order."""
        return PieceTable(
            **{name: np.concatenate([getattr(t, name) for t in tables]) for name in PIECE_COLUMNS}
        )

    @staticmethod
    def empty() -> "PieceTable":
        """Return a table of no pieces."""
        return PieceTable(**{name: np.empty(0, dtype) for name, dtype in PIECE_COLUMNS.items()})


PIECE_COLUMNS: dict[str, type[np.generic]] = {
    "sources_P": np.int32,
    "positions_P": np.int64,
    "subs_P": np.int32,
    "starts_P": np.int32,
    "stops_P": np.int32,
    "sizes_P": np.int32,
}
"""Columns of a ``PieceTable`` and their types, in the order of the digest."""

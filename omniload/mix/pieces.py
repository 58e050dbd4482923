"""Pieces of samples: what rows are made of, and what the packer carries to the next step.

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
"""Samples of one record are below this."""
POSITION_LIMIT = 1 << 43
"""Raw positions are below this: position and sub together are one signed integer of 64 bits."""
TOKEN_LIMIT = 1 << 31
"""Tokens of one sample are below this."""


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
        return self._with(indices)

    def part(self, begin: int, end: int) -> "PieceTable":
        """Return the pieces ``begin`` to before ``end``, without a copy."""
        return self._with(slice(begin, end))

    def _with(self, which: "NDArray[np.integer[Any]] | slice") -> "PieceTable":
        # Column by column, and not by their names: small steps make as many tables as they have pieces.
        return PieceTable(
            sources_P=self.sources_P[which],
            positions_P=self.positions_P[which],
            subs_P=self.subs_P[which],
            starts_P=self.starts_P[which],
            stops_P=self.stops_P[which],
            sizes_P=self.sizes_P[which],
        )

    def rows(self) -> list[list[int]]:
        """Return the pieces as ``[source, position, sub, start, stop, size]``, sources by number."""
        return [
            list(row)
            for row in zip(*(getattr(self, name).tolist() for name in PIECE_COLUMNS), strict=True)
        ]

    def to_bytes(self) -> bytes:
        """Return all columns end to end, little-endian: equal on every machine."""
        return b"".join(
            getattr(self, name).astype(np.dtype(dtype).newbyteorder("<")).tobytes()
            for name, dtype in PIECE_COLUMNS.items()
        )

    def to_json(self, names: Sequence[str]) -> Json:
        """Return the pieces as ``[source, position, sub, start, stop, size]``, sources by name."""
        return [[names[row[0]], *row[1:]] for row in self.rows()]

    @staticmethod
    def from_rows(rows: Sequence[Sequence[int]]) -> "PieceTable":
        """Return the pieces that ``rows`` gave."""
        # Shaped for no rows as well, of which numpy makes an array without columns.
        columns = np.asarray(rows, np.int64).reshape(-1, len(PIECE_COLUMNS)).T
        return PieceTable(
            **{
                name: column.astype(dtype)
                for (name, dtype), column in zip(PIECE_COLUMNS.items(), columns, strict=True)
            }
        )

    @staticmethod
    def from_json(rows: Json, names: Sequence[str]) -> "PieceTable":
        """Return the pieces that ``to_json`` wrote.

        Raises:
            TypeError: It is no list.
            ValueError: A row is no source of ``names`` and five integers, or is no piece: each piece
                holds tokens, all of them within its sample.
        """
        if not isinstance(rows, list):
            raise TypeError(f"carried pieces are {shown(rows)}, not a list")
        number_of = {name: s for s, name in enumerate(names)}
        return PieceTable.from_rows([_numbered(row, number_of) for row in rows])

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


def _numbered(row: Json, number_of: Mapping[str, int]) -> list[int]:
    match row:
        case [str(name), position, sub, start, stop, size] if name in number_of:
            # From the largest down: the size bounds where a piece stops, and that where it starts.
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

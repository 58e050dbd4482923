"""Lists of token ids in Arrow's memory as records, and what is wrong with one that is none."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from omniload.base.errors import IntegrityError
from omniload.base.ragged import Ragged
from omniload.source.columns import drained

__all__ = ["nulls_of", "token_column", "token_ids"]

_INT32_MAX = np.iinfo(np.int32).max


def token_ids(ids_V: NDArray[Any], where: str) -> NDArray[np.int32]:
    """Show integers as token ids; int32 is not copied.

    Raises:
        IntegrityError: One is negative or larger than a token id.
    """
    # Types that fit need no look at their values.
    small = np.can_cast(ids_V.dtype, np.int32) and ids_V.dtype.kind == "u"
    if not small and len(ids_V):
        low, high = int(ids_V.min()), int(ids_V.max())
        if low < 0 or high > _INT32_MAX:
            raise IntegrityError(
                f"{where}: holds token id {low if low < 0 else high}; a token id is from 0 to {_INT32_MAX}, "
                "write the shard anew"
            )
    return ids_V.astype(np.int32, copy=False)


def nulls_of(column: pa.ChunkedArray | pa.Array) -> NDArray[np.bool_]:
    """Return which rows of a column are null, ``[B]``."""
    if not column.null_count:
        return np.zeros(len(column), np.bool_)
    return np.asarray(column.is_null().to_numpy(zero_copy_only=False), np.bool_)


def token_column(column: pa.ChunkedArray, where: str, named: str) -> Ragged:
    """Show lists of token ids as records.

    Args:
        column: The lists.
        where: Its place, for reasons.
        named: What it is called there.

    Raises:
        IntegrityError: A token id is null, negative or too large; with its row.
    """
    parts, start = [], 0
    for chunk in column.chunks:
        parts.append(_ragged(chunk, _Place(where, start, named)))
        start += len(chunk)
    return drained(parts, np.dtype(np.int32))


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a chunk of a column lies."""

    where: str
    start: int
    """Rows before it."""
    named: str

    def of(self, row: int) -> str:
        """Return the place of a row of the chunk, as a message begins."""
        return f"{self.where}: row {self.start + row}" + (
            f": {self.named}".rstrip() if self.named else ""
        )


def _ragged(lists: pa.Array, place: _Place) -> Ragged:
    """Show a list array as token ids; int32 is not copied.

    Raises:
        IntegrityError: One is null, negative or too large; ``place`` names the row.
    """
    values = lists.flatten()
    if pa.types.is_fixed_size_list(lists.type) or lists.null_count:
        lengths = lists.value_lengths().fill_null(0).to_numpy(zero_copy_only=False)
        offsets = np.concatenate((np.zeros(1, np.int64), np.cumsum(lengths, dtype=np.int64)))
    else:
        stored = lists.offsets.to_numpy()
        # A slice begins somewhere in the values; ``flatten`` has cut them there.
        offsets = stored.astype(np.int64) - int(stored[0])

    def place_of(value: int) -> str:
        return place.of(int(np.searchsorted(offsets[1:], value, side="right")))

    if values.null_count:
        first = int(nulls_of(values).argmax())
        raise IntegrityError(
            f"{place_of(first)}: {values.null_count} token ids are null; write integers"
        )
    ids_V = values.to_numpy()
    try:
        found_V = token_ids(ids_V, "")
    except IntegrityError:
        low = int(ids_V.argmin())
        found_V = token_ids(ids_V, place_of(low if ids_V[low] < 0 else int(ids_V.argmax())))
    return Ragged(values_V=found_V, offsets=offsets)

"""Cuts the records of a shard into units of about one size.

Shape suffixes:
    N  records of a shard        U  units of a shard
"""

import numpy as np
from numpy.typing import NDArray

from omniload.base.errors import ConfigError
from omniload.base.units import format_bytes
from omniload.source.files import ShardFile
from omniload.source.formats.format import MAX_UNIT_BYTES
from omniload.source.index import FileUnits

__all__ = ["byte_ranges", "cuts", "require_sizes", "whole_shard"]


def cuts(ends_N: NDArray[np.int64], unit_bytes: int) -> NDArray[np.int64]:
    """Return the number of the record that each unit starts with, and at last the number of records.

    A unit ends with the record that brings it to ``unit_bytes``.

    Args:
        ends_N: Byte after each record, from the first byte of the first; never falling.
        unit_bytes: Size of a unit.

    Returns:
        Numbers of records ``[U + 1]``, rising from 0; 0 alone where there is no record.
    """
    found = [0]
    start = 0
    while found[-1] < len(ends_N):
        # A search for each unit, and not a look at each record: a shard of tokens has millions.
        cut = int(np.searchsorted(ends_N, start + unit_bytes)) + 1
        found.append(min(max(cut, found[-1] + 1), len(ends_N)))
        start = int(ends_N[found[-1] - 1])
    return np.array(found, np.int64)


def byte_ranges(
    file: ShardFile, start: int, ends_N: NDArray[np.int64], *, unit_bytes: int, content: str
) -> FileUnits:
    """Cut records that lie end to end into units, each a range of bytes.

    Args:
        file: The shard.
        start: First byte of the first record.
        ends_N: Byte after each record; never falling.
        unit_bytes: Size of a unit, as for ``cuts``.
        content: Digest of what the shard holds.

    Raises:
        ConfigError: As for ``require_sizes``.
    """
    found = cuts(ends_N - start, unit_bytes)
    stops_U = ends_N[found[1:] - 1]
    starts_U = np.concatenate(([start], stops_U))[:-1]
    require_sizes(file, stops_U - starts_U)
    return FileUnits(rows=np.diff(found), starts=starts_U, stops=stops_U, content=content)


def whole_shard(file: ShardFile, start: int, stop: int, *, rows: int, content: str) -> FileUnits:
    """Make a shard one unit: of a compressed one no part can be read without what lies before it.

    Args:
        file: The shard.
        start: First byte, decompressed.
        stop: The byte after the last.
        rows: Its records; without any it has no unit.
        content: Digest of what it holds.

    Raises:
        ConfigError: As for ``require_sizes``.
    """
    rows_U, starts_U, stops_U = (
        np.array([(rows, start, stop)] if rows else [], np.int64).reshape(-1, 3).T
    )
    require_sizes(file, stops_U - starts_U)
    return FileUnits(rows=rows_U, starts=starts_U, stops=stops_U, content=content)


def require_sizes(file: ShardFile, sizes_U: NDArray[np.int64]) -> None:
    """Refuse a unit that is too large to be decoded at once.

    Raises:
        ConfigError: A single record makes such a unit, or ``unit`` is set so.
    """
    if (largest := int(sizes_U.max(initial=0))) > MAX_UNIT_BYTES:
        raise ConfigError(
            f"{file.path}: a record makes a unit of {format_bytes(largest)}, more than "
            f"{format_bytes(MAX_UNIT_BYTES)}; lower unit, or split the record"
        )

"""Divides the records of a shard into units of about one size.

Shape suffixes:
    N  records of a shard        U  units of a shard
"""

from collections.abc import Iterator

import numpy as np
import pyarrow as pa
import xxhash
from numpy.typing import NDArray

from omniload.base.errors import ConfigError
from omniload.base.units import format_bytes
from omniload.source.files import ShardFile
from omniload.source.formats.format import MAX_UNIT_BYTES
from omniload.source.index import FileUnits

__all__ = ["byte_ranges", "cuts", "line_ranges", "require_sizes", "whole_shard"]

_NEWLINE = 10


def cuts(ends_N: NDArray[np.int64], unit_bytes: int) -> NDArray[np.int64]:
    """Return the first record of each unit, followed by the number of records.

    A unit ends with the record that brings it to ``unit_bytes``.

    Args:
        ends_N: Byte after each record, counted from the first byte of the first record; never falling.
        unit_bytes: Size of a unit.

    Returns:
        Numbers of records, ``[U + 1]``, rising from 0; only 0 if there is no record.
    """
    found = [0]
    start = 0
    while found[-1] < len(ends_N):
        # One search per unit instead of a loop over records, because a shard of tokens has millions of records.
        cut = int(np.searchsorted(ends_N, start + unit_bytes)) + 1
        found.append(min(max(cut, found[-1] + 1), len(ends_N)))
        start = int(ends_N[found[-1] - 1])
    return np.array(found, np.int64)


def byte_ranges(
    file: ShardFile, start: int, ends_N: NDArray[np.int64], *, unit_bytes: int, content: str
) -> FileUnits:
    """Divide records that lie end to end into units, each a range of bytes.

    Args:
        file: The shard.
        start: First byte of the first record.
        ends_N: Byte after each record; never falling.
        unit_bytes: Size of a unit, as for ``cuts``.
        content: Digest of the content of the shard.

    Raises:
        ConfigError: As for ``require_sizes``.
    """
    found = cuts(ends_N - start, unit_bytes)
    stops_U = ends_N[found[1:] - 1]
    starts_U = np.concatenate(([start], stops_U))[:-1]
    require_sizes(file, stops_U - starts_U)
    return FileUnits(rows=np.diff(found), starts=starts_U, stops=stops_U, content=content)


def whole_shard(file: ShardFile, start: int, stop: int, *, rows: int, content: str) -> FileUnits:
    """Make one unit of a compressed shard, because no part of it can be read without the data before it.

    Args:
        file: The shard.
        start: First byte, decompressed.
        stop: Byte after the last.
        rows: Records of the shard; a shard without records has no unit.
        content: Digest of the content of the shard.

    Raises:
        ConfigError: As for ``require_sizes``.
    """
    rows_U, starts_U, stops_U = (
        np.array([(rows, start, stop)] if rows else [], np.int64).reshape(-1, 3).T
    )
    require_sizes(file, stops_U - starts_U)
    return FileUnits(rows=rows_U, starts=starts_U, stops=stops_U, content=content)


def line_ranges(
    chunks: Iterator[pa.Buffer], unit_bytes: int, digests: list[int] | None = None
) -> FileUnits:
    """Divide a file of lines at the first newline after every ``unit_bytes``; its ``content`` stays empty.

    Args:
        chunks: Content of the file, in order.
        unit_bytes: Size of a unit.
        digests: List that the xxh3 digest of each unit is appended to.
    """
    rows: list[int] = []
    stops: list[int] = []
    start = at = carried = 0
    unit_bytes, ended = max(1, unit_bytes), True
    digest = None if digests is None else xxhash.xxh3_64()
    for chunk in chunks:
        data = np.frombuffer(chunk, np.uint8)
        ends: NDArray[np.int64] = np.flatnonzero(data == _NEWLINE) + (at + 1)
        done = taken = 0
        while (cut := int(np.searchsorted(ends, start + unit_bytes))) < len(ends):
            rows.append(carried + cut + 1 - done)
            start, done, carried = int(ends[cut]), cut + 1, 0
            stops.append(start)
            if digest is not None and digests is not None:
                digest.update(chunk[taken : start - at])
                digests.append(digest.intdigest())
                digest.reset()
                taken = start - at
        if digest is not None:
            digest.update(chunk[taken:])
        carried += len(ends) - done
        at += len(data)
        # Checked here, because a file of zeros may have terabytes without a newline.
        if at - start > MAX_UNIT_BYTES:
            ended = False
            break
        ended = bool(data[-1] == _NEWLINE)
    if at > start:
        rows.append(carried + (not ended))
        stops.append(at)
        if digest is not None and digests is not None:
            digests.append(digest.intdigest())
    return FileUnits(
        rows=np.array(rows, np.int64),
        starts=np.array([0, *stops[:-1]] if stops else [], np.int64),
        stops=np.array(stops, np.int64),
        content="",
    )


def require_sizes(file: ShardFile, sizes_U: NDArray[np.int64]) -> None:
    """Raise an error for a unit that is too large to be decoded at once.

    Raises:
        ConfigError: A single record makes up such a unit, or ``unit`` is too large.
    """
    if (largest := int(sizes_U.max(initial=0))) > MAX_UNIT_BYTES:
        raise ConfigError(
            f"{file.path}: a record makes a unit of {format_bytes(largest)}, more than "
            f"{format_bytes(MAX_UNIT_BYTES)}; lower unit, or split the record"
        )

"""Divides the records of a shard into units of about one size.

Shape suffixes:
    N  records of a shard        U  units of a shard
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import xxhash
from numpy.typing import NDArray

from omniload.base.errors import ConfigError
from omniload.base.units import format_bytes
from omniload.source.files import ShardFile
from omniload.source.formats.format import MAX_UNIT_BYTES
from omniload.source.index import FileUnits

__all__ = ["Cuts", "byte_ranges", "cuts", "line_ranges", "require_sizes", "whole_shard"]

_NEWLINE = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Cuts:
    """Where the records of a shard are cut into units."""

    records_U: NDArray[np.int64]
    """Number of the record that each unit starts with, and at last the number of records ``[U + 1]``: rising from 0; 0
    alone where there is no record."""
    stops_U: NDArray[np.int64]
    """Byte after each unit, from the first byte of the first record ``[U]``."""

    @property
    def starts_U(self) -> NDArray[np.int64]:
        """First byte of each unit."""
        return np.concatenate(([0], self.stops_U))[:-1]


def cuts(ends: Iterable[NDArray[np.int64]], unit_bytes: int) -> Cuts:
    """Cut records into units: each ends with the record that brings it to ``unit_bytes``.

    Args:
        ends: Byte after each record, from the first byte of the first; never falling. Some at a time: those of a shard
            with a thousand million documents would take 8 GB together.
        unit_bytes: Size of a unit.
    """
    records, stops = [0], list[int]()
    before = start = last = 0
    unit_bytes = max(1, unit_bytes)
    for ends_N in ends:
        # A search for each unit, and not a look at each record: a shard of tokens has millions.
        while (cut := int(np.searchsorted(ends_N, start + unit_bytes))) < len(ends_N):
            start = int(ends_N[cut])
            records.append(before + cut + 1)
            stops.append(start)
        before += len(ends_N)
        last = int(ends_N[-1]) if len(ends_N) else last
    if records[-1] < before:
        records.append(before)
        stops.append(last)
    return Cuts(records_U=np.array(records, np.int64), stops_U=np.array(stops, np.int64))


def byte_ranges(file: ShardFile, start: int, found: Cuts, *, content: str) -> FileUnits:
    """Make units of records that lie end to end, each a range of bytes.

    Args:
        file: The shard.
        start: First byte of the first record.
        found: Where they are cut.
        content: Digest of what the shard holds.

    Raises:
        ConfigError: As for ``require_sizes``.
    """
    starts_U, stops_U = start + found.starts_U, start + found.stops_U
    require_sizes(file, stops_U - starts_U)
    return FileUnits(rows=np.diff(found.records_U), starts=starts_U, stops=stops_U, content=content)


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

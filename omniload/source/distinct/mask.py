"""The records of a source that become samples: those of its split, and those that equal no earlier record.

Duplicates are found by reading the source once, and the result is kept with its index.

The result is valid while the shards and the declaration of the source are unchanged. Otherwise, or if its file is
damaged, it is computed again. It follows from the data alone, so losing it does not change the samples.

Shape suffixes:
    U  units        B  records of one unit
"""

import hashlib
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from pathlib import Path
from tempfile import gettempdir

import numpy as np
import orjson
import pyarrow as pa
from numpy.typing import NDArray

from omniload.base.errors import StateError, system_refusals
from omniload.base.log import get_logger
from omniload.base.ragged import Ragged, Rows, numbers_of
from omniload.base.reading import open_file
from omniload.base.units import format_bytes
from omniload.mix.config import OnError
from omniload.mix.schema.splits import TRAIN, content_keys, in_split
from omniload.mix.sources import RegisteredSource, SourceConfig, TextSource
from omniload.source.distinct.drawn_before import DrawnBefore
from omniload.source.distinct.first_seen import KEY_BYTES, Bits, FirstSeen
from omniload.source.files import ShardFile
from omniload.source.formats.format import Format, Records
from omniload.source.index import key_of_file, write_kept
from omniload.source.parsing.image_cells import ENCODED
from omniload.source.spec import SourceSpec

__all__ = ["DISTINCT_VERSION", "DistinctRecords", "RecordRules", "distinct_records"]

DISTINCT_VERSION = 1
"""Version of the kept file, in the metadata of its schema; a file of another version is replaced."""
_NOT_DECISIVE = {
    *("tags", "shuffle", "on_error", "splits", "split"),
    *("max_repetition", "max_fraction", "overlong", "pack", "drawn_before"),
}
"""Keys of a source that do not affect which records are equal."""
_VERSION, _OF = b"omniload.distinct", b"of"
_FIRST = "first"
_SAID_EVERY_S = 10.0
_log = get_logger(__name__)


class DistinctRecords:
    """Finds the records of a unit that are the first of their key in the source, in the order of its files."""

    def __init__(self, first: Bits, rows_U: NDArray[np.int64]) -> None:
        self._first = first
        self._begins_U = np.cumsum(rows_U) - rows_U
        self._rows_U = rows_U

    def of_unit(self, unit: int) -> NDArray[np.bool_]:
        """Return which records of a unit are the first of their key, ``[B]``."""
        begin = int(self._begins_U[unit])
        return self._first.between(begin, begin + int(self._rows_U[unit]))


def _keys_by(records: Records, by: str) -> NDArray[np.uint64]:
    """Return the key of each record of a unit: of the key that the source names, or of its whole content."""
    if by == "key":
        assert records.keys_B is not None, "the source names a key"
        return records.keys_B
    keys_B = content_keys(records.column)
    images = records.others.get(ENCODED)
    if images is None:
        return keys_B
    # One hash of both hashes, because the same caption with two images makes two records.
    both = np.stack((keys_B, content_keys(images)), axis=1).reshape(-1)
    return content_keys(Ragged(values_V=both, offsets=np.arange(len(keys_B) + 1) * 2))


def distinct_records(
    spec: SourceSpec, record_format: Format, files: Sequence[ShardFile]
) -> DistinctRecords | None:
    """Return the records that equal no earlier record; ``None`` if the source asks for all records.

    This reads the whole source if no result is kept. It takes 1 bit of memory and 16 bytes of disk in the folder of the
    index per record, and some 100 MiB of memory in any case.

    Args:
        spec: The source; the result is kept with its index.
        record_format: Format that reads the source.
        files: Its shards.

    Raises:
        IntegrityError: A shard is truncated or corrupt.
        UnavailableError: A store did not answer, or the folder of the index has no room for the keys.
    """
    if spec.config.dedupe is None:
        return None
    units = record_format.units()
    rows_U, of = units.rows_U, _digest(spec.config, files, units.contents_F)
    folder = spec.cache_dir
    path = None if folder is None else folder / f"{spec.name}.{of}.distinct.arrow"
    first = None if path is None else _kept(path, of, int(rows_U.sum()))
    if first is None:
        first = _found(spec.name, spec.config.dedupe, record_format, rows_U, path)
        if path is not None:
            _keep(path, of, first)
    return DistinctRecords(first, rows_U)


def _found(
    name: str, by: str, record_format: Format, rows_U: NDArray[np.int64], path: Path | None
) -> Bits:
    """Read the source, and log the progress now and then."""
    folder = None
    # Next to the index, whose disk was chosen for this; the system's folder may be in memory. A folder that may not be
    # looked at, below the home of another user, is not used either.
    if path is not None and os.access(path.parent, os.W_OK | os.X_OK):
        folder = path.parent
    total, begin, said_s = int(rows_U.sum()), 0, time.monotonic()
    writing = _writing_keys(name, total, folder)
    with system_refusals(writing), FirstSeen(total, folder=folder) as seen:
        for unit, rows in enumerate(rows_U.tolist()):
            if not rows:
                continue
            records = record_format.read_unit(unit)
            # A record that cannot be drawn must not hide an equal one that can.
            usable = np.flatnonzero(records.usable_B)
            seen.add(_keys_by(records, by)[usable], begin + usable)
            begin += rows
            if time.monotonic() - said_s > _SAID_EVERY_S:
                said_s = time.monotonic()
                _log.info("sources.%s: dedupe has read %d of %d records", name, begin, total)
        return seen.finish()


def _writing_keys(name: str, records: int, folder: Path | None) -> str:
    size, where = format_bytes(records * KEY_BYTES), folder or gettempdir()
    return f"sources.{name}: dedupe writes the keys of {records:,} records, {size}, to {where}"


def _digest(config: SourceConfig, files: Sequence[ShardFile], contents_F: Sequence[str]) -> str:
    """Return a digest of everything that decides which records are equal: the shards, and how they are read."""
    declared = config.model_dump(mode="json", exclude=_NOT_DECISIVE)
    # With ``repr`` below, because a name that is not UTF-8 is no text to orjson.
    shards = [list(key_of_file(file)) for file in files]
    decisive = [declared, repr(shards)]
    # From the same bytes, another version of a reader makes other records, as earlier releases did for a text with a
    # mark. The digest of the content includes this version.
    if isinstance(config, RegisteredSource | TextSource):
        decisive.append(list(contents_F))
    said = orjson.dumps(decisive, option=orjson.OPT_SORT_KEYS)
    return hashlib.blake2b(said, digest_size=6).hexdigest()


def _kept(path: Path, of: str, records: int) -> Bits | None:
    """Return the kept result; ``None`` if there is none, or none that can be used."""
    try:
        with open_file(path) as opened, pa.ipc.open_file(opened.read()) as stored:
            wanted = {_VERSION: str(DISTINCT_VERSION).encode(), _OF: of.encode()}
            if stored.schema.names != [_FIRST] or (stored.schema.metadata or {}) != wanted:
                return None
            table = stored.read_all()
        table.validate(full=True)
        column = table[_FIRST].combine_chunks()
        if column.type != pa.bool_() or len(column) != records or column.null_count:
            return None
        return Bits.of(column)
    except FileNotFoundError:
        pass
    except (StateError, OSError, ValueError, pa.ArrowException) as error:
        _log.warning("%s: what dedupe found cannot be read (%s); finding it anew", path, error)
    return None


def _keep(path: Path, of: str, first: Bits) -> None:
    """Write the file completely or not at all; a failure does not stop the run."""
    metadata = {_VERSION: str(DISTINCT_VERSION).encode(), _OF: of.encode()}
    schema = pa.schema([(_FIRST, pa.bool_())], metadata=metadata)
    buffers = [None, pa.py_buffer(first.packed)]
    # Arrow packs booleans like ``Bits``, with the lowest bit first.
    column = pa.Array.from_buffers(pa.bool_(), first.count, buffers)
    out = pa.BufferOutputStream()
    with pa.ipc.new_file(out, schema) as stored:
        stored.write_table(pa.table([column], schema=schema))
    write_kept(path, out.getvalue())


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordRules:
    """Rules for the records that become samples."""

    on_error: OnError = field(default_factory=OnError)
    """Treatment of records that cannot be decoded."""
    splits: Mapping[str, float] = field(default_factory=dict)
    """Splits of the source."""
    split: str = TRAIN
    """Split that is drawn from the source."""
    distinct: DistinctRecords | None = None
    """Records that equal no earlier record, if only those are drawn."""
    drawn_before: DrawnBefore | None = None
    """Records that the first epoch leaves out, if another loader has drawn any."""

    def leaves(
        self,
        epoch: int,
        rows: Rows,
        places_of: Callable[[NDArray[np.int64]], tuple[NDArray[np.int64], NDArray[np.int64]]],
    ) -> NDArray[np.bool_] | np.bool_:
        """Return which records of an epoch another loader has not drawn; ``places_of`` gives units and numbers."""
        # The other loader stopped within the first epoch; later epochs are complete.
        if epoch or self.drawn_before is None:
            return np.True_
        return self.drawn_before.leaves(*places_of(numbers_of(rows)))

    def drawn_of(self, unit: int, records: Records) -> NDArray[np.bool_] | None:
        """Return which records of a unit pass the split, the conditions and deduplication; ``None`` for all."""
        rules = [] if records.kept_B is None else [records.kept_B]
        if self.distinct is not None:
            rules.append(self.distinct.of_unit(unit))
        # Splits come last, because equal documents must not be in different splits.
        if self.splits:
            keys_B = content_keys(records.column) if records.keys_B is None else records.keys_B
            rules.append(in_split(keys_B, self.splits, self.split))
        return reduce(np.logical_and, rules) if rules else None

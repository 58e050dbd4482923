"""The index of a source: the units of every file, found once and kept.

Finding the units means reading footers or scanning for newlines, which takes too long for every opening of a large
source. The index is therefore kept in ``cache_dir``, one file per source, with a digest of the content of each shard. A
shard's entry is used while its size, modification time and mark are the same. A replaced local file has another inode
and time of change, which no copy preserves; on a store, another tag. If a store has no tags, a shard that is replaced
by one of the same size *and* time is not noticed until the index is deleted.
"""

import hashlib
import os
import time
import uuid
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from types import MethodType
from typing import Any
from weakref import WeakMethod

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from omniload.base.concurrency.threads import DaemonPool
from omniload.base.errors import ConfigError, IntegrityError, StateError
from omniload.base.log import get_logger
from omniload.base.reading import open_file
from omniload.base.writing import FULL, free_in, write_whole
from omniload.source.access.index_folders import indexes_beside, share_places
from omniload.source.files import ShardFile, reading
from omniload.source.formats.content import HeldContent
from omniload.source.formats.format import MAX_UNIT_RECORDS, UnitTable
from omniload.source.parsing.beginnings import codec_of, said_of_shard

__all__ = [
    "INDEX_VERSION",
    "FileUnits",
    "IndexCache",
    "index_of",
    "key_of_file",
    "write_kept",
]

INDEX_VERSION = 3
"""Version of the index file, in the metadata of its schema; an index of another version is built anew."""

_VERSION = b"omniload.index"
_OF_A_FILE = ("path", "stamp", "mark", "size", "content")
_OF_UNITS = ("rows", "starts", "stops")
_SCHEMA = pa.schema(
    [
        ("path", pa.binary()),
        ("stamp", pa.string()),
        ("mark", pa.string()),
        ("size", pa.int64()),
        ("content", pa.string()),
        *((name, pa.list_(pa.int64())) for name in _OF_UNITS),
    ],
    metadata={_VERSION: str(INDEX_VERSION)},
)
"""One row per shard. A zip of eleven arrays took four times as long to read, for each of 1,000 sources."""

_READERS, _HEAD_BYTES = 8, 64
_KEEP_EVERY_S, _SAID_EVERY_S = 60.0, 10.0
_log = get_logger(__name__)
_told: set[tuple[Path, int | None]] = set()
"""Folders that were warned of, each with the number of the error."""


def write_kept(path: Path, content: bytes) -> bool:
    """Write findings about sources to a folder of indexes, completely or not at all; a run continues without them.

    Returns:
        Whether the content was written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, content)
    except OSError as error:
        _tell_not_kept(path.parent, error)
        return False
    return True


def _tell_not_kept(folder: Path, error: OSError) -> None:
    """Warn that a folder of indexes cannot be written, and why: once in a process, not for each of 1,000 sources."""
    if (folder, error.errno) in _told:
        return
    _told.add((folder, error.errno))
    said = error.strerror or str(error)
    if error.errno in FULL:
        said = f"{said}, {free_in(folder)}"
    _log.warning(
        "%s: nothing can be saved there (%s), so every start builds indexes, and searches and measures sources, "
        "again; free space or permit writing there, or set XDG_CACHE_HOME, or --cache-dir of a command, to another "
        "folder",
        *(folder, said),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class FileUnits:
    """Units of one file: their record counts, their starts and stops, and a digest of their content."""

    rows: NDArray[np.int64]
    starts: NDArray[np.int64]
    stops: NDArray[np.int64]
    content: str


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexCache:
    """Place where the index of a source is kept."""

    folder: Path
    """Folder of the index, which is created when needed."""
    source: str
    """Name of the source."""

    def path(self, kind: str) -> Path:
        """Return the file for units that are cut in the way of ``kind``."""
        # Each way has its own file, so that two mixes that cut a source in different ways do not overwrite each
        # other's.
        digest = hashlib.blake2b(kind.encode(), digest_size=6).hexdigest()
        return self.folder / f"{self.source}.{digest}.index.arrow"

    def access_folder(self, kind: str) -> Path:
        """Return the folder next to the index that keeps entry points of the source's compressed shards."""
        return _access_folder(self.path(kind))


def index_of(
    files: Sequence[ShardFile],
    build: Callable[[ShardFile], FileUnits],
    *,
    kind: str,
    cache: IndexCache | None,
    unpacks: bool | None = False,
    anew: Collection[str] = (),
) -> UnitTable:
    """Return the units of all files, building only what the index lacks.

    Args:
        files: The shards.
        build: Finds the units of one file; called from several threads if there are several files.
        kind: Identifies how files are cut; cached units must be cut in the same way.
        cache: Place of the index; ``None`` builds it every time.
        unpacks: Whether the type reads compressed shards; ``None`` if its shards may begin with any bytes.
        anew: Paths of shards that are built even if the index has them.

    Raises:
        ConfigError: A unit claims more records than the limit.
        OmniloadError: What ``build`` raises, for the first damaged file.
    """
    known = _known_of(files, kind, cache) if cache else {}
    missing = [file for file in files if file.path not in known or file.path in anew]
    find = partial(_units_of, build=build, unpacks=unpacks)

    def keep(found: Mapping[str, FileUnits]) -> None:
        if cache is not None:
            _save(cache.path(kind), files, found)

    if len(missing) == 1:  # else a thousand sources of one file each would start a thousand threads
        known[missing[0].path] = find(missing[0])
    elif missing:
        what = f"sources.{cache.source}" if cache is not None else missing[0].path
        _find_all(missing, find, known, keep, what)
    if missing:
        keep(known)
    units = [known[file.path] for file in files]
    # Weak, because otherwise a format and its files would keep each other, and open files, until a garbage collection.
    again = WeakMethod(build) if isinstance(build, MethodType) else lambda: build
    for file, unit in zip(files, units, strict=True):
        if file.remote is None and unit.content:
            file.known.require_same = HeldContent(unit.content, again)
    counts = [len(unit.rows) for unit in units]
    return UnitTable(
        rows_U=_joined([unit.rows for unit in units]),
        shards_U=np.repeat(np.arange(len(files)), counts),
        starts_U=_joined([unit.starts for unit in units]),
        stops_U=_joined([unit.stops for unit in units]),
        # A file without records takes no part, so adding or removing one does not change the source.
        contents_F=tuple(unit.content if unit.rows.any() else "" for unit in units),
    )


def _known_of(files: Sequence[ShardFile], kind: str, cache: IndexCache) -> dict[str, FileUnits]:
    """Return by path the units of the files that are known: to its index, or else to that of another mix file."""
    own, known, is_new = cache.path(kind), dict[str, FileUnits](), False
    # Lazily: a user may have hundreds of folders of other mix files, and mostly the own index has every file.
    rest, paths = list(files), chain([own], indexes_beside(own))
    while rest and (path := next(paths, None)) is not None:
        kept = _load(path)
        found = {file.path: units for file in rest if (units := kept.get(key_of_file(file)))}
        known |= found
        rest = [file for file in rest if file.path not in found]
        if found and path != own:
            is_new = True
            share_places(_access_folder(own), _access_folder(path))
            said = "sources.%s: the index of another mix file knows %d of its files: %s"
            _log.debug(said, cache.source, len(found), path)
    if is_new:
        _save(own, files, known)
    return known


def _access_folder(index: Path) -> Path:
    return index.with_name(index.name.removesuffix("index.arrow") + "access")


def _find_all(
    missing: Sequence[ShardFile],
    find: Callable[[ShardFile], FileUnits],
    known: dict[str, FileUnits],
    keep: Callable[[Mapping[str, FileUnits]], None],
    what: str,
) -> None:
    """Find the units of several files, and add them to what is known by their paths.

    They are kept on the way, and where it ends before: of compressed lines each byte is read, which takes hours where
    they are terabytes, and whoever was stopped there, or had one damaged file, goes on with the rest.
    """
    said_s = kept_s = time.monotonic()
    ended = 0

    def add(file: ShardFile) -> None:
        known[file.path] = find(file)

    def advance(more: int) -> None:
        nonlocal ended, said_s, kept_s
        ended += more
        now_s = time.monotonic()
        if now_s - said_s > _SAID_EVERY_S:
            said_s = now_s
            _log.info("%s: found the units of %d of %d shards", what, ended, len(missing))
        if now_s - kept_s > _KEEP_EVERY_S:
            keep(known.copy())
            kept_s = time.monotonic()

    try:
        with DaemonPool(min(_READERS, len(missing)), "omniload-index", reads=True) as pool:
            pool.map(add, missing, advance=advance)
    except BaseException:
        keep(known.copy())
        raise


def _units_of(
    file: ShardFile, build: Callable[[ShardFile], FileUnits], *, unpacks: bool | None
) -> FileUnits:
    """Find the units of a file. A sound file of another type is reported as such, not as damaged.

    Raises:
        ConfigError: A unit claims more records than any may hold.
        IntegrityError: It is sound, and none of its type.
        OmniloadError: What ``build`` raises.
    """
    try:
        units = build(file)
    except IntegrityError as error:
        with reading(file, "its first bytes"):
            head = file.read_range(0, min(_HEAD_BYTES, file.size_bytes))
        said = said_of_shard(head, codec_of(file), unpacks=unpacks)
        if not said:
            raise
        raise IntegrityError(f"{file.path}: {said}") from error
    # Before an order is made of them, which takes memory by the count: a damaged head may claim any.
    _require_records(file.path, units.rows)
    return units


_Key = tuple[str, str, str, int]


def key_of_file(file: ShardFile) -> _Key:
    """Return what tells a shard from others and from its earlier states: path, stamps, marks and size."""
    every = (file, *file.beside)
    return (
        file.path,
        "|".join(each.stamp for each in every),
        "|".join(each.mark for each in every),
        sum(each.size_bytes for each in every),
    )


def _joined(columns: Sequence[NDArray[Any]]) -> NDArray[np.int64]:
    return np.concatenate(columns).astype(np.int64) if columns else np.empty(0, np.int64)


def _load(path: Path) -> dict[_Key, FileUnits]:
    """Read the index; a missing or damaged index, or one of another version, counts as empty."""
    try:
        # Read, not mapped, because a mapped file that is truncated kills the process.
        with open_file(path) as opened, pa.ipc.open_file(opened.read()) as stored:
            if (stored.schema.metadata or {}).get(_VERSION) != str(INDEX_VERSION).encode():
                return {}
            table = stored.read_all()
        _require_columns(table)
        units = {name: table[name].combine_chunks() for name in _OF_UNITS}
        stops_F = np.cumsum(_counts(units))
        # The numbers of all files lie end to end, and are divided below without a copy.
        numbers = {name: column.flatten().to_numpy() for name, column in units.items()}
        _require_units(**{f"{name}_U": column for name, column in numbers.items()})
        return {
            (os.fsdecode(path), stamp, mark, size): FileUnits(
                content=content, **{name: column[start:stop] for name, column in numbers.items()}
            )
            for path, stamp, mark, size, content, start, stop in zip(
                *(table[name].to_pylist() for name in _OF_A_FILE),
                [0, *stops_F.tolist()][: table.num_rows],
                stops_F.tolist(),
                strict=True,
            )
        }
    except FileNotFoundError:
        return {}
    except (StateError, OSError, ValueError, pa.ArrowException) as error:
        _log.warning("%s: index cannot be read (%s); building it anew", path, error)
        return {}


def _require_columns(table: pa.Table) -> None:
    """Raise if the columns of a table differ, if its offsets are wrong, or if a value is missing."""
    if not table.schema.equals(_SCHEMA):
        raise ValueError(f"its columns are {', '.join(table.schema.names)}")
    table.validate(full=True)
    if any(column.null_count for column in table.columns):
        raise ValueError("a value is missing")


def _counts(units: Mapping[str, pa.ListArray]) -> NDArray[np.int64]:
    """Return the units of each file, ``[F]``.

    Raises:
        ValueError: The columns of a file differ in length.
    """
    counts_F: NDArray[np.int64]
    counts_F, *others = (column.value_lengths().to_numpy() for column in units.values())
    if not all(np.array_equal(counts_F, other_F) for other_F in others):
        raise ValueError("a file has other counts of records than of places")
    return counts_F


def _require_units(rows_U: NDArray[Any], starts_U: NDArray[Any], stops_U: NDArray[Any]) -> None:
    """Raise if the numbers cannot belong to any file."""
    if min(column.min(initial=0) for column in (rows_U, starts_U)) < 0:
        raise ValueError("a count or a start is negative")
    if rows_U.max(initial=0) > MAX_UNIT_RECORDS:
        raise ValueError("a count is larger than any that is built")
    if (stops_U < starts_U).any():
        raise ValueError("a unit stops before it starts")


def _require_records(path: str, rows_U: NDArray[Any]) -> None:
    """Raise for an impossible record count, before memory is taken for so many records."""
    unit = int(rows_U.argmax()) if len(rows_U) else 0
    if len(rows_U) and (records := int(rows_U[unit])) > MAX_UNIT_RECORDS:
        raise ConfigError(
            f"{path}: unit {unit} claims {records:,} records, and one holds at most {MAX_UNIT_RECORDS:,}; "
            "write the file in smaller units, or replace it where it is damaged"
        )


def _save(path: Path, files: Sequence[ShardFile], known: Mapping[str, FileUnits]) -> None:
    """Write the index whole or not at all; a run does not fail for want of it.

    Of these files alone, as far as they are known: else it would grow by every shard that there ever was.
    """
    keys = [key_of_file(file) for file in files if file.path in known]
    units = [known[path] for path, _, _, _ in keys]
    columns = [
        # A name need not be UTF-8.
        [os.fsencode(path) for path, _, _, _ in keys],
        *([key[place] for key in keys] for place in (1, 2, 3)),
        [unit.content for unit in units],
        *([getattr(unit, name) for unit in units] for name in _OF_UNITS),
    ]
    # ``write_kept`` is not used: this replaces a pipe at the path, and has a large index only once in memory.
    # The name is unique: loaders, shadows and checks of a run may build one index at the same time.
    unfinished = path.with_name(f"{path.name}.{uuid.uuid4().hex}.unfinished")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with unfinished.open("wb") as out, pa.ipc.new_file(out, _SCHEMA) as stored:
            stored.write_table(pa.table(columns, schema=_SCHEMA))
        os.replace(unfinished, path)  # noqa: PTH105 -- replaces in one step
    except OSError as error:
        with suppress(OSError):
            unfinished.unlink(missing_ok=True)
        _tell_not_kept(path.parent, error)

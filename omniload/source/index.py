"""The index of a source: the units of every file, found once and kept.

Finding the units means reading footers or scanning for newlines, which takes too long for every opening of a large
source. The index is therefore kept in ``cache_dir``, one file per source, with a digest of the content of each shard. A
shard's entry is used while its size, modification time and mark are the same. A replaced local file has another inode
and time of change, which no copy preserves; on a store, another tag. If a store has no tags, a shard that is replaced
by one of the same size *and* time is not noticed until the index is deleted.
"""

import hashlib
import math
import os
import time
import uuid
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import MethodType
from typing import Any
from weakref import WeakMethod

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from omniload.base.concurrency.calls_under_way import under_way
from omniload.base.concurrency.threads import DaemonPool
from omniload.base.errors import ConfigError, IntegrityError, StateError
from omniload.base.log import get_logger
from omniload.base.reading import open_file
from omniload.base.writing import FULL, free_in, write_whole
from omniload.source.files import Known, ShardFile, reading
from omniload.source.formats.format import MAX_UNIT_RECORDS, UnitTable
from omniload.source.parsing.beginnings import codec_of, said_of_shard
from omniload.source.stores.asking import rewritten

__all__ = [
    "INDEX_VERSION",
    "FileUnits",
    "IndexCache",
    "index_folder",
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
_REST, _AT_ONCE, _RAREST, _LONGEST_S = 100.0, 4, 4, 43_200.0
"""After the n-th check of a shard's content, pause for its time, times 100 to the n - 4; half a day at most."""
_log = get_logger(__name__)
_NO_HOME = Path("~")
_told: set[tuple[Path, int | None]] = set()
"""Folders that were warned of, each with the number of the error."""


def index_folder(mix_path: Path) -> Path | None:
    """Return the folder for the indexes of a mix file's sources, under the user's cache folder.

    Without such a folder, as in a container that does not list its user, return ``None`` and warn once.
    """
    cache = os.environ.get("XDG_CACHE_HOME")
    try:
        above = Path(cache) if cache else Path("~/.cache").expanduser()
    except RuntimeError:
        if (_NO_HOME, None) not in _told:
            _told.add((_NO_HOME, None))
            _log.warning(
                "user %d has no home, and neither HOME nor XDG_CACHE_HOME is set: indexes, and what was found or "
                "measured of sources, are made anew in every start; set XDG_CACHE_HOME to a folder that keeps them",
                os.geteuid(),
            )
        return None
    # Mix files with the same name in different folders have indexes of their own.
    digest = hashlib.blake2b(os.fsencode(mix_path.resolve()), digest_size=6).hexdigest()
    return above / "omniload" / "index" / f"{mix_path.stem}.{digest}"


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
        "%s: nothing can be kept there (%s): indexes, and what was found or measured of sources, are made anew in "
        "every start; make room and rights for it, or have XDG_CACHE_HOME, or --cache-dir of a command, name another",
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
        path = self.path(kind)
        return path.with_name(path.name.removesuffix("index.arrow") + "access")


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
    kept = _load(cache.path(kind)) if cache else {}
    missing = [file for file in files if key_of_file(file) not in kept or file.path in anew]
    built: dict[str, FileUnits] = {}
    find = partial(_units_of, build=build, unpacks=unpacks)
    if len(missing) == 1:  # else a thousand sources of one file each would start a thousand threads
        built = {missing[0].path: find(missing[0])}
    elif missing:
        with DaemonPool(min(_READERS, len(missing)), "omniload-index", reads=True) as pool:
            found = pool.map(find, missing)
        built = dict(zip((file.path for file in missing), found, strict=True))
    # Checked before an order takes memory in proportion to the count; a damaged head may claim any count.
    for path, unit in built.items():
        _require_records(path, unit.rows)
    units = [built.get(file.path) or kept[key_of_file(file)] for file in files]
    if cache and missing:
        # Only these files, because otherwise an index would grow by every shard that ever existed.
        _save(cache.path(kind), files, units)
    # Weak, because otherwise a format and its files would keep each other, and open files, until a garbage collection.
    again = WeakMethod(build) if isinstance(build, MethodType) else lambda: build
    for file, unit in zip(files, units, strict=True):
        if file.remote is None and unit.content:
            file.known.require_same = _Content(unit.content, again)
    counts = [len(unit.rows) for unit in units]
    return UnitTable(
        rows_U=_joined([unit.rows for unit in units]),
        shards_U=np.repeat(np.arange(len(files)), counts),
        starts_U=_joined([unit.starts for unit in units]),
        stops_U=_joined([unit.stops for unit in units]),
        # A file without records takes no part, so adding or removing one does not change the source.
        contents_F=tuple(unit.content if unit.rows.any() else "" for unit in units),
    )


class _Content:
    """The content of a local shard when its units were found. It is read again if the time of change differs.

    A new mode, owner, name or link changes that time, too, but no byte. The inode is not compared: FUSE may make it up
    for as long as it remembers a file. A file that is renamed into place has a new time of change.
    """

    __slots__ = ("_content", "_due_s", "_find", "_looks", "_times")

    def __init__(self, content: str, find: "Callable[[], _Find | None]") -> None:
        self._content, self._find = content, find  # which returns None once nothing uses the units
        self._times: list[str] | None = None  # as in the file's mark, which is not stored twice
        self._due_s, self._looks = -math.inf, 0

    def __call__(self, file: ShardFile, marks: Sequence[str]) -> None:
        """Raise if the content differs; see ``Known``. Raises like ``ShardFile.require_unchanged``."""
        times = _times_of(marks)
        then = self._times or _times_of([each.mark for each in (*file.beside, file)])
        find = self._find()
        if find is None or times == then or (begin_s := time.monotonic()) < self._due_s:
            return
        # Without ``known``, as at the first look, so that kept entry points stay those of this shard.
        looked_at = replace(file, known=Known())
        with under_way(f"looks at what {file.path} holds"):
            try:
                content = find(looked_at).content
            except (IntegrityError, ConfigError) as error:
                looked_at.require_unchanged()  # its message is better if the size has changed
                if isinstance(error.__cause__, MemoryError):
                    raise  # memory is short because of other readers; this says nothing of the file
                content = ""
        if content != self._content:
            changes = zip((*file.beside, file), then, times, strict=True)
            each, since = [(each, now) for each, before, now in changes if before != now][-1]
            raise rewritten(each.path, each.size_bytes, since)
        _log.info("%s: its time of change is another, and it holds what it held", file.path)
        end_s, self._times, self._looks = time.monotonic(), times, self._looks + 1
        # If the time of change means nothing, as on file systems that make it up, checks become rare but never stop.
        rest_s = (end_s - begin_s) * _REST ** min(self._looks - _AT_ONCE, _RAREST)
        self._due_s = end_s + min(rest_s, max(_LONGEST_S, (end_s - begin_s) * _REST))


def _times_of(marks: Sequence[str]) -> list[str]:
    """Return the times of change from marks of local files."""
    return [mark.rpartition("/")[2] for mark in marks]


def _units_of(
    file: ShardFile, build: Callable[[ShardFile], FileUnits], *, unpacks: bool | None
) -> FileUnits:
    """Find the units of a file. A sound file of another type is reported as such, not as damaged.

    Raises:
        IntegrityError: The file is sound, but has another type.
        OmniloadError: What ``build`` raises.
    """
    try:
        return build(file)
    except IntegrityError as error:
        with reading(file, "its first bytes"):
            head = file.read_range(0, min(_HEAD_BYTES, file.size_bytes))
        said = said_of_shard(head, codec_of(file), unpacks=unpacks)
        if not said:
            raise
        raise IntegrityError(f"{file.path}: {said}") from error


_Key = tuple[str, str, str, int]
_Find = Callable[[ShardFile], FileUnits]


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


def _save(path: Path, files: Sequence[ShardFile], units: Sequence[FileUnits]) -> None:
    """Write the index completely or not at all; a failure does not stop the run."""
    keys = [key_of_file(file) for file in files]
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

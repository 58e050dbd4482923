"""Lance data sets: a range of rows of a fragment is one unit."""

import glob
import os
from collections.abc import Iterable, Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

import fsspec
import numpy as np
import pyarrow as pa
from fsspec.core import url_to_fs
from typing_extensions import override

from omniload.base.concurrency.calls_under_way import under_way
from omniload.base.errors import ConfigError, IntegrityError
from omniload.base.extras import missing_extra
from omniload.base.linux.folders import matches_of
from omniload.base.secrets import note_secrets_of
from omniload.mix.sources import LanceSource
from omniload.source.braces import expanded
from omniload.source.files import ShardFile, reading, shortened
from omniload.source.formats.content import digest_of, digest_of_ranges, even_ranges
from omniload.source.formats.format import FIRST_RECORDS, IndexedFormat, Records
from omniload.source.formats.spec import FormatSpec
from omniload.source.index import FileUnits, IndexCache, index_of
from omniload.source.parsing.arrow_columns import index_kind, require_table
from omniload.source.parsing.lance_stores import IN_ITS_PLACE, SCHEMES, url_in
from omniload.source.parsing.nested_columns import column_of
from omniload.source.parsing.table_records import TableColumns
from omniload.source.parsing.token_lists import RowsAt
from omniload.source.patterns import FileNames, is_url, listing, natural_order

if TYPE_CHECKING:
    from omniload.source.parsing.lance_dataset import LanceDataset

__all__ = ["FORMAT", "LanceFormat"]

_MOST_ROWS = 1 << 16
"""Most rows of a unit: a value that all rows share takes no room in storage."""
_VERSIONS = "_versions"
_MOST_VERSIONS = 1_000
"""Most versions that are searched for the version that a run read before."""


class LanceFormat(IndexedFormat):
    """Reads columns of text, of token ids or of images, a range of rows at a time, without deleted rows."""

    def __init__(
        self, files: Sequence[ShardFile], config: LanceSource, cache: IndexCache | None = None
    ) -> None:
        self.holds_text = config.holds != "tokens"
        self._files, self._config, self._columns = files, config, TableColumns(config)
        self._read = tuple(dict.fromkeys((*self._columns.all, *config.image_members)))
        """Columns of whole records."""
        self._places = _places_of(files)
        kind = index_kind("lance", config)
        self._units = index_of(files, self._index, kind=f"{config.unit}/{kind}", cache=cache)

    @override
    def read_unit(self, unit: int) -> Records:
        images = self._config.images
        table, where = self._rows(unit, self._units[unit].rows, self._read)
        return self._columns.records(
            table, where, images=column_of(table, images) if images else None
        )

    @override
    def _first_of(self, unit: int) -> Records:
        rows = min(FIRST_RECORDS, self._units[unit].rows)
        table, where = self._rows(unit, rows, self._columns.all)
        return self._columns.records(table, where, images=None)

    @override
    def doubt(self) -> str:
        unit = self._units.first_filled()
        if unit is None:
            return ""
        dataset, _ = self._places[self._files[self._units[unit].shard].path]
        there = [name for name in self._columns.doubted if name in dataset.schema.names]
        if not there:
            return ""
        table, _ = self._rows(unit, min(FIRST_RECORDS, self._units[unit].rows), there)
        return self._columns.doubt({name: table[name] for name in there})

    def _rows(self, unit: int, rows: int, columns: Sequence[str]) -> tuple[pa.Table, RowsAt]:
        """Return the first rows of a unit, and their place."""
        shard, start, _, _ = self._units[unit]
        file = self._files[shard]
        dataset, number = self._places[file.path]
        part = f"rows {start} to {start + rows}"
        with reading(file, part):
            table = dataset.take(number, start, start + rows, columns)
            # Offsets of damaged data may lead out of the column, and code that reads them would follow them.
            for name in table.column_names:
                table[name].validate()
        if len(table) != rows:
            raise IntegrityError(f"{file.path}: {part}: holds {len(table)} of them; replace it")
        return table, RowsAt(where=file.path, first=start)

    def _index(self, file: ShardFile) -> FileUnits:
        dataset, number = self._places[file.path]
        require_table(dataset.schema, self._config, dataset.root)
        held = [file, *file.beside]
        with reading(file, "its rows"):
            rows = dataset.rows_of(number)
            # Lance keeps no checksums, so the digest is a sample of every file.
            content = [digest_of_ranges(each, even_ranges(each.size_bytes)) for each in held]
            if rows:  # a truncated file fails at its first row
                dataset.take(number, 0, 1, self._read)
        # Lists of deleted rows are not part of the decoded data.
        stored = sum(each.size_bytes for each in held if each.path.endswith(".lance"))
        step = max(1, min(_MOST_ROWS, self._config.unit * rows // max(stored, 1)))
        starts = np.arange(0, rows, step, dtype=np.int64)
        stops = np.minimum(starts + step, rows)
        return FileUnits(rows=stops - starts, starts=starts, stops=stops, content="".join(content))


def _dataset(
    root: str, version: int | None, store: fsspec.AbstractFileSystem | None
) -> "LanceDataset":
    try:
        library = import_module("omniload.source.parsing.lance_dataset")
    except ModuleNotFoundError as error:
        raise missing_extra("a source of type lance", error) from None
    opened: LanceDataset = library.LanceDataset(root, version, store)
    return opened


def _places_of(files: Sequence[ShardFile]) -> dict[str, tuple["LanceDataset", int]]:
    """Return the data set of each shard, at the version in which it was found, and the number of its fragment."""
    places: dict[str, tuple[LanceDataset, int]] = {}
    # At this version, because another version may be the newest now.
    for found, store in {file.part_of: file.remote for file in files}.items():
        assert found is not None, "its data set found it"
        dataset = _dataset(*found, store)
        places |= {path: (dataset, i) for i, path in enumerate(dataset.paths)}
    return places


def _found(source: str, config: LanceSource, base_dir: Path) -> tuple[ShardFile, ...]:
    """Return the fragments of all data sets, in their order."""
    with listing(f"sources.{source}.path"):
        datasets = _datasets(source, config, base_dir)
        return tuple(shard for dataset in datasets for shard in dataset.shards)


def _at_versions(
    source: str, config: LanceSource, base_dir: Path, shards_digest: str
) -> LanceSource:
    """Return the source with the version that ``shards_digest`` belongs to, or the newest versions.

    The version of a single data set is found by a search from the newest version back. For several data sets there is
    no search.
    """
    if config.version is not None:
        return config
    with listing(f"sources.{source}.path"):
        datasets = _datasets(source, config, base_dir)
        if shards_digest and len(datasets) == 1:
            (newest,) = datasets
            # From the newest back, because a resumed run most likely read one of the last versions.
            for version in range(newest.version, max(0, newest.version - _MOST_VERSIONS), -1):
                if _digest_at(newest, version) == shards_digest:
                    return config.model_copy(update={"version": version})
    return config.model_copy(update={"version": tuple(each.version for each in datasets)})


def _digest_at(dataset: "LanceDataset", version: int) -> str:
    """Return the digest of the shards of a version, as a run computes it; empty if the version no longer exists."""
    try:
        found = dataset.at(version)
        # Only shards that have records, as in the digest of a run.
        return digest_of([shard for i, shard in enumerate(found.shards) if found.rows_of(i)])
    except (ConfigError, IntegrityError, pa.ArrowInvalid):
        return ""


def _datasets(source: str, config: LanceSource, base_dir: Path) -> list["LanceDataset"]:
    """Return the data sets that patterns name, in the order of patterns and names, each once."""
    roots: dict[str, fsspec.AbstractFileSystem | None] = {}
    for pattern in config.paths:
        where = f"sources.{source}.path: {shortened(pattern)!r}"
        note_secrets_of(pattern)
        with listing(where), under_way(f"lists {pattern}"):
            if is_url(pattern):
                found = _in_stores(pattern, where)
            else:
                found = dict.fromkeys(_roots(pattern.removeprefix("file://"), base_dir, where))
        # A data set that two patterns name keeps its place under the first.
        roots = roots | {root: store for root, store in found.items() if root not in roots}
    version = config.version
    versions = version if isinstance(version, tuple) else (version,) * len(roots)
    if len(versions) != len(roots):
        raise ConfigError(
            f"sources.{source}.version names {len(versions)} versions, and path {len(roots)} data sets: "
            f"{', '.join(roots)[:300]}; name one of each, or one for all"
        )
    return [
        _dataset(root, each, store)
        for (root, store), each in zip(roots.items(), versions, strict=True)
    ]


def _in_stores(pattern: str, where: str) -> dict[str, fsspec.AbstractFileSystem]:
    """Return the data sets of a pattern that is a URL, and the store of each."""
    if pattern.partition("://")[0] not in SCHEMES:
        raise ConfigError(f"{where} is in a store that Lance does not read; {IN_ITS_PLACE}")
    found: dict[str, fsspec.AbstractFileSystem] = {}
    for each in _expanded(pattern, where):
        store, path = url_to_fs(each)
        # Other writers may have added versions that a cached listing does not have.
        store.invalidate_cache(path)
        named = [path.rstrip("/")] if _is_root(store, path) else _matching_in(store, path)
        found |= {url_in(store, root): store for root in named}
    if not found:
        raise _none_at(where, "there")
    return found


def _is_root(store: fsspec.AbstractFileSystem, path: str) -> bool:
    try:
        # Every data set has a folder of versions, whatever its own name is.
        return bool(store.info(f"{path.rstrip('/')}/{_VERSIONS}")["type"] == "directory")
    except FileNotFoundError:
        return False


def _matching_in(store: fsspec.AbstractFileSystem, path: str) -> list[str]:
    if not glob.has_magic(path):
        return []
    return [name for name in _in_order(store.glob(path)) if _is_root(store, name)]


def _roots(pattern: str, base_dir: Path, where: str) -> list[str]:
    """Return the data sets of a pattern, which are folders that have versions."""
    # The name of a folder may look like a pattern.
    every = [pattern] if os.path.lexists(base_dir / pattern) else _expanded(pattern, where)
    named = [
        str(base_dir / name)
        for each in every
        for name in ([each] if os.path.lexists(base_dir / each) else _matching(each, base_dir))
    ]
    roots = [root.rstrip("/") for root in named if Path(root, _VERSIONS).is_dir()]
    if not roots:
        raise _none_at(where, f"under {base_dir}")
    return roots


def _expanded(pattern: str, where: str) -> list[str]:
    try:
        return expanded(pattern)
    except ValueError as error:
        raise ConfigError(f"{where}: {error}") from None


def _none_at(where: str, place: str) -> ConfigError:
    return ConfigError(
        f"{where} matches no file of a Lance data set {place}: a folder that holds {_VERSIONS}; correct the path, "
        "relative paths start at the mix file"
    )


def _matching(pattern: str, base_dir: Path) -> list[str]:
    return _in_order(matches_of(pattern, base_dir))


def _in_order(names: Iterable[str]) -> list[str]:
    each = [ShardFile(path=name, size_bytes=0, stamp="") for name in names]
    return [file.path for file in sorted(each, key=natural_order)]


def _opened(
    files: Sequence[ShardFile], config: LanceSource, cache: IndexCache | None
) -> LanceFormat:
    # Lance accesses the system and the store when it opens; their refusals are reported for the source.
    with listing("a Lance data set"):
        return LanceFormat(files, config, cache)


FORMAT = FormatSpec(
    what="a Lance data set",
    names=FileNames(suffixes=frozenset({".lance"})),
    open=_opened,
    knows_columns=True,
    find=_found,
    at_versions=_at_versions,
)

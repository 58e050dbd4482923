"""Opens the format that reads a source, as the mix file describes it.

The table of formats is the closed list of types in ``omniload.mix.sources``. The module of a type has the name of the
type. It is imported when a source of that type is opened, so a loader of JSON lines does not import the other formats.
"""

from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path, PurePath

import numpy as np

from omniload.base.concurrency.time_limit import LimitedCalls, call_within
from omniload.base.errors import ConfigError
from omniload.mix.schema.records import MOST_BLOCK_UNITS
from omniload.mix.sources import SOURCE_TYPES, SourceConfig
from omniload.source.files import ShardFile, reading, shortened
from omniload.source.formats.content import digest_of, digest_of_texts
from omniload.source.formats.format import Format
from omniload.source.formats.held_files import HeldFiles
from omniload.source.formats.spec import FormatSpec
from omniload.source.patterns import LISTING_S, find_files, is_url
from omniload.source.run_files import require_apart
from omniload.source.spec import SourceSpec
from omniload.source.stores.shard_cache import ShardCache

__all__ = [
    "OpenFormat",
    "ShardDigests",
    "at_versions",
    "open_format",
    "open_shards",
    "require_apart_from_run",
    "shards_of",
    "spec_of",
]

_HEAD_BYTES = 512
"""Bytes of a file that show its type; the mark of a tar archive is at byte 257."""
_OF_TEXTS = bytes(range(9, 0xF8))
"""Bytes from the tab to the highest first byte of a UTF-8 character."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardDigests:
    """Digests and paths of the shards that have records, in their order."""

    names: str = ""
    """Digest of their names and sizes."""
    contents: str = ""
    """Digest of their contents."""
    paths: tuple[str, ...] = ()
    """Path of each shard, by its number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenFormat:
    """A format and the files that it reads."""

    format: Format
    files: tuple[ShardFile, ...]
    digests_all: bool
    """Whether the digest of a shard covers every byte of the shard."""

    def shard_digests(self) -> ShardDigests:
        """Return the digests of the shards that have records."""
        units = self.format.units()
        contents_F = units.contents_F
        # A file without records takes no part, so adding or removing one does not change the source.
        used = [i for i, content in enumerate(contents_F) if content]
        filled = np.flatnonzero(units.rows_U)
        first_units = filled[np.unique(units.shards_U[filled], return_index=True)[1]]
        return ShardDigests(
            names=digest_of([self.files[i] for i in used]),
            contents=digest_of_texts(contents_F[i] for i in used),
            paths=tuple(self._path_of(unit) for unit in first_units.tolist()),
        )

    def held_files(self) -> HeldFiles:
        """Return an object that checks the files of decoded units."""
        return HeldFiles(self.format.units(), self.files)

    def require_records(self, spec: SourceSpec) -> int:
        """Return the number of records of the source.

        Raises:
            ConfigError: The source has no record.
        """
        if records := int(self.format.units().rows_U.sum()):
            return records
        raise ConfigError(
            f"sources.{spec.name}: {', '.join(spec.config.paths)} holds no record; remove the source or add data"
        )

    def _path_of(self, unit: int) -> str:
        """Return the path of the shard of a unit.

        A shard of several files gets a name that is not the path of any of them.
        """
        numbers = self.format.units().files_of(unit)
        # The path of one file would suggest that only this file is meant, so the name of a group is no path.
        others = f" and {len(numbers) - 1} more" if len(numbers) > 1 else ""
        return self.files[numbers[0]].path + others


def spec_of(kind: str) -> FormatSpec:
    """Return the format of a type in ``SOURCE_TYPES``."""
    # Checked before an import under this name, because the name comes from a file.
    assert kind in SOURCE_TYPES, f"{kind} is no type of a source"
    spec = import_module(f"omniload.source.formats.{kind}").FORMAT
    assert isinstance(spec, FormatSpec), f"the module of {kind} holds no FORMAT"
    return spec


def shards_of(
    name: str, config: SourceConfig, *, base_dir: Path, calls: LimitedCalls | None = None
) -> tuple[ShardFile, ...]:
    """Find the files of a source without opening them, except for files that list others.

    Raises:
        ConfigError: Files are missing, or the format does not know their names.
        UnavailableError: A store did not answer.
    """
    spec = spec_of(config.type)
    if spec.find is not None:
        find = partial(spec.find, name, config, base_dir)
        limited = call_within if calls is None else calls.call
        return limited(LISTING_S, find, what=f"sources.{name}.path, a listing")
    found = find_files(config.paths, base_dir, source=name, names=spec.names, calls=calls)
    return spec.shards(found, config)


def require_apart_from_run(
    name: str, config: SourceConfig, *, base_dir: Path, run_dir: Path, has_journal: bool
) -> None:
    """Raise an error for a source that takes files of the run that reads it, even if they do not exist yet.

    Args:
        name: Name of the source.
        config: Entry of the source in the mix file.
        base_dir: Folder that relative paths start from.
        run_dir: The run's folder.
        has_journal: Whether the run keeps its journal there.

    Raises:
        ConfigError: The source takes such a file.
    """

    def taken(file: str) -> bool:
        spec = spec_of(config.type)
        return spec.find is None and spec.names.taken(file)

    for pattern in config.paths:
        if not is_url(pattern):
            where = f"sources.{name}.path: {shortened(pattern)!r}"
            require_apart(where, pattern, base_dir, run_dir, has_journal=has_journal, taken=taken)


def at_versions(
    name: str, config: SourceConfig, *, base_dir: Path, shards_digest: str = ""
) -> SourceConfig:
    """Return a source that names the versions of its data sets, if its type has versions, so that they stay fixed.

    Args:
        name: Name of the source.
        config: Entry of the source in the mix file.
        base_dir: Folder that relative paths start from.
        shards_digest: Digest of the shards that an earlier attempt of the run read. Their version is taken if it
            exists.

    Raises:
        OmniloadError: As for ``shards_of``.
    """
    spec = spec_of(config.type)
    if spec.at_versions is None:
        return config
    find = partial(spec.at_versions, name, config, base_dir, shards_digest)
    pinned: SourceConfig = call_within(LISTING_S, find, what=f"sources.{name}.path, a listing")
    return pinned


def open_format(
    spec: SourceSpec, *, shard_cache: ShardCache | None = None, calls: LimitedCalls | None = None
) -> OpenFormat:
    """Find the files of a source, and index their units; files are read through a shard cache if there is one.

    Raises:
        ConfigError: Files or columns are missing, or the files have another format.
        IntegrityError: A shard is truncated or corrupt.
        UnavailableError: A store did not answer.
    """
    files = shards_of(spec.name, spec.config, base_dir=spec.base_dir, calls=calls)
    if shard_cache is not None:
        files = shard_cache.through(files)
    return open_shards(spec, files)


def open_shards(spec: SourceSpec, files: tuple[ShardFile, ...]) -> OpenFormat:
    """Index the units of the files of a source. Raises like ``open_format``."""
    name, config, form = spec.name, spec.config, spec_of(spec.config.type)
    # A format that finds its data sets by itself has checked their type.
    found = () if form.find is not None else files
    for file in next(((each, *each.beside) for each in found if each.size_bytes), ()):
        if other := _other_type(form, file):
            raise ConfigError(
                f"sources.{name}: {file.path} is {spec_of(other).what}; set type: {other}, "
                f"or name files of type {config.type}"
            )
        if called := _called_type(form, config, file):
            raise ConfigError(
                f"sources.{name}: {file.path} is not {form.what}, but has the name of a file of type {called}; set "
                f"that type, or name files of type {config.type}"
            )
    opened = form.open(files, config, spec.index_cache)
    _require_shuffled(name, config, len(opened.units()))
    return OpenFormat(format=opened, files=files, digests_all=form.digests_all)


def _require_shuffled(name: str, config: SourceConfig, units: int) -> None:
    """Raise an error for a full shuffle of more units than can be decoded together.

    Raises:
        ConfigError: Names the number of units.
    """
    if config.shuffle.method == "full" and units > MOST_BLOCK_UNITS:
        raise ConfigError(
            f"sources.{name}.shuffle: full decodes all units of a source together, at most {MOST_BLOCK_UNITS:,}, and "
            f"this one has {units:,}; write method: units with block_units, or make its units (row groups, unit) larger"
        )


def _head_of(file: ShardFile) -> bytes:
    with reading(file, "its first bytes"):
        return file.read_range(0, min(_HEAD_BYTES, file.size_bytes))


def _other_type(spec: FormatSpec, file: ShardFile) -> str | None:
    """Return the type that the first bytes of a file show, if it is another type.

    Only bytes that cannot occur in text count, because invalid text is a bad record with a reason of its own.
    """
    if spec.names.never or not file.size_bytes:
        return None
    head = _head_of(file)
    if spec.matches(head) or not head.translate(None, _OF_TEXTS):
        return None
    return next((kind for kind in SOURCE_TYPES if spec_of(kind).matches(head)), None)


def _called_type(spec: FormatSpec, config: SourceConfig, file: ShardFile) -> str | None:
    """Return the type that the name of a file suggests, if its beginning does not match its own type and names."""
    name = PurePath(file.path).name
    # A flat file with a stated dtype may have any name and any first bytes.
    is_flat = getattr(config, "dtype", None) is not None
    if is_flat or not spec.magic or spec.names.taken(name) or not file.size_bytes:
        return None
    called = next((kind for kind in SOURCE_TYPES if spec_of(kind).names.taken(name)), None)
    return None if called is None or spec.matches(_head_of(file)) else called

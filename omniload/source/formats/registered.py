"""Files of a custom format, which a registered reader divides into units and decodes.

::

    class Frames:
        def __init__(self, *, key: str = "text") -> None: ...                options of the mix file
        def units(self, file: pa.NativeFile) -> Iterable[tuple[int, int, int]]: ...    start, stop, records
        def read(self, file: pa.NativeFile, start: int, stop: int) -> pa.Array: ...    texts, or lists of ids

The reader defines the start and the stop of a unit, for example as bytes of the file or numbers of frames. The index of
the source keeps them, so ``units`` runs once per shard. If a reader fails, the shard is considered damaged, and the
error names it.
"""

import inspect
import operator
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Protocol, cast

import numpy as np
import orjson
import pyarrow as pa
import xxhash
from numpy.typing import NDArray
from typing_extensions import override

from omniload.base.errors import ConfigError, IntegrityError, OmniloadError
from omniload.base.settings.registry import FAILURES, Registered, registered
from omniload.mix.sources import RegisteredSource
from omniload.source.files import ShardFile, reading
from omniload.source.formats.content import digest_of_ranges, even_ranges
from omniload.source.formats.format import MAX_UNIT_RECORDS, IndexedFormat, Records
from omniload.source.formats.spec import FormatSpec
from omniload.source.index import FileUnits, IndexCache, index_of
from omniload.source.parsing.arrow_columns import records_of
from omniload.source.parsing.token_lists import is_list
from omniload.source.patterns import FileNames

__all__ = ["FORMAT", "GROUP", "RegisteredFormat"]

GROUP = "omniload.readers"
"""Group of entry points."""
_LIMIT = 1 << 63
_TYPES = {"text": pa.large_string(), "tokens": pa.large_list(pa.int32())}
_TEXTS = frozenset(
    {
        *(pa.string(), pa.large_string(), pa.string_view()),
        *(pa.binary(), pa.large_binary(), pa.null()),
    }
)
"""Types that become text, including UTF-8 bytes and nulls without a type."""
_NO_SHARD = frozenset({".tmp", ".temp", ".partial", ".part", ".crc", ".lock", ".swp", ".bak"})
"""Suffixes of files that are never shards; files with other suffixes may be."""


class _Reader(Protocol):
    """An instance of a registered class; see the top of the module."""

    def units(self, file: pa.NativeFile) -> Iterable[tuple[int, int, int]]: ...

    def read(self, file: pa.NativeFile, start: int, stop: int) -> pa.Array: ...


class RegisteredFormat(IndexedFormat):
    """Lets a registered reader divide and decode shards, and checks that its results are consistent."""

    def __init__(
        self,
        files: Sequence[ShardFile],
        config: RegisteredSource,
        cache: IndexCache | None = None,
    ) -> None:
        """Find the reader, and the units of the shards.

        Raises:
            ConfigError: No installed package registers the reader, or the reader does not take these options.
            IntegrityError: A shard cannot be divided into units.
        """
        self.holds_text = config.holds_text
        self._files, self._config = files, config
        found: Registered = registered(GROUP, config.reader)
        self._make: Callable[..., Any] = found.function
        options = orjson.dumps(config.options, option=orjson.OPT_SORT_KEYS).decode()
        self._identity = f"{found.name} of {found.distribution}"
        # Another version of the reader may divide shards differently, or decode other records.
        self._kind = f"registered {self._identity} {config.holds} {options}"
        self._reader = self._made()
        # A reader under development changes without a new version, so its code is part of the key as well.
        kind = f"{self._kind} {_code_of(self._make)}"
        self._units = index_of(files, self._index, kind=kind, cache=cache, unpacks=None)

    @override
    def read_unit(self, unit: int) -> Records:
        shard, start, stop, rows = self._units[unit]
        file = self._files[shard]
        where = f"{start:,} to {stop:,}"
        with reading(file, where), file.open() as opened:
            column = self._asked(file, where, lambda: self._reader.read(opened, start, stop))
            if isinstance(column, pa.ChunkedArray):
                column = column.combine_chunks()
            if not isinstance(column, pa.Array):
                raise self._refused(file, where, f"gives {_type_of(column)}, no array of Arrow")
            if len(column) != rows:
                raise self._refused(
                    file, where, f"gives {len(column)} records, and has said that there are {rows}"
                )
            wanted = _TYPES[self._config.holds]
            # Arrow would convert numbers to text, and booleans to ids.
            if not _FITS[self._config.holds](column.type):
                raise self._refused(file, where, f"gives {column.type}, not {wanted}")
            try:
                column = column.cast(wanted)
            except pa.ArrowException as error:
                said = f"gives {column.type}, not {wanted}: {error!s:.120}"
                raise self._refused(file, where, said) from error
            place = f"{file.path}: {where}"
            return records_of(pa.chunked_array([column]), place, self._config.holds)

    def _made(self) -> _Reader:
        try:
            reader: _Reader = self._make(**_plain(self._config.options))
        except FAILURES as error:
            raise ConfigError(
                f"reader {self._identity} does not take the options {sorted(self._config.options)}: "
                f"{type(error).__name__}: {error!s:.300}"
            ) from error
        lacking = [name for name in ("units", "read") if not callable(getattr(reader, name, None))]
        if lacking:
            raise ConfigError(
                f"reader {self._identity} makes {_type_of(reader)}, which has no {' and no '.join(lacking)}; give it "
                "units(file) and read(file, start, stop)"
            )
        return reader

    def _index(self, file: ShardFile) -> FileUnits:
        # Shards are indexed in parallel, and a reader is not thread-safe.
        reader = self._made()
        with reading(file, "its units"):
            with file.open() as opened:
                found = self._asked(file, "its units", lambda: list(reader.units(opened)))
            sampled = digest_of_ranges(file, even_ranges(file.size_bytes))
        table_U3 = self._checked(file, found)
        digest = xxhash.xxh3_64_hexdigest(self._kind.encode() + table_U3.tobytes())
        return FileUnits(
            rows=table_U3[:, 2],
            starts=table_U3[:, 0],
            stops=table_U3[:, 1],
            content=digest + sampled,
        )

    def _checked(self, file: ShardFile, found: Sequence[object]) -> NDArray[np.int64]:
        """Return starts, stops and record counts of the units of a shard, ``[U, 3]``."""
        units: list[tuple[int, int, int]] = []
        places: set[tuple[int, int]] = set()
        for number, said in enumerate(found):
            if (unit := _unit_of(said)) is None:
                raise self._refused(
                    file,
                    f"unit {number}",
                    f"says {said!r:.80}; a unit is (start, stop, records), whole numbers from 0 on, with at most "
                    f"{MAX_UNIT_RECORDS:,} records",
                )
            start, stop, rows = unit
            # The records of this unit would come twice in every epoch.
            if rows and (start, stop) in places:
                raise self._refused(
                    file,
                    f"unit {number}",
                    f"says {unit}, which it has said before; say each unit once",
                )
            if rows:
                places.add((start, stop))
            units.append(unit)
        return np.array(units, np.int64).reshape(-1, 3)

    def _asked(self, file: ShardFile, where: str, ask: Callable[[], Any]) -> Any:  # noqa: ANN401
        try:
            return ask()
        except (OmniloadError, OSError):
            raise  # a fault of the store, which is tried again
        except MemoryError as error:
            # This says nothing about the shard.
            raise ConfigError(
                f"{file.path}: {where}: reader {self._identity} has no memory left; give the process more, or have the "
                "reader cut smaller units"
            ) from error
        except FAILURES as error:
            raise self._refused(
                file, where, f"fails: {type(error).__name__}: {error!s:.300}"
            ) from error

    def _refused(self, file: ShardFile, where: str, why: str) -> IntegrityError:
        return IntegrityError(
            f"{file.path}: {where}: reader {self._identity} {why}; replace the file, or fix the reader"
        )


def _unit_of(said: Any) -> tuple[int, int, int] | None:  # noqa: ANN401
    """Return the three integers of a unit from a reader, including numpy's; ``None`` for anything else."""
    try:
        start, stop, rows = map(operator.index, said)
    except (TypeError, ValueError):
        return None
    fits = 0 <= start <= stop < _LIMIT and 0 <= rows <= MAX_UNIT_RECORDS
    return (start, stop, rows) if fits else None


def _are_texts(found: pa.DataType) -> bool:
    if pa.types.is_dictionary(found):
        return _are_texts(found.value_type)
    return found in _TEXTS


def _are_ids(found: pa.DataType) -> bool:
    # Arrow gives the values of a unit of empty lists the type null.
    return is_list(found) and (
        pa.types.is_integer(found.value_type) or pa.types.is_null(found.value_type)
    )


_FITS = {"text": _are_texts, "tokens": _are_ids}


def _code_of(made: object) -> str:
    """Return a digest of the source file of a class; empty if the file cannot be found."""
    try:
        return _digest_of_code(made)
    except (TypeError, OSError):
        return ""


# Cached, because an imported class stays as it is while its file is edited, for example in a notebook.
@cache
def _digest_of_code(made: object) -> str:
    return xxhash.xxh3_64_hexdigest(Path(inspect.getfile(cast("type", made))).read_bytes())


def _type_of(value: object) -> str:
    return f"a {type(value).__name__}"


def _plain(options: dict[str, Any]) -> dict[str, Any]:
    """Return options as a class expects them, with a list for several values."""
    return {k: list(v) if isinstance(v, tuple) else v for k, v in options.items()}


FORMAT = FormatSpec(
    what="a file of a registered reader",
    names=FileNames(suffixes=frozenset(), never=_NO_SHARD),
    open=RegisteredFormat,
)

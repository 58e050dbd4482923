"""The records that another loader, or an earlier run, has drawn from a source in its last, unfinished epoch.

They are in an Arrow IPC file with two columns, ``shard`` (the name of a file, with as many of its folders as
distinguish it from others) and ``record`` (its number in the file, from 0), and a version in the metadata of its
schema. A user can write one from a log of another loader. ``omniload mix import --state`` writes it for loaders whose
order it knows, and ``omniload mix drawn`` for a run.

Shape suffixes:
    U  units of the source        N  records asked for        F  files of the source
"""

import hashlib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from omniload.base.errors import ConfigError, StateError, UnavailableError
from omniload.base.reading import open_file
from omniload.base.units import format_bytes
from omniload.base.writing import write_whole
from omniload.mix.order import Order
from omniload.mix.state import Cursor
from omniload.source.distinct.first_seen import Bits
from omniload.source.files import ShardFile
from omniload.source.formats.format import UnitTable
from omniload.source.spec import SourceSpec

__all__ = [
    "DRAWN_VERSION",
    "DrawnBefore",
    "DrawnSoFar",
    "drawn_before",
    "drawn_so_far",
    "write_drawn",
]

DRAWN_VERSION = 1
"""Version of the file."""

_VERSION = b"omniload.drawn"
_SCHEMA = pa.schema(
    [("shard", pa.string()), ("record", pa.int64())], metadata={_VERSION: str(DRAWN_VERSION)}
)
_MOST_BYTES = 8 << 30
_MOST_NAME = 4_096
_ROWS_AT_ONCE = 1 << 18
_ZIPPED = (".zstd", ".zst", ".gz")
_REMEDY = "let omniload mix import --state or omniload mix drawn write it, or write it as docs/migrate/README.md says"


class DrawnBefore:
    """Finds the records that another loader has drawn."""

    def __init__(self, drawn: Bits, rows_U: NDArray[np.int64]) -> None:
        self.drawn = drawn
        """Whether each record of the source was drawn, in the order of its files."""
        self._begins_U = np.cumsum(rows_U) - rows_U
        self.records = drawn.total()
        """Number of these records."""
        self.digest = hashlib.blake2b(drawn.packed.tobytes(), digest_size=6).hexdigest()
        """Digest of these records, which does not depend on the file that names them."""

    def leaves(self, units_N: NDArray[np.int64], records_N: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Return which records, each given by its unit and its number there, were not drawn, ``[N]``."""
        at_N = self._begins_U[units_N] + records_N
        found = self.drawn.packed[at_N >> 3] >> (at_N & 7).astype(np.uint8)
        left_N: NDArray[np.bool_] = (found & 1) == 0
        return left_N


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawnSoFar:
    """The records that a run has drawn from a source, in the present epoch."""

    epoch: int
    """The epoch, from 0."""
    again: int
    """Begun records of the epoch that are not completely in rows yet; they count as not drawn."""
    drawn: Bits
    """Whether each record of the source was drawn, in the order of its files."""
    names: tuple[str, ...]
    """Files of the source, ``[F]``, with unique names."""
    rows_F: NDArray[np.int64]
    """Records of each file, ``[F]``."""

    def by_shard(self) -> Iterator[tuple[str, NDArray[np.int64]]]:
        """Yield each file with drawn records, and the numbers of these records in it."""
        begin = 0
        for name, rows in zip(self.names, self.rows_F.tolist(), strict=True):
            if len(records_N := np.flatnonzero(self.drawn.between(begin, begin + rows))):
                yield name, records_N
            begin += rows


def drawn_so_far(
    spec: SourceSpec,
    units: UnitTable,
    files: Sequence[ShardFile],
    *,
    cursor: Cursor,
    waiting: Iterable[int] = (),
) -> DrawnSoFar:
    """Return the records that a run has drawn from a source, in its present epoch.

    This takes the time to compute the order of the epoch, and one bit of memory per record of the source. If documents
    are joined, the documents of a unit are drawn together, and a partly drawn unit counts as not drawn.

    Args:
        spec: The source.
        units: Units of its format.
        files: Its shards.
        cursor: Cursor after the sample that was drawn last; its position runs on over epochs.
        waiting: Positions of samples that were drawn but are in no row yet; their records count as not drawn. A record
            that waits from the previous epoch counts once for both epochs, because a first epoch has each record once.

    Raises:
        ConfigError, UnavailableError: The records that the run itself left out cannot be read; see ``drawn_before``.
    """
    order = Order(
        units.rows_U,
        units.shards_U,
        seed=spec.seed,
        source=spec.name,
        shuffle=spec.config.shuffle,
    )
    begins_U = np.cumsum(units.rows_U) - units.rows_U

    def numbers_of(start: int, stop: int) -> NDArray[np.int64]:
        found = order.locate(start, stop)
        numbers_N: NDArray[np.int64] = begins_U[found.units_N] + found.rows_N
        return numbers_N

    before, sub, token = cursor
    if sub and not token and not spec.config.cuts_records:
        before, sub = before + 1, 0  # after the only sample of its record
    epoch = before // order.positions_per_epoch
    bits = Bits.none(order.positions_per_epoch)
    for start in range(epoch * order.positions_per_epoch, before, _ROWS_AT_ONCE):
        bits.set(numbers_of(start, min(before, start + _ROWS_AT_ONCE)))
    passed = bits.total()
    held = set(waiting)
    for position in held:
        bits.clear(numbers_of(position, position + 1))
    if spec.config.concat_transform is not None:
        for unit in _units_begun(order, before, held):
            bits.clear(begins_U[unit] + np.arange(units.rows_U[unit]))
    again = passed - bits.total() + bool(sub or token)
    # In later epochs, the run left out nothing.
    if epoch == 0 and (own := drawn_before(spec, units, files)) is not None:
        bits = Bits(bits.packed | own.drawn.packed, bits.count)
    rows_F, names = units.records_F(len(files)), _names_apart([file.path for file in files])
    return DrawnSoFar(epoch=epoch, again=again, drawn=bits, names=names, rows_F=rows_F)


def _names_apart(paths: Sequence[str]) -> tuple[str, ...]:
    """Return the names of files, each with as many folders as distinguish it from the others, or the whole path."""
    parts = [_unzipped(path).split("/") for path in paths]
    names, left, depth = list(paths), list(range(len(paths))), 1
    while left:
        ends = {number: tuple(parts[number][-depth:]) for number in left}
        times = Counter(ends.values())
        for number in left:
            if times[ends[number]] == 1:
                names[number] = "/".join(paths[number].split("/")[-depth:])
        # A path that is the end of another stays whole, and so do two paths that only differ in compression.
        left = [n for n in left if times[ends[n]] > 1 and depth < len(parts[n])]
        depth += 1
    return tuple(names)


def _units_begun(order: Order, before: int, waiting: Iterable[int]) -> set[int]:
    """Return the units that may be incomplete: those of the present block, and those of waiting positions."""
    found = {int(order.locate(each, each + 1).units_N[0]) for each in waiting}
    (span,) = order.spans(before, before + 1)
    # The rows of all units of a block have a common order.
    return found | set(order.block_of(span.epoch, span.block).units_U.tolist())


def write_drawn(path: Path, shards: Iterable[tuple[str, NDArray[np.int64]]]) -> None:
    """Write the drawn records: each shard, and the numbers of its records.

    Raises:
        OSError: The file cannot be written.
    """
    out = pa.BufferOutputStream()
    options = pa.ipc.IpcWriteOptions(compression="zstd")
    with pa.ipc.new_file(out, _SCHEMA, options=options) as writer:
        for name, records_N in shards:
            # In batches, because a reader has one batch in memory at a time.
            for start in range(0, len(records_N), _ROWS_AT_ONCE):
                some = np.asarray(records_N[start : start + _ROWS_AT_ONCE], np.int64)
                columns = [pa.repeat(pa.scalar(name, pa.string()), len(some)), pa.array(some)]
                writer.write_batch(pa.record_batch(columns, schema=_SCHEMA))
    write_whole(path, out.getvalue())


def drawn_before(
    spec: SourceSpec, units: UnitTable, files: Sequence[ShardFile]
) -> DrawnBefore | None:
    """Return the records that another loader has drawn; ``None`` if the source names no file of them.

    This takes one bit of memory per record of the source.

    Args:
        spec: The source.
        units: Units of its format.
        files: Its shards.

    Raises:
        ConfigError: The file is invalid, has another version, or names shards or records that the source lacks; or it
            names every record.
        UnavailableError: The file system did not answer.
    """
    if spec.config.drawn_before is None:
        return None
    path = spec.base_dir / spec.config.drawn_before
    where = f"sources.{spec.name}.drawn_before: {path}"
    shards = _Shards([file.path for file in files], units.records_F(len(files)), where)
    total = int(units.rows_U.sum())
    bits = _bits_in(path, where, shards, total)
    found = DrawnBefore(bits, units.rows_U)
    if found.records == total:
        raise ConfigError(
            f"{where}: names all {total} records of the source, so that the epoch was at its end; leave it out"
        )
    return found


def _bits_in(path: Path, where: str, shards: "_Shards", total: int) -> Bits:
    """Return which of ``total`` records a file names."""
    bits = Bits.none(total)
    try:
        with open_file(path) as opened:
            if (size := path.stat().st_size) > _MOST_BYTES:
                raise ConfigError(
                    f"{where}: holds {format_bytes(size)}, more than {format_bytes(_MOST_BYTES)}; {_REMEDY}"
                )
            with pa.ipc.open_file(pa.PythonFile(opened, mode="r")) as stored:
                _require_ours(stored.schema, where)
                for number in range(stored.num_record_batches):
                    batch = stored.get_batch(number)
                    # Indices of a dictionary may lead out of it, and offsets out of the batch.
                    batch.validate(full=True)
                    bits.set(shards.numbers_of(batch))
    except FileNotFoundError:
        raise ConfigError(
            f"{where}: no such file; keep it next to the mix file as long as the run may be resumed"
        ) from None
    except (pa.ArrowException, StateError, ValueError, OSError) as error:
        # Arrow reports damage as an ``OSError`` without a number.
        if isinstance(error, OSError) and error.errno is not None:
            raise UnavailableError(f"{where}: cannot be read: {error}; try again") from error
        raise ConfigError(
            f"{where}: is no such file of records: {error!s:.200}; {_REMEDY}"
        ) from error
    return bits


def _require_ours(schema: pa.Schema, where: str) -> None:
    version = (schema.metadata or {}).get(_VERSION)
    if version != str(DRAWN_VERSION).encode():
        raise ConfigError(
            f"{where}: has {version!r:.40} for {_VERSION.decode()} in the metadata of its schema, this release reads "
            f"{str(DRAWN_VERSION)!r}; {_REMEDY}"
        )
    for field in _SCHEMA:
        at = schema.get_field_index(field.name)
        kind = None if at < 0 else schema.field(at).type
        # The names of a few shards are often written as a dictionary.
        if kind is not None and pa.types.is_dictionary(kind):
            kind = kind.value_type
        if kind != field.type:
            raise ConfigError(
                f"{where}: column {field.name!r} is {kind or 'missing'}, not {field.type}; {_REMEDY}"
            )


class _Shards:
    """The shards of a source by name, and the numbers of their records in the source."""

    def __init__(self, paths: Sequence[str], rows_F: NDArray[np.int64], where: str) -> None:
        self._rows_F, self._where = rows_F, where
        self._begins_F = np.cumsum(rows_F) - rows_F
        self._by_last: dict[str, list[tuple[str, int]]] = {}
        self._whole = {path: number for number, path in enumerate(paths)}
        for number, path in enumerate(paths):
            bare = _unzipped(path)
            # By their last part, because a list gives only as many folders as distinguish files.
            self._by_last.setdefault(bare.rpartition("/")[2], []).append((bare, number))

    def numbers_of(self, batch: pa.RecordBatch) -> NDArray[np.int64]:
        """Return the number of each record in the source.

        Raises:
            ConfigError: A shard or a record does not exist.
        """
        shard, record = batch.column("shard"), batch.column("record")
        if shard.null_count or record.null_count:
            raise ConfigError(f"{self._where}: has an entry without a shard or a record; {_REMEDY}")
        if not pa.types.is_dictionary(shard.type):
            shard = shard.dictionary_encode()
        names = [str(name) for name in shard.dictionary.to_pylist()]
        chosen = shard.indices.to_numpy(zero_copy_only=False)
        # Names are looked up once per batch, not for each record.
        used, chosen_N = np.unique(chosen, return_inverse=True)
        files = np.array([self._number(names[at]) for at in used.tolist()], np.int64)
        files_N, records_N = files[chosen_N], record.to_numpy(zero_copy_only=False)
        outside = (records_N < 0) | (records_N >= self._rows_F[files_N])
        if outside.any():
            at = int(outside.argmax())
            raise ConfigError(
                f"{self._where}: names record {records_N[at]} of {names[used[chosen_N[at]]]!r:.200}, which has "
                f"{self._rows_F[files_N[at]]}; is it of these shards?"
            )
        numbers_N: NDArray[np.int64] = self._begins_F[files_N] + records_N
        return numbers_N

    def _number(self, name: str) -> int:
        # A file may exist both plain and compressed.
        if name in self._whole:
            return self._whole[name]
        bare = _unzipped(name[:_MOST_NAME])
        named = self._by_last.get(bare.rpartition("/")[2], ())
        # Whole paths first, because for ``a.jsonl`` and ``b/a.jsonl`` the name of the first is the end of both.
        alike = [number for path, number in named if path == bare]
        # From a slash on, because ``a-1`` is not the end of ``data-1``.
        alike = alike or [number for path, number in named if path.endswith(f"/{bare}")]
        if len(alike) != 1:
            raise ConfigError(
                f"{self._where}: names the shard {name!r:.200}, and {len(alike)} files of the source are called so; "
                + ("name more of its folders" if alike else "is it of these shards?")
            )
        return alike[0]


def _unzipped(path: str) -> str:
    """Return a path without the suffix for compression, because the file may be there in either form."""
    for suffix in _ZIPPED:
        if path.endswith(suffix) and len(path) > len(suffix):
            return path[: -len(suffix)]
    return path

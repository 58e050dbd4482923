"""Lance data sets: which version is read, what files its fragments are, and rows of them. The only ``import lance``.

A data set is a folder::

    _versions/N.manifest     one a version, never written again; also named 2^64 - 1 - N
    data/ID.lance            columns of the rows of a fragment; more of them where columns were added later
    _deletions/*             which rows of a fragment are gone

Lance reads with threads of its own. It keeps no checksums.
"""

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import lance
import pyarrow as pa
import pyarrow.compute as pc

from omniload.base.errors import ConfigError, IntegrityError, OmniloadError
from omniload.base.units import format_bytes
from omniload.source.files import ShardFile, local_file, shortened
from omniload.source.formats.format import MAX_UNIT_BYTES
from omniload.source.tokenize import PANIC

__all__ = ["LanceDataset"]

_LARGEST = (1 << 64) - 1
_FIRST_ROWS, _MOST_ROWS = 64, 4_096
_SLICE_BYTES = 64 << 20
"""Bytes of rows that are decoded before their sum is looked at, as far as the rows before them tell."""
_OF_SYSTEM = re.compile(r"\(os error (\d+)\)")
_PLACE = re.compile(r", (/[^ ,]*\.rs|library/[^ ,]*):[0-9:]+")


class LanceDataset:
    """One version of a data set."""

    def __init__(self, root: str, version: int | None) -> None:
        """Open the version, or the newest.

        Raises:
            ConfigError: There is no such version.
            IntegrityError: It cannot be opened.
            UnavailableError: The file system did not answer.
        """
        self.root = root
        if version is not None:
            _require_manifest(root, version)
        try:
            with _told():
                self._library = lance.dataset(root, version=version)
                self._fragments = self._library.get_fragments()
        except pa.ArrowInvalid as error:
            raise IntegrityError(
                f"{root}: cannot be opened as a Lance data set: {error}; it is cut short or corrupt, replace it"
            ) from error
        self.version: int = self._library.version
        self._looked_at: set[int] = set()
        """Fragments whose deletions were looked at."""

    @property
    def schema(self) -> pa.Schema:
        """Columns of its rows."""
        return self._library.schema

    @property
    def shards(self) -> tuple[ShardFile, ...]:
        """Its fragments, in the order of their rows: a file of data, beside it those of later columns and of deletions.

        A fragment that versions share is the same shard in them.

        Raises:
            ConfigError: Its files lie in another data set.
            IntegrityError: One of them is not there.
        """
        shards = []
        for fragment in self._fragments:
            names = [f"data/{each.path}" for each in fragment.metadata.files]
            gone = fragment.deletion_file()
            first, *others = (self._file(name) for name in [*names, *([gone] if gone else [])])
            shards.append(replace(first, beside=tuple(others), part_of=(self.root, self.version)))
        return tuple(shards)

    def rows_of(self, number: int) -> int:
        """Return how many rows of a fragment are not deleted."""
        with _told():
            return int(self._fragments[number].count_rows())

    def take(self, number: int, start: int, stop: int, columns: Sequence[str]) -> pa.Table:
        """Return rows of a fragment, those that are deleted not counted.

        A few rows are decoded first, then as many at once as their sizes allow.

        Raises:
            ConfigError: They are more than is decoded in memory at once.
            IntegrityError: Which rows are deleted cannot be told.
            pa.ArrowInvalid: They cannot be decoded.
        """
        self._require_deletions(number)
        fragment, size_bytes = self._fragments[number], 0
        parts: list[pa.Table] = []
        at, rows = start, _FIRST_ROWS
        while at < stop or not parts:
            until = min(stop, at + rows)
            with _told():
                part = fragment.take(list(range(at, until)), columns=list(dict.fromkeys(columns)))
            parts.append(part)
            size_bytes += part.nbytes
            if size_bytes > MAX_UNIT_BYTES:
                raise ConfigError(
                    f"{self.root}: rows {start} to {until} of fragment {number} hold {format_bytes(size_bytes)}, and a "
                    f"unit at most {format_bytes(MAX_UNIT_BYTES)}; lower unit"
                )
            at, each = until, size_bytes // max(1, until - start) + 1
            rows = max(1, min(_MOST_ROWS, _SLICE_BYTES // each))
        return pa.concat_tables(parts)

    def _require_deletions(self, number: int) -> None:
        """Look at which rows of a fragment are gone, once, before Lance does: damage there may end the process.

        Few rows are a file of Arrow. Many are a bitmap, which Lance alone reads.

        Raises:
            IntegrityError: They cannot be read, are more or fewer than was written, or lie outside of the fragment.
        """
        fragment = self._fragments[number]
        gone = fragment.deletion_file()
        if number not in self._looked_at and gone is not None and gone.endswith(".arrow"):
            path = f"{self.root}/{gone}"
            try:
                with pa.OSFile(path, "rb") as file:
                    rows = pa.ipc.open_file(file).read_all().column(0)
                rows.validate(full=True)
                last = pc.max(rows).as_py()
            except (pa.ArrowException, IndexError) as error:
                raise IntegrityError(
                    f"{path}: cannot be decoded: {error}; it is cut short or corrupt, replace it"
                ) from error
            if len(rows) != fragment.num_deletions or last >= fragment.physical_rows:
                raise IntegrityError(
                    f"{path}: names {len(rows)} rows up to {last} as deleted where {fragment.num_deletions} of "
                    f"{fragment.physical_rows} are; it is damaged, replace it"
                )
        self._looked_at.add(number)

    def _file(self, name: str) -> ShardFile:
        if any(part in {"", ".", ".."} for part in name.split("/")) or not name.isprintable():
            raise IntegrityError(
                f"{self.root}: names the file {shortened(ascii(name))}; a name stays in the folder: write it anew"
            )
        try:
            return local_file(f"{self.root}/{name}")
        except (FileNotFoundError, ValueError):
            raise IntegrityError(
                f"{self.root}: version {self.version} names {name}, which is not there; copy the whole folder, name "
                "a version that is kept, or, of a shallow clone, make a deep one"
            ) from None


def _require_manifest(root: str, version: int) -> None:
    """Refuse a version that is not there.

    Raises:
        ConfigError: It is not.
    """
    names = (f"{_LARGEST - version:020}", f"{version}")
    if not any(Path(root, "_versions", f"{name}.manifest").exists() for name in names):
        raise ConfigError(
            f"{root}: has no version {version}, or no longer; name one that is kept, or leave version out for the "
            "newest"
        )


@contextmanager
def _told() -> Iterator[None]:
    """Raise what Lance raises as what decoders of Arrow raise, and what the system refused as that.

    Raises:
        pa.ArrowInvalid: With what Lance says, without places in its source.
        OSError: With the number that the system gave.
    """
    try:
        yield
    except OmniloadError:
        raise
    except BaseException as error:
        known = isinstance(error, OSError | ValueError | RuntimeError | pa.ArrowException)
        if not known and type(error).__name__ != PANIC:
            raise
        said = shortened(_PLACE.sub("", str(error)))
        if number := _OF_SYSTEM.search(said):
            raise OSError(int(number[1]), said) from error
        raise pa.ArrowInvalid(said) from error

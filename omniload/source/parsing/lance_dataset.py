"""Lance data sets: the version that is read, the files of its fragments, and rows of them. The only ``import lance``.

A data set is a folder::

    _versions/N.manifest     one a version, never written again; also named 2^64 - 1 - N
    data/ID.lance            columns of the rows of a fragment; more of them where columns were added later
    _deletions/*             which rows of a fragment are gone

Lance reads with its own threads, and from a store with its own client. It keeps no checksums.
"""

import errno
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace

import fsspec
import lance
import pyarrow as pa
import pyarrow.compute as pc

from omniload.base.concurrency.threads import DaemonPool
from omniload.base.errors import (
    ConfigError,
    IntegrityError,
    OmniloadError,
    StateError,
    UnavailableError,
)
from omniload.base.units import format_bytes
from omniload.source.files import (
    ShardFile,
    is_outage,
    local_file,
    remote_file,
    said,
    shortened,
)
from omniload.source.formats.format import MAX_UNIT_BYTES
from omniload.source.parsing.lance_stores import options_for
from omniload.source.parsing.nested_columns import outer_of
from omniload.source.tokenize import PANIC

__all__ = ["LanceDataset"]

_LARGEST = (1 << 64) - 1
_FIRST_ROWS, _MOST_ROWS = 64, 4_096
_SLICE_BYTES = 64 << 20
"""Bytes of rows that are decoded before their sum is checked, estimated from the rows before them."""
_LOOKERS = 16
"""Files of a store that are checked at once, because data sets have thousands and a store answers one at a time."""
_OF_SYSTEM = re.compile(r"\(os error (\d+)\)")
_OF_STORE = re.compile(
    r"Generic (?:S3|GCS|MicrosoftAzure) error|Error performing [A-Za-z ]+ https?://|Failed to get AWS credentials"
)
_STATUS = re.compile(r"status code: (\d{3})")
_REFUSES = "lacked the necessary privileges"
_NOT_THERE = frozenset({"404", "416"})
"""Status codes of a server for a file that is missing, or shorter than the data set says."""
_PLACE = re.compile(r", (/[^ ,]*\.rs|library/[^ ,]*):[0-9:]+")
_asked_in: list[int] = []
"""The process in which Lance was first used, and in which its threads run."""


class LanceDataset:
    """One version of a data set."""

    def __init__(
        self, root: str, version: int | None, store: fsspec.AbstractFileSystem | None = None
    ) -> None:
        """Open the version, or the newest one.

        Args:
            root: Folder of the data set, or its URL in a store.
            version: The version.
            store: The store; ``None`` for a folder.

        Raises:
            ConfigError: The version does not exist, its name is not UTF-8, or Lance does not support a setting of the
                store.
            IntegrityError: The version cannot be opened.
            OSError: The file system or the store did not answer.
        """
        self.root, self._store = root, store
        self._files: dict[str, ShardFile] = {}
        """Files that were checked, by name."""
        # Otherwise the error of the library would be taken for damage.
        if root != root.encode(errors="replace").decode():
            raise ConfigError(
                f"{root}: the name is not UTF-8, so Lance does not accept it; rename the folder, or name a link to it"
            )
        if version is not None:
            self._require_manifest(version)
        options = None if store is None else options_for(store)
        try:
            with _told():
                self._library = lance.dataset(root, version=version, storage_options=options)
                self._fragments = self._library.get_fragments()
        except pa.ArrowInvalid as error:
            raise IntegrityError(
                f"{root}: cannot be opened as a Lance data set: {error}; it is cut short or corrupt, replace it"
            ) from error
        self.version: int = self._library.version
        self._looked_at: set[int] = set()
        """Fragments whose deletions were checked."""

    @property
    def schema(self) -> pa.Schema:
        """Columns of the rows."""
        return self._library.schema

    @property
    def shards(self) -> tuple[ShardFile, ...]:
        """Fragments of the version, in row order: a data file each, with files of later columns and deletions.

        A fragment that several versions share is the same shard in all of them.

        Raises:
            ConfigError: Files of the version are in another data set.
            IntegrityError: A file is missing.
        """
        held = []
        for fragment in self._fragments:
            names = [_in_data(each) for each in fragment.metadata.files]
            gone = fragment.deletion_file()
            held.append([*names, *([gone] if gone else [])])
        self._look_at([name for names in held for name in names])
        for each in (file for fragment in self._fragments for file in fragment.metadata.files):
            self._require_size(self._files[_in_data(each)], each.file_size_bytes)
        part_of = (self.root, self.version)
        return tuple(
            replace(first, beside=tuple(others), part_of=part_of)
            for first, *others in ([self._files[name] for name in names] for names in held)
        )

    @property
    def paths(self) -> tuple[str, ...]:
        """Paths of the shards, in order; no file is checked."""
        return tuple(
            f"{self.root}/{_in_data(fragment.metadata.files[0])}" for fragment in self._fragments
        )

    def at(self, version: int) -> "LanceDataset":
        """Return another version; files that both versions have are not checked again.

        Raises:
            OmniloadError: As for opening it.
        """
        other = LanceDataset(self.root, version, self._store)
        other._files = self._files
        return other

    def rows_of(self, number: int) -> int:
        """Return the number of rows of a fragment that are not deleted."""
        with _told():
            return int(self._fragments[number].count_rows())

    def take(self, number: int, start: int, stop: int, columns: Sequence[str]) -> pa.Table:
        """Return rows of a fragment, without counting deleted rows.

        A few rows are decoded first, then as many at once as their sizes allow.

        Raises:
            ConfigError: The rows exceed the limit of decoding in memory.
            IntegrityError: The deleted rows cannot be determined.
            pa.ArrowInvalid: The rows cannot be decoded.
        """
        self._require_deletions(number)
        fragment, size_bytes = self._fragments[number], 0
        names = self.schema.names
        outer = list(dict.fromkeys(outer_of(names, column) for column in columns))
        parts: list[pa.Table] = []
        at, rows = start, _FIRST_ROWS
        while at < stop or not parts:
            until = min(stop, at + rows)
            with _told():
                part = fragment.take(list(range(at, until)), columns=outer)
            parts.append(part)
            size_bytes += part.nbytes
            if size_bytes > MAX_UNIT_BYTES:
                raise ConfigError(
                    f"{self.root}: rows {start} to {until} of fragment {number} hold {format_bytes(size_bytes)}, and a "
                    f"unit at most {format_bytes(MAX_UNIT_BYTES)}; lower unit"
                )
            at, each = until, size_bytes // max(1, until - start) + 1
            # Estimated from the rows before, because Lance does not give the size of rows that are not decoded.
            rows = max(1, min(_MOST_ROWS, _SLICE_BYTES // each))
        return pa.concat_tables(parts)

    def _require_deletions(self, number: int) -> None:
        """Check the list of a fragment's deleted rows once, before Lance reads it: damage in it may end the process.

        A short list is an Arrow file. A long one is a bitmap, which only Lance reads.

        Raises:
            IntegrityError: The list cannot be read, has a wrong number of rows, or names rows outside of the fragment.
        """
        fragment = self._fragments[number]
        gone = fragment.deletion_file()
        if number not in self._looked_at and gone is not None and gone.endswith(".arrow"):
            path = f"{self.root}/{gone}"
            try:
                with self._file(gone).open() as file:
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

    def _look_at(self, names: Sequence[str]) -> None:
        """Check files that were not checked before."""
        new = [name for name in dict.fromkeys(names) if name not in self._files]
        # A folder answers at once, and a few files of a store are checked faster than threads are started.
        if self._store is None or len(new) < _LOOKERS:
            found = [self._file(name) for name in new]
        else:
            with DaemonPool(_LOOKERS, "omniload-lance", reads=True) as pool:
                found = pool.map(self._file, new)
        self._files.update(zip(new, found, strict=True))

    def _require_size(self, file: ShardFile, size_bytes: int | None) -> None:
        """Raise an error for a file whose size differs from its data set's manifest.

        Raises:
            IntegrityError: The size differs.
        """
        # Earlier releases of Lance wrote no sizes.
        if size_bytes and file.size_bytes != size_bytes:
            raise IntegrityError(
                f"{file.path}: holds {file.size_bytes} bytes, and version {self.version} of its data set says "
                f"{size_bytes}; it is cut short or another file, replace it"
            )

    def _file(self, name: str) -> ShardFile:
        if any(part in {"", ".", ".."} for part in name.split("/")) or not name.isprintable():
            raise IntegrityError(
                f"{self.root}: names the file {shortened(ascii(name))}; a name stays in the folder: write it anew"
            )
        try:
            return self._found(name)
        except (FileNotFoundError, ValueError):
            raise IntegrityError(
                f"{self.root}: version {self.version} names {name}, which is not there; copy the whole folder, name "
                "a version that is kept, or, of a shallow clone, make a deep one"
            ) from None

    def _found(self, name: str) -> ShardFile:
        """Return a file after a look at it.

        Raises:
            FileNotFoundError: The file is missing.
            ValueError: The path is no file.
            OSError: The system did not answer.
            UnavailableError: The store did not answer.
        """
        path = f"{self.root}/{name}"
        if self._store is None:
            return local_file(path)
        try:
            return remote_file(self._store, path)
        except (FileNotFoundError, ValueError):
            raise
        except Exception as error:
            if not is_outage(error):
                raise
            raise UnavailableError(
                f"{path}: cannot be looked at: {said(error)}; try again"
            ) from error

    def _require_manifest(self, version: int) -> None:
        """Raise an error for a version that does not exist.

        Raises:
            ConfigError: The version does not exist.
        """
        # Newer data sets count down, so that the listing of a store begins with the newest version.
        for name in (f"{_LARGEST - version:020}", f"{version}"):
            with suppress(FileNotFoundError, ValueError):
                self._found(f"_versions/{name}.manifest")
                return
        raise ConfigError(
            f"{self.root}: has no version {version}, or no longer; name one that is kept, or leave version out for "
            "the newest"
        )


def _in_data(file: lance.fragment.DataFile) -> str:
    return f"data/{file.path}"


@contextmanager
def _told() -> Iterator[None]:
    """Convert Lance's errors to those of Arrow's decoders, or of the system or store that refused.

    Lance raises the same classes for all faults, so the text of the error decides.

    Raises:
        pa.ArrowInvalid: Has Lance's message, without places in its source code.
        OSError: Has the number that the system gave.
        PermissionError: A store denied access.
        ConnectionError: A store did not answer, or answered with an error of its own.
        StateError: This process was forked after Lance had been used.
    """
    _require_threads()
    try:
        yield
    except OmniloadError:
        raise
    except BaseException as error:
        # A panic of its Rust code is no ``Exception``; any other error is a fault of omniload.
        known = isinstance(error, OSError | ValueError | RuntimeError | pa.ArrowException)
        if not known and type(error).__name__ != PANIC:
            raise
        told = _PLACE.sub("", str(error))
        line = shortened(told.partition("\n")[0])  # the next lines are a server's XML
        # Lance's own classes have no error number, so the number is read from the text.
        if number := _OF_SYSTEM.search(told):
            raise OSError(int(number[1]), line) from error
        status = _STATUS.search(told)
        if _REFUSES in told or (status and status[1] in {"401", "403"}):
            raise PermissionError(errno.EACCES, line) from error
        if _OF_STORE.search(told) and not (status and status[1] in _NOT_THERE):
            raise ConnectionError(line) from error
        raise pa.ArrowInvalid(line) from error


def _require_threads() -> None:
    """Raise an error in a process that was forked after Lance had been used.

    Lance starts new threads in such a process, but the process hung or crashed in one of fifteen tries.

    Raises:
        StateError: The process was forked after Lance had been used.
    """
    if not _asked_in:
        _asked_in.append(os.getpid())
    if _asked_in[0] != os.getpid():
        raise StateError(
            f"process {os.getpid()} was forked from {_asked_in[0]}, which had read Lance data sets before, so this "
            "process can read none: start it by spawn or forkserver (multiprocessing_context of a DataLoader), or "
            "open Lance data sets in this process alone"
        )

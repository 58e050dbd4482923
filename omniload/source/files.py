"""Files of a source: patterns to shards, and guarded reading of them.

Patterns are paths, globs or URLs that fsspec opens. Shards keep the order of the
patterns and, within one, the natural order of their paths, so that every machine
numbers them alike whatever order its file system lists them in.
"""

import glob
import hashlib
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fsspec
import pyarrow as pa
from fsspec.core import url_to_fs

from omniload.base.errors import ConfigError, IntegrityError, OmniloadError, UnavailableError

__all__ = ["ShardFile", "digest_of", "digest_of_texts", "find_files", "reading"]

_TAG_KEYS = ("ETag", "etag")
_STAMP_KEYS = (*_TAG_KEYS, "mtime", "LastModified", "last_modified", "updated", "created")


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardFile:
    """One file of a source, as it was when the source was opened."""

    path: str
    """Path or URL, as messages show it."""
    size_bytes: int
    """Its size."""
    stamp: str
    """What changes when the file is written again: modification time in ns, or a store's tag."""
    mark: str = ""
    """What changes with the content whatever time the file is given: inode and time of change, or a store's tag;
    empty where a store has none."""
    remote: fsspec.AbstractFileSystem | None = None
    """The store that holds it; ``None`` for a local file."""

    def open(self) -> pa.NativeFile:
        """Open the file for reading.

        Local files are read, not mapped: a mapped file that is cut short kills the
        process, and mapping was not faster (0 to 3 % of decoding Parquet).
        """
        if self.remote is None:
            return pa.OSFile(self.path, "rb")
        return pa.PythonFile(self.remote.open(self.path, "rb"), mode="r")

    def read_ranges(self, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
        """Return the bytes of each range; fewer where the file ends before it.

        Raises:
            OSError: The file cannot be read.
        """
        if self.remote is None:
            with Path(self.path).open("rb", buffering=0) as file:
                return [os.pread(file.fileno(), stop - start, start) for start, stop in ranges]
        starts, stops = [start for start, _ in ranges], [stop for _, stop in ranges]
        found: list[bytes] = self.remote.cat_ranges(
            [self.path] * len(ranges), starts, stops, on_error="raise"
        )
        return found

    def require_unchanged(self) -> None:
        """Refuse a file that is not the one the source was opened with.

        A remote store may answer from a listing it keeps; then a change shows later.

        Raises:
            IntegrityError: Its size or modification time differs, or it is gone.
            UnavailableError: The file system did not answer.
        """
        try:
            now = _local(self.path) if self.remote is None else _remote(self.remote, self.path)
        except FileNotFoundError:
            raise IntegrityError(
                f"{self.path}: gone since the source was opened; put it back, or start anew without it"
            ) from None
        except OSError as error:
            raise UnavailableError(
                f"{self.path}: cannot be looked at: {error}; try again"
            ) from error
        if (now.size_bytes, now.stamp) != (self.size_bytes, self.stamp):
            raise IntegrityError(
                f"{self.path}: changed since the source was opened: {self.size_bytes} bytes written at "
                f"{self.stamp}, now {now.size_bytes} at {now.stamp}; positions no longer hold, start anew"
            )


@contextmanager
def reading(file: ShardFile, part: str = "") -> Iterator[None]:
    """Read from ``file`` inside; say what went wrong in terms of the source.

    Raises:
        IntegrityError: The file changed since the source was opened, before or while it
            was read, or its bytes cannot be decoded.
        UnavailableError: The file system did not answer.
    """
    where = f"{file.path}{part and f': {part}'}"
    file.require_unchanged()
    try:
        yield
    except OmniloadError:
        raise
    except (OSError, EOFError, pa.ArrowException) as error:
        file.require_unchanged()
        # Decoders raise OSError without a number; the operating system gives one.
        if isinstance(error, ConnectionError | TimeoutError) or getattr(error, "errno", None):
            raise UnavailableError(f"{where}: cannot be read: {error}; try again") from error
        raise IntegrityError(
            f"{where}: cannot be decoded: {error}; the file is cut short or corrupt, replace it"
        ) from error
    file.require_unchanged()


def find_files(patterns: Sequence[str], base_dir: Path, *, source: str) -> tuple[ShardFile, ...]:
    """Expand patterns to files, each once, in an order that does not depend on the machine.

    Args:
        patterns: Paths, globs (``*``, ``?``, ``[]``, ``**``) or URLs.
        base_dir: Folder that relative paths start at.
        source: Name of the source, for messages.

    Raises:
        ConfigError: A pattern names nothing, a folder, or a store that cannot be opened.
        UnavailableError: A store did not answer.
    """
    found: dict[str, ShardFile] = {}
    for pattern in patterns:
        try:
            files = _expand(pattern, base_dir)
        except FileNotFoundError:
            files = []
        except (ImportError, PermissionError, ValueError) as error:
            raise ConfigError(
                f"sources.{source}.path: {pattern!r} cannot be opened: {error}"
            ) from error
        except OSError as error:
            raise UnavailableError(
                f"sources.{source}.path: {pattern!r} cannot be listed: {error}; try again"
            ) from error
        if not files:
            raise ConfigError(
                f"sources.{source}.path: {pattern!r} matches no file under {base_dir}; "
                "correct the pattern, relative paths start at the mix file"
            )
        for file in sorted(files, key=_natural):
            found.setdefault(file.path, file)
    return tuple(found.values())


def digest_of(files: Sequence[ShardFile]) -> str:
    """Return a digest of names and sizes: the same wherever the files lie and whenever they were copied."""
    return digest_of_texts(f"{file.size_bytes} {file.path.rpartition('/')[2]}" for file in files)


def digest_of_texts(texts: Iterable[str]) -> str:
    """Return a digest of texts in their order."""
    lines = "\n".join(texts).encode(errors="surrogateescape")
    return hashlib.blake2b(lines, digest_size=8).hexdigest()


def _expand(pattern: str, base_dir: Path) -> list[ShardFile]:
    if "://" in pattern and not pattern.startswith("file://"):
        store, path = url_to_fs(pattern)
        if not glob.has_magic(path):
            return [_remote(store, path)]
        # Listings and single answers of one store may write the same time differently, so the
        # stamp comes from a single answer; stores that keep listings give it without a request.
        names = [name for name, entry in store.glob(path, detail=True).items() if _is_file(entry)]
        return [_remote(store, name) for name in names]
    path = str(base_dir / pattern.removeprefix("file://"))
    if not glob.has_magic(path) or Path(path).exists():
        return [_local(path)]
    # Matching starts inside the folder: a bracket in the folder's own name is not a pattern.
    names = glob.glob(pattern.removeprefix("file://"), root_dir=base_dir, recursive=True)  # noqa: PTH207
    return [_local(str(base_dir / name)) for name in names if (base_dir / name).is_file()]


def _local(path: str) -> ShardFile:
    if Path(path).is_dir():
        raise ValueError(f"it is a folder; write a pattern such as {path}/*")
    status = Path(path).stat()
    return ShardFile(
        path=path,
        size_bytes=status.st_size,
        stamp=str(status.st_mtime_ns),
        mark=f"{status.st_ino}/{status.st_ctime_ns}",
    )


def _remote(store: fsspec.AbstractFileSystem, path: str) -> ShardFile:
    entry = store.info(path)
    if not _is_file(entry):
        raise ValueError(f"it is a folder; write a pattern such as {path}/*")
    stamp = next((str(entry[key]) for key in _STAMP_KEYS if entry.get(key)), "")
    mark = next((str(entry[key]) for key in _TAG_KEYS if entry.get(key)), "")
    return ShardFile(path=path, size_bytes=entry["size"], stamp=stamp, mark=mark, remote=store)


def _is_file(entry: dict[str, Any]) -> bool:
    return bool(entry["type"] == "file")


def _natural(file: ShardFile) -> tuple[list[str | int], str]:
    """Order ``part-2`` before ``part-10``: texts and numbers alternate, so they compare in kind."""
    parts = re.split(r"([0-9]+)", file.path)
    return [int(part) if i % 2 else part for i, part in enumerate(parts)], file.path

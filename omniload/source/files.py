"""Files of a source: patterns to shards, and guarded reading of them.

Patterns are paths, globs or URLs that fsspec opens. Shards keep the order of the
patterns and, within one, the natural order of their paths, so that every machine
numbers them alike whatever order its file system lists them in.
"""

import glob
import hashlib
import os
import re
import stat
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import fsspec
import pyarrow as pa
from fsspec.core import url_to_fs

from omniload.base.errors import (
    ConfigError,
    IntegrityError,
    OmniloadError,
    UnavailableError,
    system_refusal,
)
from omniload.base.log import get_logger
from omniload.base.reading import kind_of
from omniload.base.under_way import under_way
from omniload.base.waiting import within

__all__ = ["ShardFile", "digest_of", "digest_of_texts", "find_files", "reading"]

_TAG_KEYS = ("ETag", "etag")
_STAMP_KEYS = (*_TAG_KEYS, "mtime", "LastModified", "last_modified", "updated", "created")
_LISTING_S = 300.0
"""How long a store or a file system may take to list a pattern: some millions of names."""
_NAMED = 8
"""Names that a message lists."""
_LOG = get_logger(__name__)


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
        process, and mapping was not faster (0 to 3 % of decoding Parquet). What says that
        it is empty is not read at all: files of the kernel, such as ``/proc/kmsg``, say so and wait.
        """
        if self.size_bytes == 0:
            return pa.BufferReader(b"")
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
        except Exception as error:
            if not _is_outage(error):
                raise
            raise UnavailableError(
                f"{self.path}: cannot be looked at: {_said(error)}; try again"
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
    with under_way(f"reads {where}"), _guarded(file, where):
        yield


@contextmanager
def _guarded(file: ShardFile, where: str) -> Iterator[None]:
    file.require_unchanged()
    try:
        yield
    except OmniloadError:
        raise
    except Exception as error:
        decoding = isinstance(error, OSError | EOFError | pa.ArrowException)
        if not decoding and not _is_outage(error):
            raise
        file.require_unchanged()
        # Decoders raise OSError without a number; the operating system gives one.
        of_system = isinstance(error, ConnectionError | TimeoutError) or getattr(
            error, "errno", None
        )
        if of_system or not decoding:
            raise UnavailableError(f"{where}: cannot be read: {_said(error)}; try again") from error
        raise IntegrityError(
            f"{where}: cannot be decoded: {error}; the file is cut short or corrupt, replace it"
        ) from error
    file.require_unchanged()


def _is_outage(error: Exception) -> bool:
    """Whether the system or a client of a store failed; a builtin such as ``KeyError`` is a fault of code."""
    return isinstance(error, OSError) or type(error).__module__ != "builtins"


def _said(error: Exception) -> str:
    """Return one line of what a client of a store says, which may be a page."""
    return _shortened(str(error).strip().partition("\n")[0] or type(error).__name__)


def _shortened(text: str) -> str:
    return text if len(text) <= 300 else f"{text[:299]}…"


def find_files(
    patterns: Sequence[str],
    base_dir: Path,
    *,
    source: str,
    known: Callable[[str], bool] | None = None,
) -> tuple[ShardFile, ...]:
    """Expand patterns to files, each once, in an order that does not depend on the machine.

    What a glob matches by a name that starts with ``_`` or ``.`` is passed over, and said: that
    is how writers mark what is no data, such as ``_SUCCESS`` and ``.x.crc``.

    Args:
        patterns: Paths, globs (``*``, ``?``, ``[]``, ``**``) or URLs.
        base_dir: Folder that relative paths start at.
        source: Name of the source, for messages.
        known: Says whether the format reads files of a name; asked of what a glob matches that
            does not end in a suffix itself.

    Raises:
        ConfigError: A pattern names nothing, what is no file, a file that the format does not
            know, or a store that cannot be opened.
        UnavailableError: A store did not answer.
    """

    def listed() -> list[list[ShardFile]]:
        return [_listed(pattern, base_dir, source) for pattern in patterns]

    # One thread for all of them: fsspec makes a client of a store for each thread that asks.
    # Local folders have the limit too: they may be mounts that do not answer, and ``/**`` is endless.
    lists = within(_LISTING_S, listed, what=f"sources.{source}.path, a listing")
    found: dict[str, ShardFile] = {}
    for pattern, taken in zip(patterns, lists, strict=True):
        where = f"sources.{source}.path: {_shortened(pattern)!r}"
        files = _usable(taken, pattern, base_dir, where, known)
        if not files:
            raise ConfigError(
                f"{where} matches no file under {base_dir}; "
                "correct the pattern, relative paths start at the mix file"
            )
        for file in sorted(files, key=_natural):
            found.setdefault(file.path, file)
    return tuple(found.values())


def _is_url(pattern: str) -> bool:
    return "://" in pattern and not pattern.startswith("file://")


def _listed(pattern: str, base_dir: Path, source: str) -> list[ShardFile]:
    where = f"sources.{source}.path: {_shortened(pattern)!r}"
    try:
        with under_way(f"lists {pattern}"):
            if _is_url(pattern):
                return _expand_url(pattern)
            return _expand(pattern.removeprefix("file://"), base_dir)
    except FileNotFoundError:
        return []
    except OmniloadError:
        raise
    except Exception as error:
        # The first three come from opening a store, whose clients raise them for wrong settings.
        if isinstance(error, ImportError | PermissionError | ValueError):
            raise ConfigError(f"{where} cannot be opened: {_said(error)}") from error
        if not _is_outage(error):
            raise
        # Of the error without the name that it carries: the pattern says it, and it may be long.
        refusal = (
            system_refusal(OSError(error.errno, error.strerror))
            if isinstance(error, OSError)
            else None
        )
        if isinstance(refusal, ConfigError):  # such as a name too long, which no second try mends
            raise ConfigError(f"{where} cannot be listed: {refusal}") from error
        raise UnavailableError(f"{where} cannot be listed: {_said(error)}; try again") from error


def _usable(
    files: list[ShardFile],
    pattern: str,
    base_dir: Path,
    where: str,
    known: Callable[[str], bool] | None,
) -> list[ShardFile]:
    """Leave out what a glob took that is no data; refuse what the format does not know."""
    if not glob.has_magic(pattern):
        return files
    marked = {file.path: file for file in files if _is_marked(file.path, pattern, base_dir)}
    if marked:
        names = _names(list(marked.values()))
        _LOG.info("%s: names that start with _ or . are passed over: %s", where, names)
    rest = [file for file in files if file.path not in marked]
    suffix = PurePosixPath(pattern).suffix
    if known is None or (suffix and not glob.has_magic(suffix)):
        return rest
    if strange := [file for file in rest if not known(PurePosixPath(file.path).name)]:
        raise ConfigError(
            f"{where} takes {_names(strange)}, which this type does not read; end the pattern in a suffix, "
            "such as *.jsonl or *.parquet, or remove them"
        )
    return rest


def _is_marked(path: str, pattern: str, base_dir: Path) -> bool:
    """Whether a part of ``path`` that a glob matched starts with ``_`` or ``.``, and no part of the glob does."""
    if "://" in pattern:
        parts, fixed = _parts(pattern.partition("::")[0]), 0
    else:
        parts = _parts(str(base_dir / pattern))
        # A bracket in the folder's own name is not a pattern.
        fixed = 0 if pattern.startswith("/") else len(_parts(str(base_dir)))
    while fixed < len(parts) and not glob.has_magic(parts[fixed]):
        fixed += 1
    if any(part[0] in "_." for part in parts[fixed:]):
        return False
    return any(part[0] in "_." for part in _parts(path)[fixed:])


def _parts(path: str) -> list[str]:
    scheme, given, rest = path.partition("://")
    return [part for part in (rest if given else scheme).split("/") if part]


def _names(files: Sequence[ShardFile]) -> str:
    names = sorted(PurePosixPath(file.path).name for file in files)
    shown = ", ".join(ascii(name)[1:-1] for name in names[:_NAMED])
    return f"{shown} and {len(names) - _NAMED} more" if len(names) > _NAMED else shown


def digest_of(files: Sequence[ShardFile]) -> str:
    """Return a digest of names and sizes: the same wherever the files lie and whenever they were copied."""
    return digest_of_texts(f"{file.size_bytes} {file.path.rpartition('/')[2]}" for file in files)


def digest_of_texts(texts: Iterable[str]) -> str:
    """Return a digest of texts in their order."""
    lines = "\n".join(texts).encode(errors="surrogateescape")
    return hashlib.blake2b(lines, digest_size=8).hexdigest()


def _expand_url(pattern: str) -> list[ShardFile]:
    store, path = url_to_fs(pattern)
    if not glob.has_magic(path):
        return [_remote(store, path)]
    # Listings and single answers of one store may write the same time differently, so the
    # stamp comes from a single answer; stores that keep listings give it without a request.
    names = [name for name, entry in store.glob(path, detail=True).items() if _is_file(entry)]
    return [_remote(store, name) for name in names]


def _expand(pattern: str, base_dir: Path) -> list[ShardFile]:
    path = str(base_dir / pattern)
    if not glob.has_magic(path) or Path(path).exists():
        return [_local(path)]
    # Matching starts inside the folder: a bracket in the folder's own name is not a pattern.
    names = glob.glob(pattern, root_dir=base_dir, recursive=True)  # noqa: PTH207
    return [_local(str(base_dir / name)) for name in names if (base_dir / name).is_file()]


def _local(path: str) -> ShardFile:
    status = Path(path).stat()
    if stat.S_ISDIR(status.st_mode):
        raise ValueError(f"it is a folder; write a pattern such as {path}/*")
    if not stat.S_ISREG(status.st_mode):
        raise ValueError(
            f"it is {kind_of(status.st_mode)}, which can be read once or has no end; write it to a file"
        )
    return ShardFile(
        path=path,
        size_bytes=status.st_size,
        stamp=str(status.st_mtime_ns),
        mark=f"{status.st_ino}/{status.st_ctime_ns}",
    )


def _remote(store: fsspec.AbstractFileSystem, path: str) -> ShardFile:
    entry = store.info(path)
    if entry["type"] == "directory":
        raise ValueError(f"it is a folder; write a pattern such as {path}/*")
    if not _is_file(entry):
        raise ValueError("it is no file, and can be read once or has no end; write it to a file")
    stamp = next((str(entry[key]) for key in _STAMP_KEYS if entry.get(key)), "")
    mark = next((str(entry[key]) for key in _TAG_KEYS if entry.get(key)), "")
    return ShardFile(path=path, size_bytes=entry["size"], stamp=stamp, mark=mark, remote=store)


def _is_file(entry: dict[str, Any]) -> bool:
    return bool(entry["type"] == "file")


def _natural(file: ShardFile) -> tuple[list[str | int], str]:
    """Order ``part-2`` before ``part-10``: texts and numbers alternate, so they compare in kind."""
    parts = re.split(r"([0-9]+)", file.path)
    return [int(part) if i % 2 else part for i, part in enumerate(parts)], file.path

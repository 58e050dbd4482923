"""Files of a source: the state of a file when the source was opened, and guarded reading of it."""

import errno
import os
import stat
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from http import HTTPStatus
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from omniload.base.concurrency.calls_under_way import under_way
from omniload.base.errors import IntegrityError, OmniloadError, UnavailableError
from omniload.base.reading import kind_of
from omniload.base.settings.paths import unnamed
from omniload.source.stores.asking import changed, is_other, no_ranges, ranges_of, stamp_of, tag_of
from omniload.source.stores.listings import (
    entry_lately,
    listed_entry,
    look_anew,
    noted,
    opened_lately,
)

if TYPE_CHECKING:
    import fsspec

    from omniload.source.stores.kept_shard import KeptShard
    from omniload.source.stores.shard_cache import ShardCache

__all__ = [
    "Known",
    "ShardFile",
    "beside",
    "is_file",
    "is_outage",
    "is_refusal",
    "local_file",
    "reading",
    "remote_file",
    "said",
    "shortened",
]

_LARGEST_NAME = 1_024
_READ_BYTES = 1 << 30
"""Most bytes of one call, because the memory of a call is taken before the number of bytes is known."""
_FILLED_BYTES = 9
_ASKS_FOR_MEMORY = "Frame requires too much memory"
"""Part of zstd's message about a frame that refers back further than its decoders can hold."""
_SAYS_NO_RANGES = "support range requests"
"""Part of fsspec's message about a server that sent a whole file."""
_OF_SYSTEM = (ConnectionError, TimeoutError, PermissionError, FileNotFoundError)
_REFUSALS = frozenset(
    {
        *("ParamValidationError", "NoCredentialsError", "PartialCredentialsError"),
        *("ProfileNotFound", "NoRegionError", "InvalidRegionError"),
        "InvalidEndpointDiscoveryConfigurationError",
    }
)
"""Class names of errors of botocore, which is an optional dependency: settings or credentials are missing or wrong."""


@dataclass(slots=True)
class Known:
    """Knowledge about a file that is added later; the facts of the file itself stay as they were found."""

    require_same: "Callable[[ShardFile, Sequence[str]], None] | None" = None
    """Raises if the marks of the file and of its companions differ and its content does, too; see ``index``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardFile:
    """One file of a source, in the state in which the source was opened."""

    path: str
    """Path or URL, as messages show it."""
    size_bytes: int
    """Size of the file."""
    stamp: str
    """Value that changes if the file is written again: modification time in ns, or a store's tag."""
    mark: str = ""
    """Inode and time of change, or a store's tag, which change even if the old time is set; empty without tags."""
    remote: "fsspec.AbstractFileSystem | None" = None
    """Store of the file; ``None`` for a local file."""
    beside: tuple["ShardFile", ...] = ()
    """Files that are needed to read this file, such as an index next to it."""
    part_of: tuple[str, int] | None = None
    """Data set, and its version, in which the file was found; it does not take part in comparisons of files."""
    kept: "KeptShard | None" = field(default=None, compare=False, repr=False)
    """Copy of the file on this node; ``None`` if there is none."""
    known: Known = field(default_factory=Known, compare=False, repr=False)
    """Knowledge that is added when the units of the file are found."""

    def open(self) -> pa.NativeFile:
        """Open the file for reading.

        Local files are read, not mapped: a mapped file that is truncated kills the process, and mapping was not faster
        (0 to 3 % of decoding Parquet). A file of size 0 is not read at all, because files of the kernel such as
        ``/proc/kmsg`` have size 0 and a read of them blocks.
        """
        if self.size_bytes == 0:
            return pa.BufferReader(b"")
        if self.remote is None:
            # Passed as bytes, because a name need not be UTF-8.
            return pa.OSFile(os.fsencode(self.path), "rb")
        file = opened_lately(self.remote, self.path) if self.kept is None else self.kept.open()
        return pa.PythonFile(file, mode="r")

    def kept_in(self, cache: "ShardCache") -> "ShardFile":
        """Return the file as it is read through a cache of shards; a local file is returned unchanged."""
        others = tuple(each.kept_in(cache) for each in self.beside)
        if self.remote is None:
            return replace(self, beside=others)
        kept = cache.shard(self.remote, self.path, self.size_bytes, self.stamp, self.mark)
        return replace(self, beside=others, kept=kept)

    def read_ranges(self, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
        """Return the bytes of each range, or fewer if the file ends before the range does.

        Raises:
            ConfigError: The file is on a server that only sends whole files.
            OSError: The file cannot be read.
        """
        if self.remote is None:
            with Path(self.path).open("rb", buffering=0) as file:
                return [_local_range(file.fileno(), start, stop) for start, stop in ranges]
        if self.kept is not None:
            return self.kept.read_ranges(ranges)
        return ranges_of(self.remote, self.path, self.size_bytes, ranges)

    def read_range(self, start: int, stop: int) -> bytes:
        """Return exactly the bytes from ``start`` to ``stop``.

        Raises:
            IntegrityError: The file ends before ``stop``.
            OSError: The file cannot be read.
        """
        (data,) = self.read_ranges([(start, stop)])
        if len(data) != stop - start:
            raise IntegrityError(
                f"{self.path}: gave {len(data)} bytes from {start} on where {stop - start} were wanted of "
                f"{self.size_bytes}; the file is cut short, replace it"
            )
        return data

    def require_unchanged(self) -> None:
        """Raise an error if this file, or a file it needs, is not the same as when the source was opened.

        If the client of a store caches listings, a change is seen within ``LISTED_S``; see ``listings``.

        Raises:
            IntegrityError: The size, modification time or content differs, or the file is gone.
            UnavailableError: The file system did not answer.
        """
        marks = [each._require_stamp() for each in (*self.beside, self)]
        if self.known.require_same is not None:
            self.known.require_same(self, marks)

    def _require_stamp(self) -> str:
        """Raise if the size or the stamp has changed, as above, and return the present mark."""
        try:
            now, mark = self._now()
        except Exception as error:
            if _is_gone(error):
                raise IntegrityError(
                    f"{self.path}: gone since the source was opened; put it back, or start again without it"
                ) from None
            # A local path that is no file raises ValueError; in a store's client, a ValueError says nothing of the
            # file.
            if self.remote is None and isinstance(error, ValueError):
                raise IntegrityError(
                    f"{self.path}: changed since the source was opened: {error}; restore the old file, or start again"
                ) from None
            if not is_outage(error):
                raise
            raise _refusal(f"{self.path}: cannot be looked at", error) from error
        if is_other(then := (self.size_bytes, self.stamp), now):
            raise changed(self.path, then, now)
        return mark

    def _now(self) -> tuple[tuple[int, str], str]:
        """Return the present size, stamp and mark of the file."""
        if self.remote is None:
            status = _status_of(self.path)
            return (status.st_size, str(status.st_mtime_ns)), _mark_of(status)
        now = remote_file(self.remote, self.path, entry_lately(self.remote, self.path))
        return (now.size_bytes, now.stamp), now.mark


def _local_range(descriptor: int, start: int, stop: int) -> bytes:
    """Return the bytes of a local file from ``start`` to ``stop``, or fewer if the file ends before."""
    parts, at = [], start
    # A short read is not yet the end of the file: Linux returns at most 2 GiB at once, and a network file system less.
    while at < stop and (data := os.pread(descriptor, min(stop - at, _READ_BYTES), at)):
        parts.append(data)
        at += len(data)
    return b"".join(parts)


@contextmanager
def reading(file: ShardFile, part: str = "") -> Iterator[None]:
    """Read from ``file`` in this context, and raise errors in terms of the source.

    Raises:
        ConfigError: The server of the file only sends whole files.
        IntegrityError: The file changed since the source was opened, before or during the read, or it cannot be
            decoded.
        UnavailableError: The file system did not answer.
    """
    where = f"{file.path}{part and f': {part}'}"
    with under_way(f"reads {where}"):
        file.require_unchanged()
        try:
            yield
        except OmniloadError:
            raise
        except Exception as error:
            _raise_fault(error, file, where)
            raise
        # Checked before and after the read, so that the data is known to come from the file that was opened.
        file.require_unchanged()


def _raise_fault(error: Exception, file: ShardFile, where: str) -> None:
    """Raise the fault of a file or its store that an error shows. Return if the error is a fault of code."""
    if isinstance(error, ValueError) and _SAYS_NO_RANGES in str(error):
        raise no_ranges(file.path, "answers with all of it") from error
    decoding = isinstance(error, OSError | EOFError | UnicodeDecodeError | pa.ArrowException)
    if not decoding and not is_outage(error):
        return
    # Decoders raise OSError themselves. The system sets errno, a store's client a class: PermissionError for old keys.
    of_system = isinstance(error, _OF_SYSTEM) or getattr(error, "errno", None)
    if file.remote is not None and (_is_gone(error) or (decoding and not of_system)):
        # The cached listing would say that the file exists and is unchanged.
        look_anew(file.remote, file.path)
    file.require_unchanged()
    if of_system or not decoding:
        raise _refusal(f"{where}: cannot be read", error) from error
    remedy = "the file is cut short or corrupt, replace it"
    if _ends_in_zeros(file):
        remedy = (
            f"it ends in zeros, which only gzip allows: write it again, gzip -dc {file.path} | gzip"
        )
    if _ASKS_FOR_MEMORY in str(error):
        remedy = (
            "it was written with a window of more than 128 MiB (zstd --long=28 to 31), which each reader would hold: "
            f"write it anew, zstd -dc --long=31 {file.path} | zstd"
        )
    raise IntegrityError(f"{where}: cannot be decoded: {error}; {remedy}") from error


def _refusal(what: str, error: Exception) -> UnavailableError:
    """Return the error for a store that refuses ``what``. It asks for a retry, because keys may be renewed."""
    remedy = "get the rights to it, and " if isinstance(error, PermissionError) else ""
    if getattr(error, "errno", None) == errno.EINVAL and "Bad Request" in str(error):
        remedy = "S3 answers so to a look with keys that have expired: renew them, and "
    return UnavailableError(f"{what}: {said(error)}; {remedy}try again")


def _ends_in_zeros(file: ShardFile) -> bool:
    """Return whether a gzip file has padding after its end: its check sum and length are at most eight bytes."""
    if not file.path.endswith((".gz", ".tgz")) or file.size_bytes < _FILLED_BYTES:
        return False
    return not any(file.read_range(file.size_bytes - _FILLED_BYTES, file.size_bytes))


def is_outage(error: Exception) -> bool:
    """Return whether the system or a client of a store failed. A builtin such as ``KeyError`` is a fault of code."""
    return isinstance(error, OSError) or type(error).__module__ != "builtins"


def is_refusal(error: Exception) -> bool:
    """Return whether an S3 client refuses its settings or arguments, before it asks the store."""
    kinds = type(error).__mro__
    return any(k.__module__.startswith("botocore") and k.__name__ in _REFUSALS for k in kinds)


def said(error: Exception) -> str:
    """Return the message of a store's client, which may be a page, as one line."""
    first, _, rest = (unnamed(error) or str(error)).strip().partition("\n")
    if first.endswith(":"):  # a heading alone says nothing
        first = f"{first} {rest.partition(chr(10))[0].strip()}"
    return shortened(first.strip() or type(error).__name__)


def shortened(text: str) -> str:
    """Truncate a text that is too long for a message."""
    return text if len(text) <= 300 else f"{text[:299]}…"


def beside(file: ShardFile, name: str) -> ShardFile:
    """Return a file that another file names, in the folder of that file or below it.

    Args:
        file: The file that has the name.
        name: A path relative to the folder of the file.

    Raises:
        IntegrityError: The name leads out of the folder, or there is no such file.
        UnavailableError: The store did not answer.
    """
    parts = name.split("/")
    if (
        not 0 < len(name) <= _LARGEST_NAME
        or not name.isprintable()
        or "\\" in name
        or any(part in {"", ".", ".."} for part in parts)
    ):
        raise IntegrityError(
            f"{file.path}: names the file {shortened(ascii(name))}; a name stays in the folder: write the list anew"
        )
    path = f"{file.path.rpartition('/')[0]}/{name}"
    try:
        return local_file(path) if file.remote is None else remote_file(file.remote, path)
    except Exception as error:
        # S3 over HTTP answers 403 for a missing file if the client may not list the bucket.
        refused = getattr(error, "status", None) == HTTPStatus.FORBIDDEN
        if refused or isinstance(error, FileNotFoundError | ValueError):
            raise IntegrityError(
                f"{file.path}: names {name}, which is not there ({said(error)}); copy the whole folder"
            ) from error
        if not is_outage(error):
            raise
        raise _refusal(f"{path}: cannot be looked at", error) from error


def _is_gone(error: Exception) -> bool:
    """Return whether a path has no file: missing, or a link to itself, which no later try would change."""
    if isinstance(error, FileNotFoundError | NotADirectoryError):
        return True
    return isinstance(error, OSError) and error.errno == errno.ELOOP


def local_file(path: str) -> ShardFile:
    """Return a local file, after a look at its status.

    Raises:
        OSError: The status cannot be read.
        ValueError: The path is no file; the message says what it is.
    """
    status = _status_of(path)
    return ShardFile(
        path=path,
        size_bytes=status.st_size,
        stamp=str(status.st_mtime_ns),
        mark=_mark_of(status),
    )


def _mark_of(status: os.stat_result) -> str:
    return f"{status.st_ino}/{status.st_ctime_ns}"


def _status_of(path: str) -> os.stat_result:
    """Return the status of a path that must be a local file; see ``local_file``."""
    status = os.stat(path)  # noqa: PTH116 -- called twice for each unit that is read
    if stat.S_ISREG(status.st_mode):
        return status
    if stat.S_ISDIR(status.st_mode):
        raise ValueError(f"it is a folder; write a pattern such as {path}/*")
    raise ValueError(
        f"it is {kind_of(status.st_mode)}, which can be read once or has no end; write it to a file"
    )


def remote_file(
    store: "fsspec.AbstractFileSystem", path: str, entry: dict[str, Any] | None = None
) -> ShardFile:
    """Return a file of a store from ``entry``, the store's description of it, or from a new look at the store.

    Raises:
        ValueError: The path is no file; the message says what it is.
        Exception: What the store's client raises.
    """
    entry = noted(store, path, listed_entry(store, path) if entry is None else entry)
    if entry["type"] == "directory":
        raise ValueError(f"it is a folder; write a pattern such as {path}/*")
    if not is_file(entry):
        raise ValueError("it is no file, and can be read once or has no end; write it to a file")
    size = entry.get("size")
    if not isinstance(size, int) or size < 0:
        raise ValueError(
            f"its store gives {'no size' if size is None else f'the size {size!r:.40}'}; have it send one (over HTTP a "
            "Content-Length), or copy the file"
        )
    return ShardFile(
        path=path, size_bytes=size, stamp=stamp_of(entry), mark=tag_of(entry), remote=store
    )


def is_file(entry: dict[str, Any]) -> bool:
    """Return whether a store's description of a path describes a file."""
    return bool(entry["type"] == "file")

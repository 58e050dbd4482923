"""Files of a source: what one was when the source was opened, and guarded reading of it."""

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
from omniload.source.stores.asking import (
    changed,
    entry_of,
    is_other,
    no_ranges,
    opened,
    ranges_of,
    stamp_of,
    tag_of,
)
from omniload.source.stores.listings import entry_lately, look_anew, noted

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
"""Bytes of one call; memory for all of them is taken before it is known how many there are."""
_FILLED_BYTES = 9
_ASKS_FOR_MEMORY = "Frame requires too much memory"
"""As zstd says that a frame goes back further than its decoders hold."""
_SAYS_NO_RANGES = "support range requests"
"""As fsspec says that a server sent a whole file."""
_OF_SYSTEM = (ConnectionError, TimeoutError, PermissionError, FileNotFoundError)
_REFUSALS = frozenset(
    {
        *("ParamValidationError", "NoCredentialsError", "PartialCredentialsError"),
        *("ProfileNotFound", "NoRegionError", "InvalidRegionError"),
        "InvalidEndpointDiscoveryConfigurationError",
    }
)
"""Names of botocore, which is an extra: settings and credentials that are missing or wrong."""


@dataclass(slots=True)
class Known:
    """What is found out of a file later; the file itself stays as it was found."""

    require_same: "Callable[[ShardFile, Sequence[str]], None] | None" = None
    """Refuses it where other marks, of what stands beside it and its own, go with other content; see ``index``."""


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
    remote: "fsspec.AbstractFileSystem | None" = None
    """The store that holds it; ``None`` for a local file."""
    beside: tuple["ShardFile", ...] = ()
    """Files that it cannot be read without, such as the index that lies beside it."""
    part_of: tuple[str, int] | None = None
    """Data set, and version of it, that it was found in; no part of what tells it from another file."""
    kept: "KeptShard | None" = field(default=None, compare=False, repr=False)
    """Its copy on this node; ``None`` where it has none."""
    known: Known = field(default_factory=Known, compare=False, repr=False)
    """What whoever found its units knows of it."""

    def open(self) -> pa.NativeFile:
        """Open the file for reading.

        Local files are read, not mapped: a mapped file that is cut short kills the
        process, and mapping was not faster (0 to 3 % of decoding Parquet). What says that
        it is empty is not read at all: files of the kernel, such as ``/proc/kmsg``, say so and wait.
        """
        if self.size_bytes == 0:
            return pa.BufferReader(b"")
        if self.remote is None:
            # As bytes: a name need not be UTF-8.
            return pa.OSFile(os.fsencode(self.path), "rb")
        file = opened(self.remote, self.path) if self.kept is None else self.kept.open()
        return pa.PythonFile(file, mode="r")

    def kept_in(self, cache: "ShardCache") -> "ShardFile":
        """Return the file as it is read through a cache of shards; one of this machine is read as it is."""
        others = tuple(each.kept_in(cache) for each in self.beside)
        if self.remote is None:
            return replace(self, beside=others)
        kept = cache.shard(self.remote, self.path, self.size_bytes, self.stamp, self.mark)
        return replace(self, beside=others, kept=kept)

    def read_ranges(self, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
        """Return the bytes of each range; fewer where the file ends before it.

        Raises:
            ConfigError: It lies on a server that gives whole files alone.
            OSError: The file cannot be read.
        """
        if self.remote is None:
            with Path(self.path).open("rb", buffering=0) as file:
                return [_local_range(file.fileno(), start, stop) for start, stop in ranges]
        if self.kept is not None:
            return self.kept.read_ranges(ranges)
        return ranges_of(self.remote, self.path, self.size_bytes, ranges)

    def read_range(self, start: int, stop: int) -> bytes:
        """Return the bytes from ``start`` to ``stop``, all of them.

        Raises:
            IntegrityError: The file ends before.
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
        """Refuse a file that is not the one the source was opened with, or stands beside another than then.

        Of a store whose client keeps listings a change shows within ``LISTED_S``, as ``listings`` has it.

        Raises:
            IntegrityError: Its size, modification time or content differs, or it is gone.
            UnavailableError: The file system did not answer.
        """
        marks = [each._require_stamp() for each in (*self.beside, self)]
        if self.known.require_same is not None:
            self.known.require_same(self, marks)

    def _require_stamp(self) -> str:
        """Refuse it where its size or its stamp is another, and return the mark that it has now; see above."""
        try:
            now, mark = self._now()
        except Exception as error:
            if _is_gone(error):
                raise IntegrityError(
                    f"{self.path}: gone since the source was opened; put it back, or start anew without it"
                ) from None
            # What is said of a path that is no file; an error of a store's client says nothing of the file.
            if self.remote is None and isinstance(error, ValueError):
                raise IntegrityError(
                    f"{self.path}: changed since the source was opened: {error}; put back what was there, or start anew"
                ) from None
            if not is_outage(error):
                raise
            raise _refusal(f"{self.path}: cannot be looked at", error) from error
        if is_other(then := (self.size_bytes, self.stamp), now):
            raise changed(self.path, then, now)
        return mark

    def _now(self) -> tuple[tuple[int, str], str]:
        """Return the size and the stamp that it has now, and its mark."""
        if self.remote is None:
            status = _status_of(self.path)
            return (status.st_size, str(status.st_mtime_ns)), _mark_of(status)
        now = remote_file(self.remote, self.path, entry_lately(self.remote, self.path))
        return (now.size_bytes, now.stamp), now.mark


def _local_range(descriptor: int, start: int, stop: int) -> bytes:
    """Return the bytes of a local file from ``start`` to ``stop``; fewer where it ends before."""
    parts, at = [], start
    # Less than was asked for is no end yet: Linux gives 2 GiB at once at most, and a network file system less.
    while at < stop and (data := os.pread(descriptor, min(stop - at, _READ_BYTES), at)):
        parts.append(data)
        at += len(data)
    return b"".join(parts)


@contextmanager
def reading(file: ShardFile, part: str = "") -> Iterator[None]:
    """Read from ``file`` inside; say what went wrong in terms of the source.

    Raises:
        ConfigError: Its server gives no parts of it.
        IntegrityError: The file changed since the source was opened, before or while it
            was read, or its bytes cannot be decoded.
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
        # Before and behind: what was read in between is of the file that was opened.
        file.require_unchanged()


def _raise_fault(error: Exception, file: ShardFile, where: str) -> None:
    """Raise what an error in reading says of a file or its store; one of code says nothing of either."""
    if isinstance(error, ValueError) and _SAYS_NO_RANGES in str(error):
        raise no_ranges(file.path, "answers with all of it") from error
    decoding = isinstance(error, OSError | EOFError | UnicodeDecodeError | pa.ArrowException)
    if not decoding and not is_outage(error):
        return
    # Decoders raise OSError itself. The system gives a number, a store's client a class: PermissionError of old keys.
    of_system = isinstance(error, _OF_SYSTEM) or getattr(error, "errno", None)
    if file.remote is not None and (_is_gone(error) or (decoding and not of_system)):
        # What was said of it before would say that it is there, and as it was.
        look_anew(file.remote, file.path)
    file.require_unchanged()
    if of_system or not decoding:
        raise _refusal(f"{where}: cannot be read", error) from error
    remedy = "the file is cut short or corrupt, replace it"
    if _ends_in_zeros(file):
        remedy = (
            f"it ends in zeros, as gzip alone bears: write it anew, gzip -dc {file.path} | gzip"
        )
    if _ASKS_FOR_MEMORY in str(error):
        remedy = (
            "it was written with a window of more than 128 MiB (zstd --long=28 to 31), which each reader would hold: "
            f"write it anew, zstd -dc --long=31 {file.path} | zstd"
        )
    raise IntegrityError(f"{where}: cannot be decoded: {error}; {remedy}") from error


def _refusal(what: str, error: Exception) -> UnavailableError:
    """Return the error of a store that refuses ``what``; keys may be renewed, so each is worth another try."""
    remedy = "get the rights to it, and " if isinstance(error, PermissionError) else ""
    if getattr(error, "errno", None) == errno.EINVAL and "Bad Request" in str(error):
        remedy = "S3 answers so to a look with keys that have expired: renew them, and "
    return UnavailableError(f"{what}: {said(error)}; {remedy}try again")


def _ends_in_zeros(file: ShardFile) -> bool:
    """Whether a file of gzip was filled up behind its end: its check and its length are no more than eight."""
    if not file.path.endswith((".gz", ".tgz")) or file.size_bytes < _FILLED_BYTES:
        return False
    return not any(file.read_range(file.size_bytes - _FILLED_BYTES, file.size_bytes))


def is_outage(error: Exception) -> bool:
    """Whether the system or a client of a store failed; a builtin such as ``KeyError`` is a fault of code."""
    return isinstance(error, OSError) or type(error).__module__ != "builtins"


def is_refusal(error: Exception) -> bool:
    """Whether a client of S3 refuses what it was given, before anything is asked of the store."""
    kinds = type(error).__mro__
    return any(k.__module__.startswith("botocore") and k.__name__ in _REFUSALS for k in kinds)


def said(error: Exception) -> str:
    """Return one line of what a client of a store says, which may be a page."""
    first, _, rest = (unnamed(error) or str(error)).strip().partition("\n")
    if first.endswith(":"):  # a heading alone says nothing
        first = f"{first} {rest.partition(chr(10))[0].strip()}"
    return shortened(first.strip() or type(error).__name__)


def shortened(text: str) -> str:
    """Cut a text off that is too long for a message."""
    return text if len(text) <= 300 else f"{text[:299]}…"


def beside(file: ShardFile, name: str) -> ShardFile:
    """Return a file that another one names, in its folder or under it.

    Args:
        file: The file that names it.
        name: A relative path, as read from there.

    Raises:
        IntegrityError: The name leads elsewhere, or there is no such file.
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
        # S3 over HTTP answers 403 of what is not there to whoever may not list.
        refused = getattr(error, "status", None) == HTTPStatus.FORBIDDEN
        if refused or isinstance(error, FileNotFoundError | ValueError):
            raise IntegrityError(
                f"{file.path}: names {name}, which is not there ({said(error)}); copy the whole folder"
            ) from error
        if not is_outage(error):
            raise
        raise _refusal(f"{path}: cannot be looked at", error) from error


def _is_gone(error: Exception) -> bool:
    """Whether nothing is at a path by now: a link that leads to itself answers no later than it does now."""
    if isinstance(error, FileNotFoundError | NotADirectoryError):
        return True
    return isinstance(error, OSError) and error.errno == errno.ELOOP


def local_file(path: str) -> ShardFile:
    """Look at a local file.

    Raises:
        OSError: It cannot be looked at.
        ValueError: It is no file; the message says what it is.
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
    """Look at what is to be a local file; see ``local_file``."""
    status = os.stat(path)  # noqa: PTH116 -- asked twice for each unit that is read
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
    """Look at a file of a store, or take ``entry`` for what the store says of it.

    Raises:
        ValueError: It is no file; the message says what it is.
        Exception: What the store's client raises.
    """
    entry = noted(store, path, entry_of(store, path) if entry is None else entry)
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
    """Whether what a store says of a path is of a file."""
    return bool(entry["type"] == "file")

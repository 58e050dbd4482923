"""HDFS, S3, GCS and Azure through pyarrow.fs.

Traits of pyarrow that matter here (Arrow C++ 26, ``hdfs.cc``); each is handled below:

- ``get_file_info`` of HDFS answers "not found" for every failure, including outages (S3, GCS and Azure
  raise unless the server itself says so);
- ``move`` of HDFS deletes the target, then renames;
- opening a file on S3 sends the request of ``get_file_info``, and returns its answer, too; every read needs it;
- S3 lists time stamps with more digits than it gives for one object;
- a read on S3 of an object that became shorter since it was opened has the length asked for: the bytes after
  those that the server sent are the previous content of the memory;
- a sequential ``read`` of HDFS is cut to 64 KiB; ``read_at`` asks for the whole range at once, and so
  does the stream of a range (``get_stream``), which can also read into given memory;
- ``flush`` is not durable: nothing is until ``close``;
- ``create_dir`` succeeds on an existing directory.
"""

import errno
import os
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from datetime import datetime
from urllib.parse import parse_qsl, urlsplit

import pyarrow as pa
from pyarrow import fs as pafs
from typing_extensions import override

from fusefs.base.huge_pages import huge_page_buffer
from fusefs.stores.deadlines import GIVE_UP_AFTER_S, Callers
from fusefs.stores.handle_cache import HandleCache, never_changes
from fusefs.stores.protocol import Data, Entry, ObjectWriter, Store, name_of
from fusefs.stores.remote.client import ClientWriter, RootedBackend
from fusefs.stores.remote.error_translation import translated
from fusefs.stores.remote.hadoop import (
    client_version,
    set_jvm_options,
    site_settings,
    with_client_settings,
)
from fusefs.stores.remote.object_store import ObjectStore
from fusefs.stores.remote.rename_store import RenamingStore
from fusefs.stores.remote.request_limits import limited_s3
from omniload.base.errors import ConfigError, UnavailableError
from omniload.base.lru import Lru

__all__ = ["arrow_store"]

_PUTTING = frozenset({"s3", "gcs", "abfs"})
_HADOOP = frozenset({"hdfs", "viewfs"})
_ONE_PUT = "allow_delayed_open"
_MOST_HELD = {"s3": 1024}
"""Most open files kept: on S3 an open file is a key and a length, on HDFS a buffer of Java's."""
_MOST_SEEN = 50_000
_S_NS = 1_000_000_000
_MARK = b"\xa7"
"""Last byte of memory before a read: if it is still there, it may not have been read."""


def arrow_store(url: str, give_up_after_s: float = GIVE_UP_AFTER_S) -> Store:
    """Open ``hdfs://host:port/path``, ``s3://bucket/path`` and other URLs of pyarrow.fs.

    Args:
        url: The store.
        give_up_after_s: Limit of a call, from which the client's own limits are derived.

    Raises:
        ConfigError: pyarrow does not know the scheme, or cannot load its library; no bucket is named.
        UnavailableError: The store does not answer.
    """
    asked = url
    if urlsplit(url).scheme not in _HADOOP and not urlsplit(url).netloc.rpartition("@")[2]:
        raise ConfigError(
            f"store {url!r} names no bucket; write {urlsplit(url).scheme}://BUCKET/PATH"
        )
    if urlsplit(url).scheme in _HADOOP:
        set_jvm_options()
        classpath = os.environ.get("CLASSPATH", "")
        asked = with_client_settings(
            url, site_settings(classpath), client_version(classpath), give_up_after_s
        )
    elif urlsplit(url).scheme == "s3":
        asked = _putting_at_once(url)
    try:
        # Opening HDFS connects, so a name node that hangs would block this like any call.
        filesystem, root = Callers("pyarrow").call(
            "open", url, lambda: pafs.FileSystem.from_uri(asked)
        )
    except (ValueError, NotImplementedError, pa.ArrowInvalid) as error:
        raise ConfigError(f"store {url!r}: {error}") from error
    except OSError as error:
        hint = "; is libhdfs.so in ARROW_LIBHDFS_DIR and CLASSPATH the list of Hadoop's jars?"
        # the missing library is named with each of 40 places
        said, *places = str(error).splitlines()
        tried = f" (in {len(places)} places, among them {places[0]})" if places else ""
        raise UnavailableError(
            f"store {url!r}: {said}{tried}{hint if urlsplit(url).scheme == 'hdfs' else ''}"
        ) from error
    if isinstance(filesystem, pafs.S3FileSystem):
        filesystem = limited_s3(filesystem, give_up_after_s)
    return store_on(filesystem, root, url)


def _putting_at_once(url: str) -> str:
    """Make one request put a file of less than a part (10 MiB), which otherwise takes three for an upload."""
    query = urlsplit(url).query
    if _ONE_PUT in dict(parse_qsl(query, keep_blank_values=True)):
        return url
    return f"{url}{'&' if query else '?'}{_ONE_PUT}=true"


def store_on(filesystem: pafs.FileSystem, root: str, url: str) -> Store:
    """Return the store for a pyarrow filesystem, depending on whether its put replaces atomically."""
    if filesystem.type_name in _PUTTING:
        return ObjectStore(ArrowBackend(filesystem, root, url))
    return RenamingStore(ArrowBackend(filesystem, root, url))


class ArrowBackend(RootedBackend):
    """The calls of a ``pyarrow.fs.FileSystem`` under a root."""

    def __init__(self, filesystem: pafs.FileSystem, root: str, url: str) -> None:
        super().__init__(root, url)
        # Created before the file system, which must be released last.
        self._held = HandleCache[pa.NativeFile](
            lambda path: self._fs.open_input_file(self._at(path)),
            most=_MOST_HELD.get(filesystem.type_name, 256),
            # Arrow's open file on S3 is only a key and a length; on GCS it has a generation, on HDFS blocks.
            any_path=filesystem.type_name == "s3",
        )
        self._seen: Lru[str, None] = Lru(_MOST_SEEN)
        """Paths that were files when they were last listed or found, if an open describes a file completely."""
        self._is_s3 = filesystem.type_name == "s3"
        self._fs = filesystem

    @override
    def find(self, path: str) -> Entry | None:
        if self._is_s3 and (opened := self._found_by_opening(path)) is not None:
            return opened
        with _mapped(path):
            info = self._fs.get_file_info(self._at(path))
            if info.type == pafs.FileType.NotFound:
                return None if self._fs.type_name in _PUTTING else self._find_surely(path)
        return self._entry(path, info)

    def _found_by_opening(self, path: str) -> Entry | None:
        """Open a path that was a file the last time, and keep it: one request describes it and prepares its first read.

        Return None if this would save nothing: the file is open already, or is not known to be a file,
        so that the open may cost an extra request.
        """
        if path not in self._seen or self._held.held(path) is not None:
            return None
        with _mapped(path):
            try:
                file = self._fs.open_input_file(self._at(path))
            except FileNotFoundError:
                self._seen.pop(path)
                return None
            size_bytes, metadata = file.size(), file.metadata()
        # An empty object may stand for a directory.
        if not size_bytes or (changed := metadata.get("Last-Modified")) is None:
            return None
        self._held.put(path, file)
        mtime_ns = int(datetime.fromisoformat(changed.decode()).timestamp()) * _S_NS
        return Entry(name_of(path), False, size_bytes, mtime_ns)

    def _entry(self, path: str, info: pafs.FileInfo) -> Entry:
        is_directory = info.type == pafs.FileType.Directory
        mtime_ns = info.mtime_ns or 0
        if self._is_s3:
            # A listing has a finer time than a look at one object, so the two would seem to be two versions.
            mtime_ns -= mtime_ns % _S_NS
            if not is_directory:
                self._seen.put(path, None)
        return Entry(name_of(info.path), is_directory, info.size or 0, mtime_ns)

    def _find_surely(self, path: str) -> Entry | None:
        """Distinguish "nothing there" from "no answer": a listing reports failures, but ``get_file_info`` does not."""
        try:
            self._fs.get_file_info(pafs.FileSelector(self._at(path), allow_not_found=False))
        except FileNotFoundError:
            return None
        except OSError as error:
            if error.errno in {None, errno.ENOTDIR} and self._fs.type_name != "hdfs":
                return None
            raise
        info = self._fs.get_file_info(self._at(path))
        return None if info.type == pafs.FileType.NotFound else self._entry(path, info)

    @override
    def glimpse(self, path: str) -> Entry | None:
        if self._fs.type_name != "hdfs":
            return self.find(path)
        with _mapped(path):
            info = self._fs.get_file_info(self._at(path))
        return None if info.type == pafs.FileType.NotFound else self._entry(path, info)

    @override
    def is_file(self, path: str) -> bool:
        if self._is_s3:
            # An open asks only for the object, but get_file_info also looks for a prefix.
            with _mapped(path):
                try:
                    self._fs.open_input_file(self._at(path)).close()
                except FileNotFoundError:
                    return False
            return True
        if self._fs.type_name == "hdfs":
            # An empty answer of a listing is proof that nothing is there; for a file, and in an outage, it proves less.
            with suppress(OSError):
                with suppress(FileNotFoundError):
                    self._fs.get_file_info(pafs.FileSelector(self._at(path)))
                return False
        return super().is_file(path)

    @override
    def listing(self, path: str) -> list[Entry]:
        with _mapped(path):
            found = self._fs.get_file_info(pafs.FileSelector(self._at(path)))
        above = f"{path}/" if path else ""
        return [self._entry(f"{above}{info.base_name}", info) for info in found if info.base_name]

    @override
    def read(self, path: str, offset: int, size_bytes: int) -> bytes:
        if self._is_s3:
            buffer = memoryview(bytearray(size_bytes))
            return bytes(self._read(path, size_bytes, lambda file: _filled(file, offset, buffer)))
        return self._read(path, size_bytes, lambda file: _read_fully(file, offset, size_bytes))

    @override
    def read_large(self, path: str, offset: int, size_bytes: int) -> memoryview:
        memory = huge_page_buffer(size_bytes)
        return self._read(path, size_bytes, lambda file: _filled(file, offset, memory))

    def _read(self, path: str, size_bytes: int, read: Callable[[pa.NativeFile], Data]) -> Data:
        held = self._held.held(path)
        if held is not None:
            # A fresh open distinguishes a missing object from a dead data node.
            with suppress(OSError, ValueError, pa.ArrowException):
                data = read(held)
                if len(data) == size_bytes and not self._may_be_short(path, data):
                    return data
            self._held.drop(path)
        with _mapped(path):
            return read(self._held.opened(path))

    def _may_be_short(self, path: str, data: bytes | memoryview) -> bool:
        """Return whether bytes from an open file may be cut short, which the client does not report."""
        return self._is_s3 and data[-1:] == _MARK and not never_changes(path)

    @override
    def open_new(self, path: str) -> ObjectWriter:
        with _mapped(path):
            try:
                stream = self._fs.open_output_stream(self._at(path))
            except FileNotFoundError:
                # HDFS and object stores create parents themselves; others report that there is none.
                self._fs.create_dir(self._at(path).rpartition("/")[0], recursive=True)
                stream = self._fs.open_output_stream(self._at(path))
        return _ArrowWriter(stream, self, path, _mapped)

    @override
    def move(self, source: str, target: str) -> None:
        self._seen.pop(source)
        with _mapped(source):
            self._fs.move(self._at(source), self._at(target))

    @override
    def remove(self, path: str) -> None:
        self._held.drop(path)
        self._seen.pop(path)
        with _mapped(path):
            self._fs.delete_file(self._at(path))

    @override
    def make_directory(self, path: str) -> None:
        with _mapped(path):
            self._fs.create_dir(self._at(path), recursive=True)

    @override
    def remove_directory(self, path: str) -> None:
        with _mapped(path):
            self._fs.delete_dir(self._at(path))

    @override
    def close(self) -> None:
        self._held.clear()


class _ArrowWriter(ClientWriter):
    @override
    def abort(self) -> None:
        # Closing is the only way to end the stream's lease; the file that it leaves is removed, too.
        with suppress(OSError, UnavailableError, ValueError):
            self._stream.close()
        with suppress(OSError, UnavailableError):
            self._backend.remove(self._path)


def _read_fully(file: pa.NativeFile, offset: int, size_bytes: int) -> bytes:
    """Read at a position until ``size_bytes`` or the end, because a positional read may stop early."""
    data: bytes = file.read_at(size_bytes, offset)
    while data and len(data) < size_bytes:
        more = file.read_at(size_bytes - len(data), offset + len(data))
        if not more:
            break
        data += more
    return data


def _filled(file: pa.NativeFile, offset: int, buffer: memoryview) -> memoryview:
    """Read at a position like ``_read_fully``; return the filled part."""
    # S3's client may report bytes as read that it did not read; then the mark is still there.
    buffer[-1:] = _MARK
    # The same open file, but a stream with its own position, because threads read it concurrently.
    stream, size_bytes = file.get_stream(offset, len(buffer)), 0
    while size_bytes < len(buffer) and (more := stream.readinto(buffer[size_bytes:])):
        size_bytes += more
    return buffer[:size_bytes]


def _mapped(path: str) -> AbstractContextManager[None]:
    return translated(path, (pa.ArrowException, ValueError))

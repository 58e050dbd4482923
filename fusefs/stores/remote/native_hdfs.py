"""HDFS without a Java machine, by the Rust client of the package ``hdfs-native``.

Compared with libhdfs (``fusefs.stores.remote.arrow``) it starts at once and takes a third of the memory, and two
things are simpler: a rename replaces a file atomically, and "not there" is distinct from "no answer".
Hadoop's own files in ``HADOOP_CONF_DIR`` define addresses, name services and Kerberos.

One thing is missing. A write fails if its next block is placed on a dead data node that is not yet known to be
dead (EIO; no half-written file shows). Java's client asks for another node. So this is the store for readers.
"""

import errno
import io
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit

from typing_extensions import override

from fusefs.stores.handle_cache import HandleCache
from fusefs.stores.protocol import Entry, ObjectWriter, Store, name_of
from fusefs.stores.remote.client import ClientWriter, ReplacingBackend, RootedBackend
from fusefs.stores.remote.error_translation import translated
from fusefs.stores.remote.hadoop import site_settings
from fusefs.stores.remote.rename_store import ReplacingStore
from omniload.base.concurrency.forks import never_ended_by_a_fork
from omniload.base.errors import ConfigError, UnavailableError
from omniload.base.extras import missing_extra
from omniload.base.units import decimal_of

__all__ = ["native_hdfs_store"]

IMPATIENCE = {
    # With the client's default of fifteen attempts a call waits for minutes; the mount itself retries.
    "dfs.client.failover.max.attempts": "3",
    "dfs.client.failover.sleep.max.millis": "1000",
}
_REPLICATION = ("replication", "dfs.replication")
_REFUSALS = {
    "AccessControlException": errno.EACCES,
    "DSQuotaExceededException": errno.EDQUOT,
    "FSLimitException$PathComponentTooLongException": errno.ENAMETOOLONG,
    "InvalidPathException": errno.EINVAL,
    "NSQuotaExceededException": errno.EDQUOT,
    "ParentNotDirectoryException": errno.ENOTDIR,
    "QuotaByStorageTypeExceededException": errno.EDQUOT,
}
"""Java's errors for which the client has no own class, and which a retry would not change."""
_OF_JAVA = re.compile(r'RPCError\("(?:\w+\.)*([\w$]+)", "(.*?)(?:\\n|"\)$)')
"""Name and first line of an error; a page of Java's stack follows."""


def native_hdfs_store(url: str) -> Store:
    """Open ``hdfs+native://HOST:PORT/PATH``, or a name service in place of host and port.

    The query holds settings of Hadoop, and ``replication``, the number of copies of a block.

    Raises:
        ConfigError: The package is not installed, or the URL asks for something that it cannot do.
    """
    try:
        import hdfs_native  # noqa: PLC0415 -- an extra
    except ModuleNotFoundError as error:
        raise missing_extra(f"store {url!r}", error) from error
    parts = urlsplit(url)
    if parts.username:
        raise ConfigError(
            f"store {url!r} names the user {parts.username!r}; set HADOOP_USER_NAME instead"
        )
    settings = dict(parse_qsl(parts.query, keep_blank_values=True))
    copies = _copies([settings.pop(name, "") for name in _REPLICATION], url)
    site = site_settings(":".join(_folders_of_the_site()))
    settings = {
        k: v for k, v in IMPATIENCE.items() if site is not None and k not in site
    } | settings
    try:
        client = hdfs_native.Client(f"hdfs://{parts.netloc}", settings)
    except (OSError, RuntimeError, ValueError) as error:
        raise ConfigError(
            f"store {url!r}: {error}; give HOST:PORT, or a name service of the files in HADOOP_CONF_DIR"
        ) from error
    options = hdfs_native.WriteOptions(replication=copies, create_parent=True)
    # Read the URL as Java's client does, so that it means the same folder to both.
    root = "/".join(filter(None, unquote(parts.path).split("/")))
    return ReplacingStore(_NativeBackend(client, options, root, url))


def _folders_of_the_site() -> list[str]:
    """Return the folders in which the client looks for the site's files."""
    home = os.environ.get("HADOOP_HOME")
    folder = os.environ.get("HADOOP_CONF_DIR") or (f"{home}/etc/hadoop" if home else None)
    return [folder] if folder else []


def _copies(given: list[str], url: str) -> int | None:
    """Return the number of copies of a block that a URL asks for; None leaves it to the site."""
    for text in filter(None, given):
        if (copies := decimal_of(text)) is None:
            raise ConfigError(
                f"store {url!r}: replication={text}; a number of copies, 0 for the site's"
            )
        return copies or None
    return None


class _NativeBackend(RootedBackend, ReplacingBackend):
    """The calls of an ``hdfs_native.Client`` under a root."""

    def __init__(self, client: Any, options: Any, root: str, url: str) -> None:  # noqa: ANN401 -- an extra
        super().__init__(f"/{root}", url)
        self._client = client
        never_ended_by_a_fork(self)
        self._options = options
        # A reader knows the blocks of the file that it was opened on, even if the path is replaced later.
        self._held = HandleCache[Any](lambda path: self._client.read(self._at(path)))

    @override
    def find(self, path: str) -> Entry | None:
        with _translated(path):
            try:
                return _entry(self._client.get_file_info(self._at(path)))
            except FileNotFoundError:
                return None

    @override
    def listing(self, path: str) -> list[Entry]:
        with _translated(path):
            return [_entry(status) for status in self._client.list_status(self._at(path))]

    @override
    def read(self, path: str, offset: int, size_bytes: int) -> bytes:
        with _translated(path):
            file = self._held.held(path) or self._held.opened(path)
            size_bytes = min(size_bytes, len(file) - offset)
            try:
                return bytes(file.read_range(offset, size_bytes)) if size_bytes > 0 else b""
            except Exception:
                # The file may have moved to other data nodes since it was opened.
                self._held.drop(path)
                raise

    @override
    def open_new(self, path: str) -> ObjectWriter:
        with _translated(path):
            file = self._client.create(self._at(path), self._options)
        # Close it for Python: otherwise its collection would close it, and half a file would become whole.
        io.RawIOBase.close(file)
        return _NativeWriter(file, self, path, _translated)

    @override
    def move(self, source: str, target: str) -> None:
        with _translated(source):
            self._client.rename(self._at(source), self._at(target), overwrite=False)

    @override
    def replace(self, source: str, target: str) -> None:
        with _translated(source):
            self._client.rename(self._at(source), self._at(target), overwrite=True)

    @override
    def remove(self, path: str) -> None:
        self._held.drop(path)
        self._delete(path)

    @override
    def make_directory(self, path: str) -> None:
        with _translated(path):
            self._client.mkdirs(self._at(path), create_parent=True)

    @override
    def remove_directory(self, path: str) -> None:
        self._delete(path)

    def _delete(self, path: str) -> None:
        with _translated(path):
            if not self._client.delete(self._at(path), recursive=False):
                raise FileNotFoundError(errno.ENOENT, "nothing there", path)

    @override
    def close(self) -> None:
        self._held.clear()


class _NativeWriter(ClientWriter):
    @override
    def abort(self) -> None:
        # Remove the file under the writer, whose lease ends with it; closing could make half a file whole.
        with suppress(OSError, UnavailableError):
            self._backend.remove(self._path)


@contextmanager
def _translated(path: str) -> Iterator[None]:
    """Translate errors like ``translated``; a refusal of HDFS is not an outage."""
    try:
        with translated(path):
            yield
    except UnavailableError as error:
        if isinstance(error.__cause__, UnicodeEncodeError):
            raise OSError(errno.EINVAL, "HDFS takes names of UTF-8 alone", path) from error
        if (refusal := _OF_JAVA.search(str(error.__cause__))) is None:
            raise
        if (number := _REFUSALS.get(refusal[1])) is not None:
            raise OSError(number, f"HDFS refuses: {refusal[2]}", path) from error
        raise UnavailableError(f"{path!r}: HDFS answers: {refusal[1]}: {refusal[2]}") from error


def _entry(status: Any) -> Entry:  # noqa: ANN401 -- an extra
    size = 0 if status.isdir else status.length
    return Entry(name_of(status.path), status.isdir, size, status.modification_time * 1_000_000)

"""Stores through fsspec: hdfs-native, WebHDFS, sftp, object stores, its memory file system."""

from collections.abc import Mapping
from contextlib import suppress
from datetime import datetime
from typing import Any
from urllib.parse import urlsplit

import fsspec
from fsspec.core import url_to_fs
from fsspec.implementations.cached import CachingFileSystem
from fsspec.implementations.local import LocalFileSystem
from typing_extensions import override

from fusefs.stores.deadlines import GIVE_UP_AFTER_S, Callers
from fusefs.stores.protocol import Entry, ObjectWriter, Store, name_of
from fusefs.stores.remote.client import ClientWriter, RootedBackend
from fusefs.stores.remote.error_translation import translated
from fusefs.stores.remote.object_store import ObjectStore
from fusefs.stores.remote.rename_store import RenamingStore
from fusefs.stores.remote.request_limits import limit_webhdfs, limits_of
from omniload.base.errors import ConfigError, UnavailableError
from omniload.base.extras import missing_client

__all__ = ["fsspec_store"]

_PUTTING = frozenset({"s3", "s3a", "gs", "gcs", "abfs", "az", "memory", "oci", "oss"})


def fsspec_store(
    url: str,
    options: Mapping[str, Any] | None = None,
    give_up_after_s: float = GIVE_UP_AFTER_S,
) -> Store:
    """Open a URL with fsspec; a put replaces atomically if the protocol is that of an object store.

    Args:
        url: The store.
        options: Options for the client.
        give_up_after_s: Limit of a call, from which the client's own limits are derived.

    Raises:
        ConfigError: No installed package opens the URL.
        UnavailableError: The store does not answer, if its client connects at once (as sftp does).
    """
    given = {**limits_of(urlsplit(url).scheme, give_up_after_s), **(options or {})}
    filesystem, root = Callers("fsspec").call("open", url, lambda: _client_of(url, given))
    _refuse_wrapped(filesystem, url)
    # Set it here, because not every client passes the option on, and a cached listing would hide changes.
    filesystem.dircache.use_listings_cache = False
    protocol = filesystem.protocol
    names = {protocol} if isinstance(protocol, str) else set(protocol)
    if "webhdfs" in names:
        _refuse_error_pages(filesystem)
        limit_webhdfs(filesystem, give_up_after_s)
    backend = FsspecBackend(filesystem, root, url)
    return ObjectStore(backend) if names & _PUTTING else RenamingStore(backend)


def _client_of(url: str, given: Mapping[str, Any]) -> tuple[fsspec.AbstractFileSystem, str]:
    with translated(url):
        try:
            client: tuple[fsspec.AbstractFileSystem, str]
            client = url_to_fs(url, skip_instance_cache=True, **given)
        except ImportError as error:
            raise ConfigError(f"store {url!r}: {missing_client(error)}") from error
        except (ValueError, TypeError) as error:
            raise ConfigError(
                f"store {url!r}: {error}; install the package that opens it"
            ) from error
    return client


def _refuse_wrapped(filesystem: fsspec.AbstractFileSystem, url: str) -> None:
    """Refuse a chain of clients that leads to a directory of this machine, or that caches reads.

    Raises:
        ConfigError: The client is such a chain.
    """
    client: Any = filesystem
    while isinstance(client, fsspec.AbstractFileSystem):
        if isinstance(client, LocalFileSystem):
            raise ConfigError(
                f"store {url!r} is a directory of this machine, whose links this client would follow; give its path"
            )
        if isinstance(client, CachingFileSystem):
            raise ConfigError(
                f"store {url!r} goes through {type(client).__name__}, which would show what was there before; "
                "give the store itself, and disk_cache to a mount"
            )
        # Look at every layer, because each layer of a chain may be one that is refused.
        client = getattr(client, "fs", None) or getattr(client, "sync_fs", None)


class FsspecBackend(RootedBackend):
    """The calls of an ``fsspec.AbstractFileSystem`` under a root."""

    def __init__(self, filesystem: fsspec.AbstractFileSystem, root: str, url: str) -> None:
        super().__init__(root, url)
        self._fs = filesystem

    @override
    def find(self, path: str) -> Entry | None:
        with translated(path):
            try:
                return _entry(self._fs.info(self._at(path)))
            except (FileNotFoundError, NotADirectoryError) as error:
                if _is_outage(error.__cause__):
                    raise UnavailableError(
                        f"{path!r}: the store answers: {error.__cause__}"
                    ) from error
                # An object store has no entry for a root with nothing below it.
                return None if path else Entry("", True, 0, 0)

    @override
    def listing(self, path: str) -> list[Entry]:
        with translated(path):
            try:
                found = self._fs.ls(self._at(path), detail=True)
            except FileNotFoundError:
                if path:
                    raise
                found = []
        root = self._at(path).strip("/")
        entries = [item for item in found if item["name"].strip("/") != root]
        # Some clients list links (sftp), whose targets are not part of this store.
        return [_entry(item) for item in entries if item["type"] != "link"]

    @override
    def read(self, path: str, offset: int, size_bytes: int) -> bytes:
        with translated(path):
            data = self._fs.cat_file(self._at(path), start=offset, end=offset + size_bytes)
        return bytes(data)

    @override
    def open_new(self, path: str) -> ObjectWriter:
        with translated(path):
            # sftp does not create folders by itself; an object store has none to create.
            self._fs.makedirs(self._at(path).rpartition("/")[0], exist_ok=True)
            return _FsspecWriter(self._fs.open(self._at(path), "wb"), self, path, translated)

    @override
    def move(self, source: str, target: str) -> None:
        with translated(source):
            self._fs.mv(self._at(source), self._at(target), recursive=True)

    @override
    def remove(self, path: str) -> None:
        with translated(path):
            self._fs.rm_file(self._at(path))

    @override
    def make_directory(self, path: str) -> None:
        with translated(path):
            self._fs.makedirs(self._at(path), exist_ok=True)

    @override
    def remove_directory(self, path: str) -> None:
        with translated(path):
            if type(self._fs).rmdir is fsspec.AbstractFileSystem.rmdir:
                # fsspec's own rmdir does nothing; clients without one (WebHDFS) remove both kinds with rm.
                self._fs.rm(self._at(path), recursive=False)
            else:
                self._fs.rmdir(self._at(path))

    @override
    def close(self) -> None:
        pass


class _FsspecWriter(ClientWriter):
    @override
    def abort(self) -> None:
        # Ignore every error of the client, because the stream was given up already.
        with suppress(Exception):
            getattr(self._stream, "discard", self._stream.close)()
        with suppress(Exception):
            self._stream.close()
        with suppress(Exception):
            self._backend.remove(self._path)


def _is_outage(cause: BaseException | None) -> bool:
    """Return whether a client says "not found" because its server did not answer, as fsspec's HTTP client does."""
    return isinstance(cause, OSError) and not isinstance(
        cause, FileNotFoundError | NotADirectoryError
    )


def _entry(item: Mapping[str, Any]) -> Entry:
    is_directory = item["type"] == "directory"
    size = 0 if is_directory else int(item.get("size") or 0)
    name = name_of(item["name"].rstrip("/"))
    tag = item.get("ETag") or item.get("etag") or item.get("generation")
    version = str(tag) if tag and not is_directory else None
    return Entry(name, is_directory, size, _mtime_ns(item), version=version)


def _mtime_ns(item: Mapping[str, Any]) -> int:
    for key in ("mtime", "LastModified", "last_modified", "modified", "created"):
        value = item.get(key)
        if isinstance(value, datetime):
            return int(value.timestamp() * 1e9)
        if isinstance(value, int | float):
            # HDFS clients count milliseconds, POSIX clients seconds.
            return int(value * (1e6 if value > 1e11 else 1e9))
    millis = item.get("modificationTime", item.get("modification_time"))
    return int(millis) * 1_000_000 if millis else 0


def _refuse_error_pages(webhdfs: fsspec.AbstractFileSystem) -> None:
    """Raise a data node's error, because fsspec's WebHDFS client returns its JSON as bytes of the file."""

    def check(response: Any, *_: Any, **__: Any) -> None:  # noqa: ANN401 -- requests is optional
        if "op=open" in response.url.lower() and response.status_code >= 400:
            response.raise_for_status()

    webhdfs.session.hooks["response"].append(check)

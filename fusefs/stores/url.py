"""Stores from URLs."""

import os
from collections.abc import Mapping
from contextlib import suppress
from typing import Any
from urllib.parse import SplitResult, unquote_to_bytes, urlsplit

from fusefs.stores.deadlines import GIVE_UP_AFTER_S, within
from fusefs.stores.local.store import LocalStore
from fusefs.stores.protocol import Store
from omniload.base.errors import ConfigError
from omniload.base.secrets import note_secrets_of

__all__ = ["check_root", "local_path", "open_store", "parts_of"]

_ARROW = frozenset({"hdfs", "viewfs", "s3", "gs", "gcs", "abfs", "abfss"})

_LOCAL = frozenset({"file", "local", "fsspec+file", "fsspec+local"})

_BUCKETS = frozenset({"s3", "gs", "gcs"})
"""Schemes whose directories exist as soon as something lies below them."""


def parts_of(url: str) -> SplitResult:
    """Return the parts of a URL.

    Raises:
        ConfigError: It is not a URL.
    """
    try:
        return urlsplit(url)
    except ValueError as error:
        raise ConfigError(f"store {url!r} is no URL: {error}") from error


def local_path(url: str) -> str | None:
    """Return the path of the directory of this machine that a URL names; None if it names another store.

    A text that is no URL is a path, even with colons in it.

    Raises:
        ConfigError: It is a malformed URL, or names no directory.
    """
    parts = parts_of(url)
    if parts.scheme in _LOCAL:
        # Always use LocalStore, because fsspec's client of a directory would follow links out of it.
        if parts.netloc not in {"", "localhost"}:
            raise ConfigError(f"store {url!r} names no path; write file:///PATH, or the path alone")
        # Decode as bytes, because a path on Linux need not be UTF-8.
        path = os.fsdecode(unquote_to_bytes(os.fsencode(parts.path)))
    elif "://" in url or "::" in url or parts.scheme in {*_ARROW, "mem"}:
        return None
    else:
        path = url
    if not path:
        raise ConfigError(f"store {url!r} names nothing; give a directory or a URL")
    return path


def open_store(
    url: str,
    options: Mapping[str, Any] | None = None,
    *,
    give_up_after_s: float = GIVE_UP_AFTER_S,
) -> Store:
    """Open the store at ``url``.

    Args:
        url: A path or ``file://`` for a directory; ``mem:`` for memory; ``hdfs``, ``s3``, ``gs``,
            ``abfs`` for pyarrow; ``hdfs+native`` for HDFS without Java; ``fsspec+SCHEME://...``
            or any other scheme for fsspec.
        options: Passed to fsspec.
        give_up_after_s: Limit of opening, and of every later call. The time limit of a client for one
            request is derived from it, if the client has one and the user set none.

    Raises:
        ConfigError: The URL names nothing that can be opened.
        UnavailableError: The store does not answer.
    """
    note_secrets_of(url, options)
    # Allow more time, because a Java machine takes some seconds to start, however quickly the store answers.
    with within(max(give_up_after_s, GIVE_UP_AFTER_S)):
        return _opened(url, options, give_up_after_s)


def _opened(url: str, options: Mapping[str, Any] | None, give_up_after_s: float) -> Store:
    # Import lazily, because loading pyarrow takes longer than many commands on a directory run.
    if (path := local_path(url)) is not None:
        return LocalStore(path)
    parts = parts_of(url)
    if parts.scheme == "mem":
        from fusefs.stores.memory import MemoryStore  # noqa: PLC0415

        return MemoryStore()
    if parts.scheme in _ARROW and not options:
        from fusefs.stores.remote.arrow import arrow_store  # noqa: PLC0415

        return arrow_store(url, give_up_after_s)
    if parts.scheme == "hdfs+native":
        from fusefs.stores.remote.native_hdfs import native_hdfs_store  # noqa: PLC0415

        return native_hdfs_store(url)
    from fusefs.stores.remote.fsspec_store import fsspec_store  # noqa: PLC0415

    return fsspec_store(url.removeprefix("fsspec+"), options, give_up_after_s)


def check_root(store: Store, *, begin: bool = False) -> None:
    """Ask a store once for the directory that it was opened at.

    Args:
        store: The store.
        begin: Make a prefix without any objects, in an existing bucket. A user cannot make
            one in advance except by writing.

    Raises:
        ConfigError: Nothing is there, or a file is.
        UnavailableError: The store does not answer.
    """
    try:
        found = store.stat("")
    except FileNotFoundError as error:
        if urlsplit(store.location).scheme not in _BUCKETS:
            raise ConfigError(
                f"store {store.location!r} is not there; make the directory"
            ) from error
        _check_bucket(store.location)
        if not begin:
            raise ConfigError(
                f"store {store.location!r} holds nothing yet; its first mount begins it"
            ) from error
        with suppress(FileExistsError):  # another caller was faster
            store.make_directory("")
        return
    if not found.is_directory:
        raise ConfigError(f"store {store.location!r} is a file; name a directory")


def _check_bucket(location: str) -> None:
    """Check that the bucket exists: without it, making a prefix would look like an outage."""
    # Open another client, because the present one cannot ask above its root.
    bucket = open_store(urlsplit(location)._replace(path="").geturl())
    try:
        with within(GIVE_UP_AFTER_S):
            bucket.stat("")
    except FileNotFoundError as error:
        name = urlsplit(location).netloc.rpartition("@")[2]
        raise ConfigError(
            f"store {location!r}: there is no bucket {name!r}; make it, or name another"
        ) from error
    finally:
        bucket.close()

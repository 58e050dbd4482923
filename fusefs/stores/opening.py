"""From a URL to a store."""

from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

from fusefs.stores.local import LocalStore
from fusefs.stores.protocol import Store
from omniload.base.errors import ConfigError

__all__ = ["check_root", "open_store"]

_ARROW = frozenset({"hdfs", "viewfs", "s3", "gs", "gcs", "abfs", "abfss"})


def open_store(url: str, options: Mapping[str, Any] | None = None) -> Store:
    """Open the store at ``url``.

    Args:
        url: A path or ``file://`` for a directory; ``mem:`` for memory; ``hdfs``, ``s3``, ``gs``,
            ``abfs`` for pyarrow; ``hdfs+native`` for HDFS without Java; ``fsspec+SCHEME://...``
            or any other scheme for fsspec.
        options: Handed to fsspec.

    Raises:
        ConfigError: The URL names nothing that can be opened.
        UnavailableError: The store does not answer.
    """
    # Imported here: pyarrow takes longer to load than many a command on a directory runs.
    parts = urlsplit(url)
    if parts.scheme in {"", "file"}:
        return LocalStore(parts.path if parts.scheme else url)
    if parts.scheme == "mem":
        from fusefs.stores.memory import MemoryStore  # noqa: PLC0415

        return MemoryStore()
    if parts.scheme in _ARROW and not options:
        from fusefs.stores.arrow import arrow_store  # noqa: PLC0415

        return arrow_store(url)
    if parts.scheme == "hdfs+native":
        from fusefs.stores.native_hdfs import native_hdfs_store  # noqa: PLC0415

        return native_hdfs_store(url)
    from fusefs.stores.fsspec_store import fsspec_store  # noqa: PLC0415

    return fsspec_store(url.removeprefix("fsspec+"), options)


def check_root(store: Store) -> None:
    """Ask a store once for the directory that it was opened at.

    Raises:
        ConfigError: Nothing is there, or a file is.
        UnavailableError: The store does not answer.
    """
    try:
        found = store.stat("")
    except FileNotFoundError as error:
        raise ConfigError(f"store {store.location!r} is not there; make the directory") from error
    if not found.is_directory:
        raise ConfigError(f"store {store.location!r} is a file; name a directory")

"""Place of a striped checkpoint: URL, folder, index. Free of torch."""

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from fusefs.stores.protocol import checked_path
from omniload.base.errors import ConfigError, IntegrityError, StateError
from trainer_integration.checkpoint.striped.index import INDEX, MAX_INDEX_BYTES, Index

if TYPE_CHECKING:
    from fusefs.tree.namespace import StripedFiles

__all__ = ["is_path", "location_of", "open_striped", "read_index", "within"]


def open_striped(url: str, config: Mapping[str, Any] | None = None) -> tuple["StripedFiles", str]:
    """Open the place of a checkpoint.

    Args:
        url: ``omnifs://FOLDER::STORE``: a folder in the striped namespace of a store. Mount the same STORE to see it.
            The URL of a store alone stands for its root.
        config: Fields of ``FilesConfig``: striping, streams, windows.

    Returns:
        The namespace, shared by all callers that open the same store in this process, and the folder.

    Raises:
        ConfigError: The URL cannot be opened.
        UnavailableError: The store does not answer.
    """
    folder, chained, store = url.removeprefix("omnifs://").partition("::")
    if not url.startswith("omnifs://"):
        folder, store = "", url
    elif not chained:
        raise ConfigError(f"{url!r} names no store; give omnifs://FOLDER::STORE")
    # All of these imports are for a striped file system, which users with checkpoints in a folder do not need.
    from fusefs.fsspec_filesystem import OmniFileSystem  # noqa: PLC0415

    # One namespace per store and settings in a process, because fsspec keeps it.
    return OmniFileSystem(store, config=config).files, checked_path(folder)


def read_index(files: "StripedFiles", folder: str) -> Index:
    """Read the index of a checkpoint.

    Raises:
        IntegrityError: The index is not what was saved.
        StateError: There is no checkpoint, or another release wrote it.
    """
    location = location_of(files, folder)
    try:
        with files.open(within(folder, INDEX)) as file:
            size_bytes = file.reader.size_bytes
            # The size is known from the manifest, before any byte is read.
            is_index = size_bytes <= MAX_INDEX_BYTES
            data = bytes(file.reader.read(0, size_bytes)) if is_index else b""
    except FileNotFoundError as error:
        raise StateError(
            f"{location} holds no {INDEX}: nothing was saved there, or the save was interrupted; "
            "load another checkpoint"
        ) from error
    except IntegrityError as error:
        raise IntegrityError(f"{location}: {INDEX}: {error}") from error
    if not is_index:
        raise IntegrityError(
            f"{location}/{INDEX} has {size_bytes} bytes, more than {MAX_INDEX_BYTES}; "
            "load another checkpoint"
        )
    return Index.decoded(data, name=f"{location}/{INDEX}")


def within(folder: str, name: str) -> str:
    """Return the path of a file in a folder; the root is the empty path."""
    return f"{folder}/{name}" if folder else name


def location_of(files: "StripedFiles", folder: str) -> str:
    """Return a checkpoint's place for messages."""
    return within(files.store.location.rstrip("/"), folder) if folder else files.store.location


def is_path(checkpoint_id: str | os.PathLike[str]) -> bool:
    """Return whether a checkpoint's id is a path within a namespace."""
    try:
        checked_path(os.fspath(checkpoint_id))
    except ValueError:
        return False
    return True

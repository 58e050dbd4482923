"""Snapshots on the store at a URL."""

import os
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING

from omniload.base.errors import ConfigError

if TYPE_CHECKING:
    from snapshot.env.store.repository import Repository

__all__ = ["StoreMissingError", "opened"]


class StoreMissingError(ConfigError):
    """The folder of a store does not exist: nobody made it, or its file system is not mounted."""


@contextmanager
def opened(url: str) -> "Iterator[Repository]":
    """Open the snapshots of the store at ``url``; calls are retried during outages.

    Raises:
        ConfigError: The URL names nothing that can be opened.
        StoreMissingError: It names a folder that does not exist.
        UnavailableError: The store does not answer.
    """
    # Import lazily, because clients of stores take longer to load than a whole warm restore takes.
    from fusefs.stores.retry import RetryingStore  # noqa: PLC0415
    from fusefs.stores.url import local_path, open_store  # noqa: PLC0415
    from snapshot.env.store.repository import Repository  # noqa: PLC0415

    # Not ``exists``: for a folder behind a closed or broken one, the store itself says why.
    if (folder := local_path(url)) is not None and not os.path.lexists(folder):
        raise StoreMissingError(
            f"store {url!r} is not there; make the folder, or mount what it lies on"
        )
    with _standard_output_kept():
        opening = open_store(url)
    with closing(RetryingStore(opening)) as store:
        yield Repository(store)


@contextmanager
def _standard_output_kept() -> Iterator[None]:
    """Send the output of a client during its loading to standard error: standard output is for a key or JSON."""
    sys.stdout.flush()
    kept = os.dup(1)
    try:
        # Redirect the descriptor itself, because a Java machine logs there without Python.
        os.dup2(2, 1)
        yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)

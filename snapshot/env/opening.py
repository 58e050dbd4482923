"""From the URL of a store to the snapshots on it."""

import os
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from snapshot.env.repository import Repository

__all__ = ["opened"]


@contextmanager
def opened(url: str) -> "Iterator[Repository]":
    """Open the snapshots of the store at ``url``; outages are retried.

    Raises:
        ConfigError: The URL names nothing that can be opened.
        UnavailableError: The store does not answer.
    """
    # Imported here: clients of stores take longer to load than a warm restore takes altogether.
    from fusefs.stores.opening import open_store  # noqa: PLC0415
    from fusefs.stores.retrying import RetryingStore  # noqa: PLC0415
    from snapshot.env.repository import Repository  # noqa: PLC0415

    with _standard_output_kept():
        opening = open_store(url)
    with closing(RetryingStore(opening)) as store:
        yield Repository(store)


@contextmanager
def _standard_output_kept() -> Iterator[None]:
    """Send to standard error what a client writes while it is loaded: standard output is for a key or JSON.

    A Java machine logs there, past Python, so the descriptor itself is turned.
    """
    sys.stdout.flush()
    kept = os.dup(1)
    try:
        os.dup2(2, 1)
        yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)

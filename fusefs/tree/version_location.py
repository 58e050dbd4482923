"""The place of an open version, and whether it is still there: a store reads whatever is at a path."""

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from fusefs.stores.protocol import Entry, Store
from omniload.base.errors import OmniloadError

__all__ = ["Place", "stale_suppressed", "stale_version"]


class Place:
    """The path of an open version, followed through renames of this process. Safe in threads.

    Args:
        store: The store.
        path: Path at which the version was opened.
        entry: The store's entry of a plain version, which is read by its path;
            None for a version that is not read by its path.
    """

    def __init__(self, store: Store, path: str, entry: Entry | None = None) -> None:
        self._store = store
        self.path = path
        self.entry = entry

    def moved(self, path: str, *, was_there: bool) -> Entry | None:
        """Note that this process renamed the file; return the store's present entry, if it differs from before.

        Some stores rename by copying, which gives the copy a time stamp of its own.

        Args:
            path: Present path.
            was_there: Whether the version was found at its path just before.
        """
        if path == self.path:
            return None
        self.path = path
        if self.entry is None or not was_there:
            return None
        try:
            found = self._store.stat(path)
        except (OSError, OmniloadError):
            return None  # gone or unreachable: its next read reports it
        # This is not the renamed version: another mount replaced it in between.
        if found.is_directory or found.size_bytes != self.entry.size_bytes:
            return None
        self.entry = found
        return found

    def check(self) -> None:
        """Check that bytes just read at the path are of this version.

        They are, if the looks before and after the read found the same entry.

        Raises:
            OSError: ``ESTALE``: another version is there, or none.
            UnavailableError: The store does not answer.
        """
        if self.entry is None:
            return
        try:
            found = self._store.stat(self.path)
        except (FileNotFoundError, NotADirectoryError) as error:
            raise stale_version(self.path) from error
        # Ignore name and mode, which do not depend on the bytes.
        if replace(found, name=self.entry.name, mode=self.entry.mode) != self.entry:
            raise stale_version(self.path)

    def is_gone(self) -> bool:
        """Return whether the version is no longer at the path where it is read."""
        is_there = False
        with stale_suppressed():
            self.check()
            is_there = True
        return not is_there


@contextmanager
def stale_suppressed() -> Iterator[None]:
    """Continue if a version turns out to be gone."""
    try:
        yield
    except OSError as error:
        if error.errno != errno.ESTALE:
            raise


def stale_version(path: str) -> OSError:
    """Return the error for an open version that is no longer there."""
    return OSError(errno.ESTALE, "the version that was opened is gone; open the file again", path)

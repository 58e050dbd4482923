"""Durability of names and small files of a local store, if it may come after the call that made them.

A local disk does not make a file durable when it is closed. If a mount did so at each close, it
would unpack an archive at the speed of its flushes. So a store may leave durability to fsync, and to one
``syncfs`` for everything that was written within two seconds.
"""

import os
import threading
from collections.abc import Callable

from fusefs.stores.local.beneath import Beneath
from fusefs.stores.protocol import parent_of
from omniload.base.errors import IntegrityError
from omniload.base.linux.calls import syncfs
from omniload.base.log import get_logger

__all__ = ["SETTLES_WITHIN_S", "Settling", "sync_all", "sync_directory"]

_LOG = get_logger(__name__)
SETTLES_WITHIN_S = 2.0


class Settling:
    """The changes of one store that a power failure might still undo. Safe in threads.

    Args:
        sync_all: Makes all changes durable that were made before the call.
        within_s: Most seconds from the first change to the call.
    """

    def __init__(self, sync_all: Callable[[], None], within_s: float | None = None) -> None:
        self._sync_all = sync_all
        self._within_s = SETTLES_WITHIN_S if within_s is None else within_s
        self._lock = threading.Lock()
        self._syncing = threading.Lock()
        """Lock held while ``sync_all`` runs, so that another sync of the same data waits for it."""
        self._waiting: threading.Timer | None = None
        self._names_in: set[str] = set()
        """Directories that hold names of directories which are not durable yet."""
        self._names_on_their_way: set[str] = set()
        self._knows_all = False
        """Whether all pending names are known: after the first full sync, as an earlier process may have left some."""
        self._failed: OSError | None = None
        self._closed = False

    def changed(self) -> None:
        """Note a change that is not durable."""
        with self._lock:
            if self._waiting is not None or self._closed:
                return
            # One sync for all changes, which later changes do not delay, because two seconds are a promise.
            timer = threading.Timer(self._within_s, self._settle_in_time)
            timer.name, timer.daemon = "fusefs-settle", True
            try:
                timer.start()
            except RuntimeError as error:
                _LOG.warning("no thread is left to wait in (%s): made durable now", error)
            else:
                self._waiting = timer
                return
        # Sync now: if a timer that never started stayed registered, no later one would start.
        self._settle_in_time()

    def directory_named(self, path: str) -> None:
        """Note that a directory was made, or got this name."""
        with self._lock:
            self._names_in.add(parent_of(path))
        self.changed()

    def is_reached(self, path: str) -> bool:
        """Return whether the names of all directories above a path are durable."""
        with self._lock:
            loose = self._names_in | self._names_on_their_way
            knows_all = self._knows_all
        above = parent_of(path)
        # A folder's name is in the folder above it: all must be durable, or the file could not be found.
        while above and knows_all and parent_of(above) not in loose:
            above = parent_of(above)
        return knows_all and not above

    def settle(self) -> None:
        """Make everything durable.

        Raises:
            IntegrityError: Same as for ``carry_out``.
        """
        with self._syncing:
            with self._lock:
                if self._waiting is not None:
                    self._waiting.cancel()
                    self._waiting = None
                # Move the names before the sync, which may not cover names that are added during it.
                self._names_on_their_way, self._names_in = self._names_in, set()
            self.carry_out(self._sync_all)
            with self._lock:
                self._names_on_their_way = set()
                self._knows_all = True

    def carry_out(self, sync: Callable[[], None]) -> None:
        """Run a sync.

        Raises:
            IntegrityError: The sync failed, or an earlier one of this store did: after a failed write, a
                kernel forgets the data, and reports the next attempt as a success.
        """
        if self._failed is None:
            try:
                sync()
            except OSError as error:
                self._failed = error
        if self._failed is not None:
            raise IntegrityError(
                f"what was closed lately could not be written to the disk ({self._failed}) and may be "
                "lost; fsync fails from now on: write it again, and mount anew once the disk is sound"
            )

    def close(self) -> None:
        """Make pending changes durable, and log those that cannot be."""
        with self._lock:
            self._closed = True
            is_due = self._waiting is not None
        if is_due:
            self._settle_in_time()
        with self._syncing:
            # wait for a sync of the timer, whose thread would end with the process, and its error be lost
            pass

    def _settle_in_time(self) -> None:
        try:
            self.settle()
        except IntegrityError as error:
            _LOG.error("%s", error)


def sync_directory(at: Beneath, path: str) -> None:
    """Make names in a directory durable: a rename is durable only when its directory is."""
    directory = at.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def sync_all(at: Beneath) -> None:
    """Make all of the store's file system durable."""
    root = at.open("", os.O_RDONLY | os.O_DIRECTORY)
    try:
        syncfs(root)
    finally:
        os.close(root)

"""A store in memory that records each call for which a remote store would need a request."""

import dataclasses
import threading

from fusefs.stores.memory import MemoryStore
from fusefs.stores.remote.object_store import ObjectStore


class RecordingStore(MemoryStore):
    """Records method and path. Calls that a method makes to the store itself are part of its request.

    Args:
        notes: Returns whether calls about a path are recorded.
    """

    def __init__(self, notes=lambda _: True):
        super().__init__()
        self.calls = []
        self.reads = []
        """Offset and size of each recorded read."""
        self.mtime_ns = None
        """Modification time of all files, if set."""
        self._notes, self._inside = notes, threading.local()

    def since(self):
        """Return the requests since the last call of this method."""
        calls, self.calls = self.calls, []
        return calls

    def stat(self, path):
        return self._noted("stat", path)

    def listing(self, path):
        return self._noted("listing", path)

    def read(self, path, offset, size_bytes):
        return self._noted("read", path, offset, size_bytes)

    def create(self, path):
        return self._noted("create", path)

    def publish(self, path, data, before=None, mode=None):
        def asked(there):  # the requests of the publishing code itself
            self._inside.any = False
            try:
                before(there)
            finally:
                self._inside.any = True

        return self._noted("publish", path, data, before and asked, mode)

    def rename(self, source, target):
        return self._noted("rename", source, target)

    def remove(self, path):
        return self._noted("remove", path)

    def make_directory(self, path):
        return self._noted("make_directory", path)

    def remove_directory(self, path):
        return self._noted("remove_directory", path)

    def _noted(self, method, path, *words):
        outermost = not getattr(self._inside, "any", False)
        if outermost and self._notes(path):
            self.calls.append((method, path))
            if method == "read":
                self.reads.append(words)
        self._inside.any = True
        try:
            return self._aged(getattr(super(), method)(path, *words))
        finally:
            self._inside.any = not outermost

    def _aged(self, found):
        if isinstance(found, list):
            return [self._aged(entry) for entry in found]
        if self.mtime_ns is None or getattr(found, "is_directory", True):
            return found
        return dataclasses.replace(found, mtime_ns=self.mtime_ns)


class RecordingObjects(RecordingStore):
    """A recording store with the preferences of an object store."""

    preferred = ObjectStore.preferred.fget(None)

"""A mount of one striped file whose store answers only when a whole herd has asked to open it.

``python -m tests.support.fusefs.herd READY_FD`` serves it as a daemon.
"""

import threading
from collections import Counter

import orjson
from typing_extensions import override

from fusefs.bridge import server
from fusefs.bridge.api.options import BridgeOptions
from fusefs.bridge.process.launch import run_daemon
from fusefs.config import FilesConfig, Striping
from fusefs.stores.memory import MemoryStore
from fusefs.tree.namespace import StripedFiles
from fusefs.vfs.file.open_file import SpoolPlace
from fusefs.vfs.store_filesystem import StoreFileSystem

NAME = "f"
DATA = bytes(range(256)) * 1024
CONFIG = FilesConfig(striping=Striping(unit=4096, count=2), plain_limit=4096)


class GatedStore(MemoryStore):
    """Counts the questions about the file, and answers once ``all_asked`` is set."""

    def __init__(self):
        super().__init__()
        self.all_asked = threading.Event()
        self.all_asked.set()
        self.counts = Counter()

    def age(self):
        """Make the file old enough for its time stamp to name its version."""
        self.mtimes_ns[NAME] -= 60 * 10**9

    @override
    def stat(self, path):
        self._gate("stat", path)
        return super().stat(path)

    @override
    def read(self, path, offset, size_bytes):
        self._gate("read", path)
        return super().read(path, offset, size_bytes)

    def _gate(self, call, path):
        if path == NAME:
            self.counts[call] += 1
            assert self.all_asked.wait(60), "the herd did not come"


class Herd(StoreFileSystem):
    """Knows how many readers will come; ``user.counts`` of the file returns their requests."""

    def __init__(self, files, store, size):
        super().__init__(files, SpoolPlace())
        self._store, self._to_come = store, size

    @override
    async def open(self, inode, flags):
        self._to_come -= 1
        if self._to_come <= 0:
            self._store.all_asked.set()
        return await super().open(inode, flags)

    @override
    async def getxattr(self, inode, name):
        if name == b"user.begin":
            self._store.counts.clear()
            self._store.all_asked.clear()
            return b""
        if name == b"user.counts":
            return orjson.dumps(self._store.counts)
        return await super().getxattr(inode, name)


def serve(settings, ready):
    told = orjson.loads(settings)
    mountpoint, size = told.pop("mountpoint"), told.pop("size")
    store = GatedStore()
    files = StripedFiles(store, CONFIG)
    files.write_file(NAME, DATA)
    store.age()
    shown = Herd(files, store, size)
    try:
        server.serve(shown, mountpoint, BridgeOptions(**told), name="herd", ready=ready)
    finally:
        shown.close()
        files.close()


if __name__ == "__main__":
    run_daemon(serve, role="herd")

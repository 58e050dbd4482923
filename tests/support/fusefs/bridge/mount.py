"""A mount without a kernel: a test calls its handlers as a binding does, and can stop them at any point."""

import contextlib
import os
import threading

from fusefs.bridge.api.protocol import ROOT_INODE
from fusefs.bridge.api.waiting import run_blocking
from fusefs.config import FilesConfig, Striping
from fusefs.stores.memory import MemoryStore
from fusefs.tree.namespace import StripedFiles
from fusefs.vfs.file.open_file import SpoolPlace
from fusefs.vfs.store_filesystem import StoreFileSystem

DATA = bytes(range(256)) * 64
CONFIG = FilesConfig(striping=Striping(unit=4096, count=2), plain_limit=4096)


class Kernel:
    """Passes on everything unchanged."""

    can_pass_through = True

    def __init__(self):
        self.inodes = set()
        self.told_outdated = []

    def passes_through(self, inode):
        return inode in self.inodes

    def outdated(self, inode):
        self.told_outdated.append(inode)


class Mount:
    """A file system and the calls of a kernel on it."""

    def __init__(self, store=None):
        self.files = StripedFiles(MemoryStore() if store is None else store, CONFIG)
        self.kernel = Kernel()
        self.shown = StoreFileSystem(self.files, SpoolPlace())
        self.shown.connected(self.kernel)

    def close(self):
        self.shown.close()
        self.files.close()

    def lookup(self, name=b"f"):
        return run_blocking(self.shown.lookup(ROOT_INODE, name)).inode

    def open(self, inode, flags=os.O_RDONLY):
        opened = run_blocking(self.shown.open(inode, flags))
        if opened.local_fd is not None:
            os.close(opened.local_fd)
            self.kernel.inodes.add(inode)
        return opened

    def read(self, opened):
        return bytes(run_blocking(self.shown.read(opened.handle, 0, 1 << 20)))

    def release(self, opened):
        run_blocking(self.shown.release(opened.handle))


@contextlib.contextmanager
def held(owner, name, handling):
    """Run a handler until it waits in ``owner.name``; that call has its result, and returns at the end of the block."""
    called, moved, go_on = threading.Event(), threading.Event(), threading.Event()
    inner = getattr(owner, name)

    def call(*arguments, **named):
        try:
            return inner(*arguments, **named)
        finally:
            called.set()
            moved.set()
            go_on.wait(60)

    setattr(owner, name, call)
    try:
        while not called.is_set():
            moved.clear()
            handling.send(None).add_done_callback(lambda _: moved.set())
            assert moved.wait(60)
        setattr(owner, name, inner)
        yield
    finally:
        go_on.set()

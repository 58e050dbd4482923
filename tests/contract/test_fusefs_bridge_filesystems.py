"""The file system contract: a store, and a small tree in memory behind worker threads."""

import pytest

from fusefs.bridge.api.blocking import Threaded
from fusefs.config import FilesConfig, Striping
from fusefs.stores.memory import MemoryStore
from fusefs.tree.namespace import StripedFiles
from fusefs.vfs.file.open_file import SpoolPlace
from fusefs.vfs.store_filesystem import StoreFileSystem
from tests.support.fusefs.bridge import example
from tests.support.fusefs.bridge.contract import FileSystemContract


class TestStore(FileSystemContract):
    content = bytes(range(256)) * 100

    @pytest.fixture
    def shown(self):
        config = FilesConfig(striping=Striping(unit=4096, count=3), plain_limit=4096)
        files = StripedFiles(MemoryStore(), config)
        files.names.make_directory("d")
        files.write_file("d/f", self.content)
        shown = StoreFileSystem(files, SpoolPlace())
        yield shown
        shown.close()
        files.close()


class TestStoreOfPlainFiles(TestStore):
    @pytest.fixture
    def shown(self):
        store = MemoryStore()
        store.make_directory("d")
        writer = store.create("d/f")
        writer.write(self.content)
        writer.close()
        files = StripedFiles(store)
        shown = StoreFileSystem(files, SpoolPlace())
        yield shown
        shown.close()
        files.close()


class TestBlockingTree(FileSystemContract):
    content = example.BLOB

    @pytest.fixture
    def shown(self, monkeypatch):
        monkeypatch.setitem(example.FOLDERS[example.ROOT], b"d", example.FOLDER)
        monkeypatch.setitem(example.FOLDERS[example.FOLDER], b"f", example.FILE)
        shown = Threaded(example.Example())
        yield shown
        shown.close()


class TestBlockingTreeWithNothingInline(TestBlockingTree):
    @pytest.fixture
    def shown(self, monkeypatch):
        monkeypatch.setitem(example.FOLDERS[example.ROOT], b"d", example.FOLDER)
        monkeypatch.setitem(example.FOLDERS[example.FOLDER], b"f", example.FILE)
        monkeypatch.setattr(example.Example, "inline", frozenset())
        shown = Threaded(example.Example())
        yield shown
        shown.close()

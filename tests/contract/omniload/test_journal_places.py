"""The contract of a journal in a file, and on stores that need no server."""

import pytest

from fusefs.stores.memory import MemoryStore
from omniload.mix.journal.object_storage import ObjectStorage
from omniload.mix.journal.place import journal_at
from omniload.mix.journal.storage import FileStorage
from tests.support.plane.journal_contract import JournalContract, StoredJournalContract, claiming


class TestFile(JournalContract):
    @pytest.fixture
    def place(self, tmp_path):
        return claiming(lambda: FileStorage(tmp_path / "journal"))


class TestMemory(StoredJournalContract):
    @pytest.fixture
    def place(self):
        store = MemoryStore()
        return claiming(lambda: ObjectStorage(store))


class TestFolderOfAStore(StoredJournalContract):
    @pytest.fixture
    def place(self, tmp_path):
        return claiming(lambda: journal_at(tmp_path / "run-1", f"file://{tmp_path}/journals"))

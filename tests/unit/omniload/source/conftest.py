import fsspec
import pytest


@pytest.fixture
def memory():
    """The in-memory store of this process, emptied after a test."""
    store = fsspec.filesystem("memory")
    yield store
    store.store.clear()
    store.pseudo_dirs[:] = [""]

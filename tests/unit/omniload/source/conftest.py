import fsspec
import pytest


@pytest.fixture
def memory():
    """The store in memory of this process, empty again behind a test."""
    store = fsspec.filesystem("memory")
    yield store
    store.store.clear()
    store.pseudo_dirs[:] = [""]

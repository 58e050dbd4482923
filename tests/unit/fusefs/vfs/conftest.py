import os

import pytest

from fusefs.tree.open_versions import OpenVersion
from fusefs.vfs import attribute_cache
from tests.support.fusefs.bridge.mount import DATA, Mount


@pytest.fixture(autouse=True)
def no_time_passes(monkeypatch):
    """Keep what was seen for a moment longer than a busy machine takes from one request to the next."""
    monkeypatch.setattr(attribute_cache, "TTL_S", 600.0)
    monkeypatch.setattr(attribute_cache, "_MISSED_S", 600.0)


@pytest.fixture
def mount():
    made = Mount()
    made.files.write_file("f", DATA)
    yield made
    made.close()


@pytest.fixture
def local(monkeypatch):
    """Give every version a local copy."""
    monkeypatch.setattr(OpenVersion, "local_copy", lambda _: os.open(os.devnull, os.O_RDONLY))

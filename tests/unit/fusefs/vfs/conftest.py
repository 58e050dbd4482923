import os

import pytest

from fusefs.tree.open_versions import OpenVersion
from tests.support.fusefs.bridge.mount import DATA, Mount


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

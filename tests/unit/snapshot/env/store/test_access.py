"""Opening a store: what a client writes while it is loaded does not mix with what a command tells."""

import os

import pytest

from fusefs.stores.local.store import LocalStore
from omniload.base.errors import UnavailableError
from snapshot.env.store.access import opened
from snapshot.env.store.repository import Repository


def test_what_a_client_writes_past_python_goes_to_standard_error(tmp_path, monkeypatch, capfd):
    def a_client_that_logs(url):
        os.write(1, b"WARN a Java machine\n")
        return LocalStore(url)

    monkeypatch.setattr("fusefs.stores.url.open_store", a_client_that_logs)

    with opened(str(tmp_path)) as repository:
        os.write(1, b"the key\n")
        assert isinstance(repository, Repository)

    shown = capfd.readouterr()
    assert shown.out == "the key\n"
    assert shown.err == "WARN a Java machine\n"


def test_standard_output_is_back_where_a_store_cannot_be_opened(monkeypatch, capfd):
    def unreachable(_):
        raise UnavailableError("no answer")

    monkeypatch.setattr("fusefs.stores.url.open_store", unreachable)

    with pytest.raises(UnavailableError), opened("hdfs://nowhere:1/"):
        pass
    os.write(1, b"still told\n")

    assert capfd.readouterr().out == "still told\n"

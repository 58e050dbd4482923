"""Units that no thread is left to fetch: whoever waits for them hears of it."""

import pytest

from fusefs.base.thread_pools import StorePool
from omniload.base.errors import StateError
from tests.support.fusefs.builders import some_files

DATA = bytes(range(256)) * 64


def refuses(*_):
    raise StateError("forked off")


def test_what_a_pool_refuses_to_fetch_is_an_error_for_all_that_wait_and_fetched_later(monkeypatch):
    with some_files(read_ahead=0) as files:
        files.write_file("f", DATA)
        with files.open("f") as file:
            with monkeypatch.context() as patched:
                patched.setattr("fusefs.base.thread_pools.StorePool.check_process", refuses)
                waiting = file.reader.start(0, 5000)
                again = file.reader.start(0, 5000)

            for future in (*waiting, *again):
                with pytest.raises(StateError):
                    future.result(timeout=60)
            assert file.reader.read(0, len(DATA)) == DATA


def test_a_process_that_was_forked_off_waits_for_no_unit_that_a_thread_elsewhere_fetches(
    monkeypatch,
):
    with some_files(read_ahead=0) as files:
        files.write_file("f", DATA)
        with files.open("f") as file:
            begun = []
            with monkeypatch.context() as patched:
                patched.setattr(StorePool, "submit", lambda _, call: begun.append(call))
                file.reader.start(0, 5000)
                patched.setattr(StorePool, "check_process", refuses)
                with pytest.raises(StateError, match="forked off"):
                    file.reader.start(0, 5000)

            for call in begun:
                call()
            assert file.reader.read(0, len(DATA)) == DATA

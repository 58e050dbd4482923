"""Units that no thread is left to fetch: whoever waits for them hears of it."""

import pytest

from omniload.base.errors import StateError
from tests.support.fusefs.builders import some_files

DATA = bytes(range(256)) * 64


def test_what_a_pool_refuses_to_fetch_is_an_error_for_all_that_wait_and_fetched_later(monkeypatch):
    def refuses(*_):
        raise StateError("forked off")

    with some_files(read_ahead=0) as files:
        files.write_file("f", DATA)
        with files.open("f") as file:
            with monkeypatch.context() as patched:
                patched.setattr("fusefs.base.thread_pools.StorePool.check_process", refuses)
                waiting = file.reader.start(0, 5000)
                again = file.reader.start(0, 5000)

            for future in (*waiting, *again):
                with pytest.raises(StateError):
                    future.result(timeout=5)
            assert file.reader.read(0, len(DATA)) == DATA

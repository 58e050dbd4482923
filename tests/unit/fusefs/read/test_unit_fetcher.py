"""Units that no thread is left to fetch: whoever waits for them hears of it."""

from copy import copy

import pytest

from fusefs.base.thread_pools import StorePool
from fusefs.cache.block_cache import BlockCache
from fusefs.metrics.counters import Traffic
from fusefs.tree import object_references
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
                patched.setattr(StorePool, "submit", refuses)
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


def test_a_process_that_was_forked_off_is_refused_before_a_lock_that_a_thread_elsewhere_held(
    monkeypatch,
):
    """A thread that fetched what is read ahead held it as the process was forked: nobody lets go of it there."""
    with some_files(read_ahead=0) as files:
        files.write_file("f", DATA)
        with files.open("f") as file, monkeypatch.context() as patched:
            patched.setattr(BlockCache, "claim", lambda *_, **__: pytest.fail("waits"))
            patched.setattr(Traffic, "asked", lambda _: pytest.fail("waits"))
            patched.setattr(StorePool, "check_process", refuses)
            with pytest.raises(StateError, match="forked off"):
                file.reader.read(0, 10)
            with pytest.raises(StateError, match="forked off"):
                file.reader.start_into([(0, memoryview(bytearray(10)))])


def test_a_process_that_was_forked_off_lets_go_of_nothing_that_is_read_where_it_was_opened(
    monkeypatch,
):
    with some_files(read_ahead=0) as files:
        files.write_file("f", DATA)
        with files.open("f") as file:
            of_a_fork = copy(file)
            files.write_file("f", DATA[1:])
            with monkeypatch.context() as patched:
                patched.setattr(object_references.os, "getpid", lambda: -1)
                of_a_fork.close()

            assert file.reader.read(0, len(DATA)) == DATA

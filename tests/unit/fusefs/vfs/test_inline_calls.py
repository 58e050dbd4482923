"""Small calls of a quick store are made on the mount's loop, until one is slow."""

import os

import pytest

from fusefs.bridge.api.protocol import ROOT_INODE
from fusefs.bridge.api.waiting import run_blocking
from fusefs.stores.deadlines import left_s
from fusefs.stores.local.beneath import Beneath
from fusefs.stores.local.store import LocalStore
from fusefs.stores.memory import MemoryStore
from fusefs.stores.retry import RetryingStore
from fusefs.vfs.inline_calls import InlineCalls
from omniload.base.errors import UnavailableError
from tests.support.fusefs_bridge_mount import Mount


class Clock:
    def __init__(self):
        self.now_s = 100.0

    def __call__(self):
        return self.now_s


def test_a_slow_call_is_followed_by_a_time_without_any_as_long_as_25_of_it():
    clock = Clock()
    calls = InlineCalls(answers_at_once=True, clock=clock)

    def slow():
        clock.now_s += 0.1
        return "found"

    assert calls.may_run
    assert calls.run(slow) == "found"
    assert not calls.may_run
    clock.now_s += 2.4
    assert not calls.may_run
    clock.now_s += 0.2
    assert calls.may_run


def test_quick_calls_go_on_and_a_store_that_is_waited_for_has_none():
    clock = Clock()
    calls = InlineCalls(answers_at_once=True, clock=clock)
    calls.run(lambda: None)
    assert calls.may_run
    assert not InlineCalls(answers_at_once=False, clock=clock).may_run


def test_on_the_loop_no_time_is_left_for_a_second_attempt():
    assert InlineCalls(answers_at_once=True).run(left_s) <= 0
    assert left_s() is None


@pytest.mark.parametrize(
    ("is_disk", "delays", "expected"),
    [(True, True, True), (False, True, False), (True, False, False)],
)
def test_a_store_answers_at_once_on_a_disk_of_this_machine_that_syncs_later(
    tmp_path, monkeypatch, is_disk, delays, expected
):
    kind = 0xEF53 if is_disk else 0x6969  # ext4, NFS
    monkeypatch.setattr("fusefs.stores.local.beneath._kind_of", lambda _: kind)
    store = LocalStore(tmp_path)
    if delays:
        store.delay_syncs()

    assert RetryingStore(store).answers_at_once is expected
    store.close()


def test_the_kind_of_file_system_below_is_the_kernel_s_word():
    assert not Beneath("/proc").is_local_disk
    assert Beneath("/dev/shm").is_local_disk
    assert not MemoryStore().answers_at_once


@pytest.fixture
def mount(tmp_path, monkeypatch):
    monkeypatch.setattr("fusefs.stores.local.beneath._kind_of", lambda _: 0xEF53)
    store = RetryingStore(LocalStore(tmp_path), waits_s=[0.0])
    store.delay_syncs()
    mount = Mount(store)
    yield mount
    mount.close()


def made(mount, name, data):
    opened, _ = run_blocking(mount.shown.create(ROOT_INODE, name, 0o100644, os.O_WRONLY))
    run_blocking(mount.shown.write(opened.handle, 0, data))
    run_blocking(mount.shown.flush(opened.handle))
    mount.release(opened)


def threads_used(mount, monkeypatch):
    used, submit = [], mount.shown._pool.submit

    def noted(call, *arguments, **named):
        used.append(getattr(call, "__name__", str(call)))
        return submit(call, *arguments, **named)

    monkeypatch.setattr(mount.shown._pool, "submit", noted)
    return used


def test_a_small_file_is_looked_for_and_made_without_a_thread(mount, monkeypatch):
    mount.shown._inline._clock = lambda: 0.0  # a busy machine is no busy disk
    used = threads_used(mount, monkeypatch)
    with pytest.raises(FileNotFoundError):
        mount.lookup(b"small")
    made(mount, b"small", b"x" * 100)

    assert mount.files.store.read("small", 0, 100) == b"x" * 100
    assert used == []


def test_what_the_first_attempt_does_not_bring_is_asked_in_a_thread(mount, monkeypatch):
    mount.shown._inline._clock = lambda: 0.0
    used = threads_used(mount, monkeypatch)
    store, inner = mount.files.store._store, LocalStore.stat
    fails = [1]

    def stat(path):
        if fails:
            fails.pop()
            raise UnavailableError("busy")
        return inner(store, path)

    monkeypatch.setattr(store, "stat", stat)
    with pytest.raises(FileNotFoundError):
        mount.lookup(b"absent")

    assert used == ["stat"]
    assert not fails

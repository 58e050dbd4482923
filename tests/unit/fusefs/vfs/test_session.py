"""Small calls of a quick store are made on the loop, until one waits for the disk; calls at once share answers."""

import errno
import os
import threading
from concurrent.futures import Future

import pytest

from fusefs.bridge.api.protocol import ROOT_INODE, Change
from fusefs.bridge.api.waiting import result_of, run_blocking
from fusefs.stores.deadlines import left_s
from fusefs.stores.local.beneath import Beneath
from fusefs.stores.local.store import LocalStore
from fusefs.stores.memory import MemoryStore
from fusefs.stores.retry import RetryingStore
from fusefs.vfs import session
from fusefs.vfs.session import FreshSingleFlight, InlineCalls
from omniload.base.errors import UnavailableError
from tests.support.fusefs.bridge.mount import Mount

EXT4, NFS = 0xEF53, 0x6969


class Clock:
    def __init__(self):
        self.now_s = 100.0
        self.waits = 0

    def calls(self, *, answers_at_once=True):
        return InlineCalls(
            answers_at_once=answers_at_once, clock=lambda: self.now_s, waits=lambda: self.waits
        )

    def call_of(self, took_s, *, waits):
        def call():
            self.now_s += took_s
            self.waits += waits
            return "found"

        return call


def test_a_call_that_waited_long_is_followed_by_ten_times_as_long_without_any():
    clock = Clock()
    calls = clock.calls()

    assert calls.may_run
    assert calls.run(clock.call_of(0.1, waits=1)) == "found"
    assert not calls.may_run
    clock.now_s += 0.9
    assert not calls.may_run
    clock.now_s += 0.2
    assert calls.may_run


@pytest.mark.parametrize(("took_s", "waits"), [(0.001, 1), (0.1, 0)])
def test_quick_calls_go_on_and_so_do_those_that_only_lost_their_core(took_s, waits):
    clock = Clock()
    calls = clock.calls()
    calls.run(clock.call_of(took_s, waits=waits))
    assert calls.may_run


def test_a_store_that_is_waited_for_is_called_by_threads_alone():
    assert not Clock().calls(answers_at_once=False).may_run


def test_a_thread_that_gives_its_core_away_is_one_that_waits():
    clock = Clock()
    calls = InlineCalls(answers_at_once=True, clock=lambda: clock.now_s)

    def call():
        clock.now_s += 0.1
        threading.Event().wait(0.001)

    calls.run(call)
    assert not calls.may_run


def test_on_the_loop_no_time_is_left_for_a_second_attempt():
    assert InlineCalls(answers_at_once=True).run(left_s) <= 0
    assert left_s() is None


@pytest.mark.parametrize(
    ("kind", "delays", "expected"),
    [(EXT4, True, True), (NFS, True, False), (EXT4, False, False), (0, True, False)],
)
def test_a_store_answers_at_once_on_a_disk_of_this_machine_that_syncs_later(
    tmp_path, monkeypatch, kind, delays, expected
):
    monkeypatch.setattr("fusefs.stores.local.beneath.kind_of_filesystem", lambda _: kind)
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
def local(tmp_path, monkeypatch):
    monkeypatch.setattr("fusefs.stores.local.beneath.kind_of_filesystem", lambda _: EXT4)
    return LocalStore(tmp_path)


@pytest.fixture
def mount(local, monkeypatch):
    # A busy machine is no busy disk.
    monkeypatch.setattr(session, "InlineCalls", Clock().calls)
    store = RetryingStore(local, waits_s=[0.0])
    store.delay_syncs()
    mount = Mount(store)
    run_blocking(mount.shown.getattr(ROOT_INODE))
    yield mount
    mount.close()


@pytest.fixture
def threads_used(monkeypatch):
    used, in_thread = [], session.in_thread

    def noted(pool, call, *arguments, **named):
        used.append(getattr(call, "__name__", str(call)))
        return in_thread(pool, call, *arguments, **named)

    monkeypatch.setattr(session, "in_thread", noted)
    return used


def failing_once(monkeypatch, local, name):
    """Have one call of a store meet an outage; return what is empty from then on."""
    inner, fails = getattr(local, name), [1]

    def call(*arguments):
        if fails:
            fails.pop()
            raise UnavailableError("busy")
        return inner(*arguments)

    monkeypatch.setattr(local, name, call)
    return fails


def made(mount, name, data, *changes):
    opened, entry = run_blocking(mount.shown.create(ROOT_INODE, name, 0o100644, os.O_WRONLY))
    run_blocking(mount.shown.write(opened.handle, 0, data))
    for change in changes:
        run_blocking(mount.shown.setattr(entry.inode, change, opened.handle))
    run_blocking(mount.shown.flush(opened.handle))
    mount.release(opened)


@pytest.mark.parametrize("changes", [(), (Change(mtime_ns=10**18), Change(mode=0o600))])
def test_a_small_file_is_looked_for_and_made_without_a_thread(mount, threads_used, changes):
    with pytest.raises(FileNotFoundError):
        mount.lookup(b"small")
    made(mount, b"small", b"x" * 100, *changes)

    with mount.files.open("small") as file:
        assert bytes(file.reader.read(0, 100)) == b"x" * 100
        assert file.info.mode == (0o600 if changes else 0o644)
    assert threads_used == []


def test_what_is_there_is_described_without_a_thread_and_replaced_by_one(mount, threads_used):
    mount.files.write_file("f", b"before")
    inode = mount.lookup()
    assert threads_used == []
    opened = mount.open(inode, os.O_WRONLY | os.O_TRUNC)
    threads_used.clear()
    run_blocking(mount.shown.write(opened.handle, 0, b"after"))
    run_blocking(mount.shown.flush(opened.handle))

    assert threads_used == ["flush"]
    mount.release(opened)


def test_names_that_no_store_shows_are_refused_as_threads_refuse_them(mount):
    with pytest.raises(PermissionError):
        mount.lookup(b".omnifs-directory")


def test_what_the_first_attempt_does_not_bring_is_asked_in_a_thread(
    mount, local, threads_used, monkeypatch
):
    fails = failing_once(monkeypatch, local, "stat")
    with pytest.raises(FileNotFoundError):
        mount.lookup(b"absent")

    assert threads_used == ["stat"]
    assert not fails


def test_a_file_that_the_first_attempt_does_not_publish_is_published_by_a_thread(
    mount, local, threads_used, monkeypatch
):
    fails = failing_once(monkeypatch, local, "publish")
    made(mount, b"small", b"x" * 100)

    assert threads_used == ["flush"]
    assert not fails
    assert mount.files.store.read("small", 0, 100) == b"x" * 100


def test_a_file_that_another_mount_published_first_is_replaced_by_a_thread(
    mount, local, threads_used, monkeypatch
):
    opened, _ = run_blocking(mount.shown.create(ROOT_INODE, b"small", 0o100644, os.O_WRONLY))
    run_blocking(mount.shown.write(opened.handle, 0, b"ours"))
    local.publish("small", b"theirs")
    read_by, read = [], local.read

    def noted(*arguments):
        read_by.append(threading.current_thread())
        return read(*arguments)

    monkeypatch.setattr(local, "read", noted)
    run_blocking(mount.shown.flush(opened.handle))

    assert threads_used == ["flush"]
    assert threading.current_thread() not in read_by
    mount.release(opened)
    assert local.read("small", 0, 4) == b"ours"


def test_a_large_file_is_published_by_a_thread(mount, threads_used):
    made(mount, b"large", bytes(100_000))

    assert "flush" in threads_used


def test_a_disk_that_is_full_is_told_to_who_closes(mount, local, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "no space")

    opened, _ = run_blocking(mount.shown.create(ROOT_INODE, b"small", 0o100644, os.O_WRONLY))
    monkeypatch.setattr(local, "publish", full)
    with pytest.raises(OSError, match="no space"):
        run_blocking(mount.shown.flush(opened.handle))
    monkeypatch.undo()
    mount.release(opened)


def test_calls_that_have_not_begun_at_the_end_of_a_mount_never_do(monkeypatch):
    monkeypatch.setattr(session, "_CALLS_WAITING", 1)
    mount = Mount()
    begun, go_on, done = threading.Event(), threading.Event(), []

    def hang():
        begun.set()
        assert go_on.wait(60)
        done.append("first")

    waiting = [mount.shown.session.wait(call) for call in (hang, lambda: done.append("second"))]
    under_way, queued = (handling.send(None) for handling in waiting)
    assert begun.wait(60)
    queued.add_done_callback(lambda _: go_on.set())

    mount.close()

    assert done == ["first"]
    assert under_way.done()
    assert queued.cancelled()
    for handling in waiting:
        handling.close()


def test_a_call_that_the_system_gives_no_thread_of_its_own_is_made_by_those_that_there_are(
    monkeypatch,
):
    def no_thread(_):
        raise RuntimeError("can't start new thread")

    mount = Mount()
    begun, go_on = threading.Event(), threading.Event()
    busy = mount.shown.session.wait(lambda: begun.set() or go_on.wait(60))
    busy.send(None)
    assert begun.wait(60)

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", no_thread)
        late = mount.shown.session.wait(threading.get_native_id)
        future = late.send(None)
    go_on.set()

    assert future.result(60)
    busy.close()
    late.close()
    mount.close()


# Answers that many who ask at once share: who may take which, and what becomes of errors


class Store:
    """Answers questions when the test says so."""

    def __init__(self):
        self.questions = []

    async def question(self):
        self.questions.append(Future())
        return await result_of(self.questions[-1])


@pytest.fixture
def store():
    return Store()


@pytest.fixture
def asked(store):
    sharing = FreshSingleFlight()
    return lambda about="f": sharing.call(about, store.question)


def begun(*askers):
    for asker in askers:
        assert not asker.send(None).done()
    return askers


def test_who_asks_alone_is_answered_by_one_question(store, asked):
    (asker,) = begun(asked())
    store.questions[0].set_result("now")

    assert run_blocking(asker) == "now"
    assert len(store.questions) == 1


def test_who_asks_later_asks_anew(store, asked):
    for answer in ("first", "second"):
        (asker,) = begun(asked())
        store.questions[-1].set_result(answer)
        assert run_blocking(asker) == answer

    assert len(store.questions) == 2


def test_all_who_ask_during_a_question_share_the_next_one(store, asked):
    first, *others = begun(asked(), asked(), asked(), asked())
    assert len(store.questions) == 1
    store.questions[0].set_result("old")
    assert run_blocking(first) == "old"

    begun(others[0])
    store.questions[1].set_result("new")

    assert [run_blocking(other) for other in others] == ["new"] * 3
    assert len(store.questions) == 2


def test_who_asks_during_the_second_question_waits_for_a_third(store, asked):
    first, second = begun(asked(), asked())
    store.questions[0].set_result(1)
    run_blocking(first)
    begun(second)
    (third,) = begun(asked())
    store.questions[1].set_result(2)
    run_blocking(second)
    begun(third)
    store.questions[2].set_result(3)

    assert run_blocking(third) == 3


def test_questions_about_other_things_do_not_wait(store, asked):
    begun(asked("f"), asked("g"))

    assert len(store.questions) == 2


def test_an_error_reaches_all_who_share_it_and_nobody_else(store, asked):
    first, *others = begun(asked(), asked(), asked())
    store.questions[0].set_exception(TimeoutError("first"))
    with pytest.raises(TimeoutError, match="first"):
        run_blocking(first)
    begun(others[0])
    store.questions[1].set_exception(TimeoutError("second"))

    for other in others:
        with pytest.raises(TimeoutError, match="second"):
            run_blocking(other)
    (later,) = begun(asked())
    store.questions[2].set_result("here")
    assert run_blocking(later) == "here"


def test_who_is_stopped_while_it_asks_loses_nobody(store, asked):
    first, *others = begun(asked(), asked(), asked())
    first.close()

    begun(others[0])
    store.questions[1].set_result("new")
    assert [run_blocking(other) for other in others] == ["new"] * 2


def test_who_is_stopped_while_it_waits_for_its_turn_loses_nobody(store, asked):
    first, second, *others = begun(asked(), asked(), asked(), asked())
    second.close()
    begun(*others)  # the question that was under way still is
    assert len(store.questions) == 1
    store.questions[0].set_result("old")
    run_blocking(first)
    begun(others[0])
    store.questions[1].set_result("new")

    assert [run_blocking(other) for other in others] == ["new"] * 2


def test_who_is_stopped_while_it_shares_is_not_missed(store, asked):
    first, second, third = begun(asked(), asked(), asked())
    third.close()
    store.questions[0].set_result("old")
    run_blocking(first)
    begun(second)
    store.questions[1].set_result("new")

    assert run_blocking(second) == "new"


def test_a_change_waits_for_the_question_under_way_and_is_shared_by_nobody(store):
    sharing = FreshSingleFlight()
    (first,) = begun(sharing.call("f", store.question))
    changes = begun(*(sharing.exclusive("f", store.question) for _ in range(2)))
    later = begun(*(sharing.call("f", store.question) for _ in range(2)))
    begun(sharing.exclusive("g", store.question))
    assert len(store.questions) == 2, "the first, and that about another thing"

    for waiting, answer in ((first, "old"), (changes[0], 1), (changes[1], 2)):
        begun(waiting) if waiting is not first else None
        store.questions[-1 if waiting is not first else 0].set_result(answer)
        assert run_blocking(waiting) == answer
    begun(later[0])
    store.questions[-1].set_result("new")

    assert [run_blocking(one) for one in later] == ["new", "new"]
    assert len(store.questions) == 5


def test_a_change_that_fails_or_is_stopped_is_in_nobodys_way(store):
    sharing = FreshSingleFlight()
    failing, stopped = begun(*(sharing.exclusive("f", store.question) for _ in range(2)))
    (asker,) = begun(sharing.call("f", store.question))
    stopped.close()
    store.questions[0].set_exception(TimeoutError("no"))
    with pytest.raises(TimeoutError, match="no"):
        run_blocking(failing)
    begun(asker)
    store.questions[-1].set_result("here")

    assert run_blocking(asker) == "here"


def test_nothing_is_kept_of_what_was_answered(store):
    sharing = FreshSingleFlight()
    for outcome in ("answer", "error", "stop"):
        (asker,) = begun(sharing.call(outcome, store.question))
        if outcome == "answer":
            store.questions[-1].set_result(1)
            run_blocking(asker)
        elif outcome == "error":
            store.questions[-1].set_exception(OSError("no"))
            with pytest.raises(OSError, match="no"):
                run_blocking(asker)
        else:
            asker.close()

    assert sharing._rounds == {}

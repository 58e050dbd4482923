"""A call of a store ends within its limit, whatever its client does; one that hangs is abandoned in its thread."""

import threading
from functools import partial

import pytest

from fusefs.stores import deadlines
from fusefs.stores.deadlines import (
    MOST_ABANDONED,
    Callers,
    allowing,
    left_s,
    renew,
    within,
)
from fusefs.stores.handle_cache import HandleCache
from fusefs.stores.protocol import Abandoned, Entry
from fusefs.stores.remote.client import ReplacingBackend
from fusefs.stores.remote.object_store import ObjectStore
from fusefs.stores.remote.rename_store import RenamingStore, ReplacingStore
from fusefs.stores.retry import RetryingStore
from omniload.base.errors import UnavailableError
from tests.support.fusefs.builders import some_files

LONG_S = 60.0


class Stream:
    def __init__(self, client):
        self.client = client

    def write(self, data):
        self.client.asked("write", data)

    def close(self):
        self.client.asked("close")

    def abort(self):
        self.client.asked("abort")


class Client(ReplacingBackend):
    """Answers at once, but for one call, which hangs until ``go``, and with which the time of ``deadline`` is over."""

    location = "client://"

    def __init__(self, hangs=None, deadline=None):
        self.hangs, self.go, self.hung = hangs, threading.Event(), threading.Event()
        self.deadline = deadline
        self.calls = []

    def asked(self, name, *_):
        self.calls.append(name)
        if name == self.hangs:
            self.hung.set()
            if self.deadline is not None:
                self.deadline.until = 0.0
            assert self.go.wait(LONG_S)

    def find(self, path):
        self.asked("find")
        return Entry(path, not path, 1, 0) if path in {"", "f"} else None

    def listing(self, path):
        self.asked("listing")
        return [Entry("f", False, 1, 0)]

    def read(self, path, offset, size_bytes):
        self.asked("read")
        return b"x" * size_bytes

    def open_new(self, path):
        self.asked("open_new")
        return Stream(self)

    def move(self, source, target):
        self.asked("move")

    def replace(self, source, target):
        self.asked("replace")

    def remove(self, path):
        self.asked("remove")

    def make_directory(self, path):
        self.asked("make_directory")

    def remove_directory(self, path):
        self.asked("remove_directory")

    def close(self):
        self.asked("close")


CALLS = {
    "find": lambda store: store.stat("f"),
    "listing": lambda store: store.listing(""),
    "read": lambda store: store.read("f", 0, 1),
    "open_new": lambda store: store.publish("f", b"1"),
    "write": lambda store: store.publish("f", b"1"),
    "replace": lambda store: store.publish("f", b"1"),
    "move": lambda store: store.rename("f", "g"),
    "remove": lambda store: store.remove("f"),
    "make_directory": lambda store: store.make_directory("d"),
}
KINDS = {"replace": ReplacingStore, "move": ObjectStore}


@pytest.mark.parametrize("name", CALLS)
def test_a_call_that_hangs_is_unavailable_after_the_limit_and_nothing_follows_it(name, monkeypatch):
    monkeypatch.setattr(deadlines, "_LOOK_EVERY_S", 0.01)
    # Over once it hangs, and no sooner: on a busy machine the thread that makes the call may come late.
    with within(LONG_S) as deadline:
        client = Client(name, deadline)
        store = RetryingStore(KINDS.get(name, RenamingStore)(client), waits_s=())

        with pytest.raises(UnavailableError, match=r"within 60 s|no time is left"):
            CALLS[name](store)

    assert client.hung.is_set()
    assert store.abandoned == Abandoned(now=1, total=1)
    (line,) = [line for line in deadlines.hanging_calls() if line.startswith("Client")]
    before = list(client.calls)
    client.hangs = None
    client.go.set()
    while store.abandoned.now:
        threading.Event().wait(0.01)
    # An object that was opened too late is given up: nothing else is carried on by nobody.
    assert [call for call in client.calls[len(before) :] if call != "abort"] == []
    assert name in line or name == "open_new"
    assert store.abandoned == Abandoned(now=0, total=1)


@pytest.mark.parametrize("name", ["write", "close"])
def test_a_stream_that_hangs_is_unavailable_after_the_limit_and_can_be_given_up(name, monkeypatch):
    monkeypatch.setattr(deadlines, "_LOOK_EVERY_S", 0.01)

    def write():
        stream.write(b"x")
        stream.close()

    with within(LONG_S) as deadline:
        client = Client(name, deadline)
        stream = RetryingStore(RenamingStore(client)).create("g")
        with pytest.raises(UnavailableError, match=rf"did not answer {name} within"):
            write()
    stream.abort()

    assert client.calls[-1] == "abort"
    client.go.set()


def fail():
    raise FileNotFoundError(2, "gone")


def test_a_call_that_answers_is_made_within_the_same_context_and_raises_what_it_raised():
    callers = Callers("it")
    with within(LONG_S):
        assert callers.call("tell", "p", left_s) == pytest.approx(LONG_S, abs=5)
        with pytest.raises(FileNotFoundError, match="gone"):
            callers.call("tell", "p", fail)


def test_calls_one_after_the_other_share_a_thread():
    callers, threads = Callers("it"), set()
    with within(LONG_S):
        for _ in range(20):
            callers.call("tell", "p", lambda: threads.add(threading.get_ident()))

    assert len(threads) <= 5  # one may be late to say that it rests
    assert threading.get_ident() not in threads


def test_where_no_limit_is_set_a_call_is_made_where_it_stands():
    assert Callers("it").call("tell", "p", threading.get_ident) == threading.get_ident()


def test_abandoned_calls_are_bounded_and_the_oldest_is_named(monkeypatch):
    monkeypatch.setattr(deadlines, "_LOOK_EVERY_S", 0.01)
    callers, go = Callers("it"), threading.Event()

    def hang(deadline):
        deadline.until = 0.0  # over once it hangs, as above
        return go.wait(LONG_S)

    for number in range(MOST_ABANDONED):
        with within(LONG_S) as deadline, pytest.raises(UnavailableError):
            callers.call("find", f"p{number}", partial(hang, deadline))

    with within(LONG_S), pytest.raises(UnavailableError, match=r"32 calls of it hang.*'p0'"):
        callers.call("find", "another", fail)
    assert callers.num_abandoned == MOST_ABANDONED

    go.set()
    while callers.num_abandoned:
        threading.Event().wait(0.01)
    with within(LONG_S):
        assert callers.call("find", "another", lambda: 1) == 1


def test_attempts_and_waits_end_with_the_limit():
    slept = []
    outage = Client()
    outage.asked = lambda *_: (_ for _ in ()).throw(UnavailableError("outage"))
    store = RetryingStore(
        RenamingStore(outage),
        waits_s=[0.01, 0.02, 50.0, 60.0],
        give_up_after_s=30,
        sleep=slept.append,
    )

    with pytest.raises(UnavailableError, match="outage"):
        store.stat("f")

    assert slept == [0.01, 0.02]


def test_what_moves_bytes_by_itself_gets_time_for_them_and_progress_begins_anew():
    with within(10.0) as deadline:
        with allowing(100 << 20):
            assert deadline.left_s() == pytest.approx(110, abs=5)
        deadline.until -= 9
        renew()
        assert deadline.left_s() == pytest.approx(10, abs=5)


def test_a_wait_for_the_writes_of_a_file_takes_nothing_from_publishing_it():
    left = []
    client = Client()
    store = RetryingStore(ObjectStore(client), give_up_after_s=LONG_S)

    store.publish("f", b"1", lambda _: left.append(left_s()))

    assert left == [None]
    assert client.calls[-1] == "close"


def test_an_opening_that_hangs_holds_nobody_else():
    opened, go = threading.Event(), threading.Event()
    opens = []

    def open_file(path):
        opens.append(path)
        if len(opens) == 1:
            opened.set()
            assert go.wait(LONG_S)
        return len(opens)

    held = HandleCache(open_file, any_path=True)
    thread = threading.Thread(target=held.opened, args=("p",))
    thread.start()
    assert opened.wait(LONG_S)

    with within(0.2):
        assert held.opened("p") == 2
    go.set()
    thread.join()


def test_threads_that_waited_for_markers_share_the_outage():
    client = Client("listing")
    with some_files(RetryingStore(RenamingStore(client), give_up_after_s=1.0, waits_s=())) as files:
        failed = []

        def look():
            try:
                files.directories.of("d")
            except UnavailableError as error:
                failed.append(str(error))

        threads = [threading.Thread(target=look) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)

        assert len(failed) == 8
        # Threads that came late may have asked once more; that each asked is what must not be.
        assert client.calls.count("listing") <= 4
        client.go.set()


def test_where_the_system_gives_no_thread_the_store_is_unavailable_and_asked_again(monkeypatch):
    refusals = ["can't start new thread"]

    def start(caller):
        if refusals:
            raise RuntimeError(refusals.pop())
        threading.Thread.start(caller)

    monkeypatch.setattr(deadlines._Caller, "start", start, raising=False)
    callers = Callers("client")
    with within(LONG_S):
        with pytest.raises(UnavailableError, match=r"no thread is left to find in: .*pids.max"):
            callers.call("find", "f", lambda: "found")

        assert callers.call("find", "f", lambda: "found") == "found"
